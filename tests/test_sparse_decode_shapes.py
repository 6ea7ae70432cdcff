"""Tokens per request, strided tensors, outputs given by the caller, and batches of nothing."""

import pytest
import torch

import flash_mla
from flash_mla.testing import assert_close_flashmla, make_case

ANY_TILE = pytest.mark.parametrize(
    "any_tile",
    [None, (16, 3, 0), (64, 1, 0), (64, 3, 0), (64, 3, 16)],
    indirect=True,
    ids=["planned", "tile16-splits3", "tile64-padded", "tile64-padded-splits3", "tile64-splits3"],
)
pytestmark = pytest.mark.gpu


@ANY_TILE
@pytest.mark.parametrize("s_q", [1, 2, 3, 5])
@pytest.mark.parametrize("b", [1, 7])
def test_tokens_per_request(record, s_q, b, device, any_tile):
    make_case(b, s_q, 8, 100, 60, record=record, device=device, lengths="random").check()


@ANY_TILE
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_vllm_shape_of_v32(record, tokens, device, any_tile):
    """b = 1 and s_q = tokens: one length for all of them."""
    make_case(1, tokens, 8, 128, record=record, device=device, lengths=[100]).check()


@pytest.mark.parametrize(
    "plan", [dict(block_keys=32), dict(head_tile=64)], ids=["tile8", "tile64"]
)
def test_q_and_out_beyond_4_gib(plan, device):
    """70,000 tokens of 128 heads: over 2^32 elements of q and of out, and more tokens than 2^16."""
    tokens = 70_000
    case = make_case(tokens, 1, 1, 3, device=device)
    case = case.replace(q=case.q.repeat(1, 1, 128, 1))
    meta = flash_mla.FlashMLASchedMeta().force_plan(splits=2, **plan)
    out, lse = case.run(meta)
    for part in slice(0, 3), slice(32766, 32770), slice(65534, 65538), slice(tokens - 3, tokens):
        names = ("q", "indices")
        some = case.replace(**{name: getattr(case, name)[part] for name in names})
        assert_close_flashmla(out[part], lse[part], *some.reference())


@ANY_TILE
@pytest.mark.parametrize("b, s_q", [(0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("extra_topk", [0, 8])
def test_no_tokens(record, b, s_q, extra_topk, device, any_tile):
    out, lse = make_case(b, s_q, 8, 16, extra_topk, record=record, device=device).run()
    assert out.shape == (b, s_q, 8, 512) and out.dtype == torch.bfloat16
    assert lse.shape == (b, 8, s_q) and lse.dtype == torch.float32


# ---- Strides -------------------------------------------------------------------------------------


def padded(tensor, before, after, fill):
    """The same values as a slice of a larger tensor; before, after: elements per dimension."""
    shape = [n + x + y for n, x, y in zip(tensor.shape, before, after)]
    buffer = torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)
    view = buffer[tuple(slice(x, x + n) for n, x in zip(tensor.shape, before))]
    view.copy_(tensor)
    return view


@ANY_TILE
@pytest.mark.parametrize(
    "before, after",
    [
        ((1, 1, 8, 0), (1, 2, 48, 0)),  # a slice of heads
        ((0, 0, 0, 64), (0, 0, 0, 64)),  # a slice of dims
        ((0, 0, 1, 1), (0, 0, 0, 2)),  # rows at odd addresses
    ],
)
@pytest.mark.parametrize("h_q", [8, 20, 100])
def test_strided_q(record, h_q, before, after, device, any_tile):
    case = make_case(3, 2, h_q, 100, record=record, device=device)
    at_odd_addresses = before[-1] % 2 == 1  # whether such rows are padding, tiles of 64 rows do not ask
    expected = case.replace(q=padded(case.q, (0, 0, 0, 3), (0, 0, 0, 2), torch.nan) if at_odd_addresses else case.q).run()
    got = case.replace(q=padded(case.q, before, after, torch.nan)).run()
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert_close_flashmla(*got, *case.reference())


@ANY_TILE
@pytest.mark.parametrize("h_q", [8, 20, 100])
def test_transposed_q(record, h_q, device, any_tile):
    """Heads outermost, and a batch that repeats one request by a stride of 0."""
    case = make_case(3, 2, h_q, 100, record=record, device=device)
    expected = case.run()
    heads_first = case.q.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    got = case.replace(q=heads_first).run()
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    case.replace(q=case.q[:1].expand(3, -1, -1, -1)).check()


@ANY_TILE
@pytest.mark.parametrize("start", [0, 1, 5])
def test_strided_indices(record, start, device, any_tile):
    """Slices of wider index tensors, whose rows begin at any multiple of 4 bytes."""
    case = make_case(3, 2, 8, 100, 61, record=record, device=device)
    expected = case.run()
    got = case.replace(
        indices=padded(case.indices, (1, 0, start), (0, 1, 3), 10**9),
        extra_indices=padded(case.extra_indices, (0, 1, start), (0, 0, 2), -7),
    ).run()
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


# ---- Outputs given by the caller -----------------------------------------------------------------


@ANY_TILE
@pytest.mark.parametrize("h_q", [1, 8, 20, 100])
@pytest.mark.parametrize(
    "before, after",
    [
        ((0, 0, 0, 0), (0, 0, 0, 0)),  # contiguous
        ((0, 0, 0, 0), (0, 0, 56, 0)),  # buffer[:, :, :8]
        ((1, 1, 3, 64), (1, 1, 2, 64)),  # a slice in every dimension
        ((0, 0, 1, 1), (0, 0, 0, 2)),  # rows at odd addresses
    ],
)
def test_out_is_written_and_nothing_around_it(record, h_q, before, after, device, any_tile):
    case = make_case(3, 2, h_q, 100, 40, record=record, device=device)
    expected, expected_lse = case.run()
    out = padded(torch.empty_like(expected), before, after, 7.0)
    out.fill_(-3.0)
    returned, lse = case.run(out=out)
    assert returned.data_ptr() == out.data_ptr() and returned.stride() == out.stride()
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    out.fill_(7.0)
    buffer = torch.empty(0, dtype=out.dtype, device=device).set_(out.untyped_storage())
    assert (buffer == 7.0).all()


@ANY_TILE
@pytest.mark.parametrize("h_q", [8, 20, 100])
def test_transposed_out(record, h_q, device, any_tile):
    case = make_case(3, 2, h_q, 100, record=record, device=device)
    out = torch.empty(h_q, 2, 3, 512, dtype=torch.bfloat16, device=device).permute(2, 1, 0, 3)
    _, lse = case.run(out=out)
    assert_close_flashmla(out, lse, *case.reference())


@ANY_TILE
def test_empty_rows_are_written_too(record, device, any_tile):
    """Whatever the buffer held, a row without keys becomes 0."""
    case = make_case(3, 1, 8, 64, record=record, device=device, lengths=[0, 64, 0])
    out = torch.full((3, 1, 8, 512), torch.nan, dtype=torch.bfloat16, device=device)
    assert_close_flashmla(*case.run(out=out), *case.reference())


@ANY_TILE
def test_one_sched_meta_for_several_layers(record, device, any_tile):
    """Same shapes, other tensors: the plan of the first call serves them all."""
    meta, _ = flash_mla.get_mla_metadata()
    assert meta.plan is None
    plans = set()
    for seed in range(3):
        make_case(2, 1, 8, 128, 64, record=record, device=device, seed=seed).check(meta)
        plans.add(str(meta.plan))
    assert len(plans) == 1
