"""Zero rows of q, with which callers pad to 64 heads, in tiles of 8 and 16 rows: bit for bit as in a call of their tile alone."""

import pytest
import torch

import flash_mla
from flash_mla.testing import assert_close_flashmla, make_case

pytestmark = pytest.mark.gpu

DENORMAL, NEGATIVE_ZERO = 1, -0x8000  # bf16 bit patterns, as int16


def rows(*zero):
    """A pattern of 64 rows: true for the zero rows, given as (first, last + 1)."""
    pattern = torch.zeros(64, dtype=torch.bool)
    for first, end in zero:
        pattern[first:end] = True
    return pattern


PATTERNS = {
    "8 real": rows((8, 64)),
    "16 real": rows((16, 64)),
    "20 real": rows((20, 64)),
    "all zero": rows((0, 64)),
    "none": rows(),
    "one zero row": rows((15, 16)),
    "zero tile without a zero row before it": rows((16, 32)),
    "zero tiles in the middle": rows((15, 48)),
    "two runs": rows((8, 32), (47, 64)),
    "zero row early in the tile before": rows((3, 4), (16, 32)),
    "first tile only": rows((0, 16)),
    "7 real": rows((7, 64)),
    "24 real": rows((24, 64)),
    "tile of 8 behind a zero row": rows((15, 24), (31, 40)),
}


def padded_case(record, pattern, device, tokens=3, heads=64, seed=0):
    case = make_case(
        tokens, 1, heads, 200, 70, record=record, device=device, seed=seed, sinks=True,
        invalid_fraction=0.1, lengths="random", extra_lengths="random",
    )  # fmt: skip
    case.q[:, :, pattern[:heads].to(device)] = 0
    return case


def tile_by_tile(case, head_tile, **plan):
    """The same heads in calls of one tile each."""
    results = []
    for first in range(0, case.q.shape[2], head_tile):
        part = slice(first, first + head_tile)
        meta = flash_mla.get_mla_metadata()[0].force_plan(head_tile=head_tile, **plan)
        results.append(case.replace(q=case.q[:, :, part], attn_sink=case.attn_sink[part]).run(meta))
    return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 1)


def check(case, splits, block_keys):
    """Tiles of 16 and of 8 rows."""
    check_tile(case, 16, splits=splits, block_keys=block_keys)
    return check_tile(case, 8, splits=splits, block_keys=block_keys)


def check_tile(case, head_tile, **plan):
    expected = tile_by_tile(case, head_tile, **plan)
    out = torch.full((*case.q.shape[:3], 512), torch.nan, dtype=torch.bfloat16, device=case.q.device)
    got = case.run(flash_mla.get_mla_metadata()[0].force_plan(head_tile=head_tile, **plan), out=out)
    # As bits: NaN compares equal to itself, 0 and -0 do not.
    assert torch.equal(got[0].view(torch.int16), expected[0].contiguous().view(torch.int16))
    assert torch.equal(got[1].view(torch.int32), expected[1].contiguous().view(torch.int32))
    return got


@pytest.mark.parametrize("splits, block_keys", [(1, 32), (1, 64), (3, 32), (8, 64), (16, 32)])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=list(PATTERNS))
def test_any_pattern(record, pattern, splits, block_keys, device):
    check(padded_case(record, pattern, device), splits=splits, block_keys=block_keys)


@pytest.mark.parametrize("heads", [17, 24, 31, 33, 48, 63, 65, 100, 128])
def test_any_number_of_heads(record, heads, device):
    pattern = torch.zeros(128, dtype=torch.bool)
    pattern[5:] = True
    check(padded_case(record, pattern, device, heads=heads), splits=4, block_keys=32)


def test_every_token_has_its_own_pattern(record, device):
    case = padded_case(record, rows(), device, tokens=len(PATTERNS))
    for token, pattern in enumerate(PATTERNS.values()):
        case.q[token, :, pattern.to(device)] = 0
    check(case, splits=5, block_keys=32)


def test_negative_zero_is_zero_and_a_denormal_or_nan_is_not(record, device):
    case = padded_case(record, rows((8, 64)), device, tokens=4)
    bits = case.q.view(torch.int16)
    bits[0, :, 8:] = NEGATIVE_ZERO
    bits[1, :, 40, 300] = DENORMAL
    bits[2, :, 15, record.d_qk - 1] = DENORMAL
    case.q[3, :, 50, 511] = torch.nan
    out, lse = check(case, splits=4, block_keys=32)
    assert out[3, :, 50].isnan().all() and lse[3, 50].isnan().all()
    assert out[3, :, 51:].isfinite().all() and out[:3].isfinite().all()


def test_against_the_reference_with_the_chosen_plan(record, device):
    for name in ("8 real", "16 real", "all zero", "two runs"):
        for tokens in (1, 3, 20):
            padded_case(record, PATTERNS[name], device, tokens=tokens).check()


def test_zero_rows_of_tokens_without_keys(record, device):
    case = padded_case(record, rows((8, 64)), device)
    case.topk_length.zero_()
    case.extra_topk_length.zero_()
    out, lse = check(case, splits=2, block_keys=32)
    assert (out == 0).all() and (lse == torch.inf).all()


# Rows at odd addresses, at multiples of 4 bytes and of 16: where they begin in a longer one, and by how much it is longer.
ALIGNMENTS = pytest.mark.parametrize("offset, more", [(1, 3), (2, 6), (8, 16)], ids=["2 bytes", "4 bytes", "16 bytes"])


def within(like, dims, offset, more, fill):
    """A buffer, and in it a tensor with the first dimensions of `like` and rows of `dims`."""
    b, s_q, heads = like.shape[:3]
    buffer = torch.full((b, s_q, heads + 1, dims + more), fill, dtype=torch.bfloat16, device=like.device)
    return buffer, buffer[:, :, :heads, offset : offset + dims]


def q_within(case, offset, more):
    """The same q, NaN around it."""
    return within(case.q, case.q.shape[-1], offset, more, torch.nan)[1].copy_(case.q)


def out_within(case, offset, more):
    """A buffer of 7s, and an `out` in it."""
    return within(case.q, 512, offset, more, 7.0)


def assert_only_within(buffer, offset):
    assert (buffer[:, :, -1] == 7.0).all()
    assert (buffer[..., :offset] == 7.0).all() and (buffer[..., offset + 512 :] == 7.0).all()


@ALIGNMENTS
@pytest.mark.parametrize("splits", [1, 5])
def test_rows_wherever_they_lie(record, splits, offset, more, device):
    """q and out a slice of larger tensors, whose rows are at odd addresses, at multiples of 4 bytes and of 16."""
    case = make_case(3, 2, 20, 200, 70, record=record, device=device, sinks=True, lengths="random")
    case.q[:, :, 8:] = 0
    plan = dict(head_tile=8, splits=splits, block_keys=32)
    expected = case.run(flash_mla.get_mla_metadata()[0].force_plan(**plan))
    buffer, out = out_within(case, offset, more)
    got = case.replace(q=q_within(case, offset, more)).run(flash_mla.get_mla_metadata()[0].force_plan(**plan), out=out)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert_only_within(buffer, offset)
    assert_close_flashmla(*got, *case.reference())


def test_a_graph_is_replayed_with_other_rows_zero(record, device):
    """Whatever has to be known of q is looked at in every launch."""
    case = padded_case(record, rows(), device)
    full = case.q.clone()
    meta = flash_mla.get_mla_metadata()[0].force_plan(head_tile=8, splits=4, block_keys=32)
    case.run(meta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.run(meta)
    for name in "8 real", "none", "zero tiles in the middle", "all zero", "16 real", "none":
        case.q.copy_(full)
        case.q[:, :, PATTERNS[name].to(device)] = 0
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert_close_flashmla(out, lse, *case.reference())
