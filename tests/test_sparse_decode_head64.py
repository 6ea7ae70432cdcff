"""What the 64-row tile is for: many heads, many tokens, long lists. And it agrees with the tile of 16 rows."""

import pytest
import torch

import flash_mla
from flash_mla.testing import assert_close_flashmla, make_case

pytestmark = pytest.mark.gpu


def forced(head_tile, splits):
    return flash_mla.FlashMLASchedMeta().force_plan(head_tile=head_tile, splits=splits)


@pytest.mark.parametrize("splits", [1, 4, 16])
@pytest.mark.parametrize("h_q", [64, 128])
def test_topk_16384(record, h_q, splits, device):
    case = make_case(2, 1, h_q, 16384, record=record, device=device, lengths=[16384, 12345])
    case.check(forced(64, splits))


@pytest.mark.parametrize("splits", [1, 2])
def test_321_requests_of_3_rows(record, splits, device):
    case = make_case(
        321, 3, 64, 128, 100, record=record, device=device, lengths="random", sinks=True,
        invalid_fraction=0.1,
    )  # fmt: skip
    case.check(forced(64, splits))


@pytest.mark.parametrize("h_q", [1, 8, 17, 32, 63, 64, 65, 100, 128])
@pytest.mark.parametrize("topk, extra_topk", [(128, 0), (128, 512), (2048, 0)])
def test_it_agrees_with_the_tile_of_16_rows(record, h_q, topk, extra_topk, device):
    case = make_case(
        5, 1, h_q, topk, extra_topk, record=record, device=device, sinks=True, lengths="random"
    )
    out, lse = case.run(forced(16, 2))
    for splits in 1, 2, 5:
        assert_close_flashmla(*case.run(forced(64, splits)), out, lse)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8, 9, 16])
@pytest.mark.parametrize("topk, extra_topk", [(16, 0), (97, 0), (128, 512), (2048, 0)])
def test_two_tiles_of_a_token_are_bit_for_bit_those_of_calls_of_their_own(
    record, topk, extra_topk, splits, device
):
    """Of up to 64 heads another kernel asks first whether they are padded."""
    case = make_case(
        5, 2, 128, topk, extra_topk, record=record, device=device, sinks=True, invalid_fraction=0.1,
        lengths="random", extra_lengths="random" if extra_topk else None,
    )  # fmt: skip
    out, lse = case.run(forced(64, splits))
    assert_close_flashmla(out, lse, *case.reference())
    for part in slice(0, 64), slice(64, 128):
        half = case.replace(q=case.q[:, :, part], attn_sink=case.attn_sink[part])
        expected, expected_lse = half.run(forced(64, splits))
        assert torch.equal(out[:, :, part], expected)
        assert torch.equal(lse[:, part], expected_lse)


@pytest.mark.parametrize("heads", [65, 72, 100, 127])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_a_second_tile_with_rows_that_do_not_exist(record, heads, splits, device):
    case = make_case(7, 1, heads, 300, record=record, device=device, sinks=True, lengths="random")
    case.check(forced(64, splits))


def test_several_waves_of_many_blocks(record, device):
    case = make_case(150, 1, 128, 1500, record=record, device=device, lengths="random")
    for splits in 1, 4:
        case.check(forced(64, splits))


def test_q_of_infinities_without_keys(record, device):
    """A row without keys is 0 whatever q holds."""
    case = make_case(2, 1, 64, 128, record=record, device=device, lengths=[0, 128])
    case.q[0].fill_(torch.inf)
    out, lse = case.run(forced(64, 1))
    assert (out[0] == 0).all() and (lse[0] == torch.inf).all()
    case.indices[0].fill_(-1)
    case.topk_length[0] = 128
    out, lse = case.run(forced(64, 1))
    assert (out[0] == 0).all() and (lse[0] == torch.inf).all()
