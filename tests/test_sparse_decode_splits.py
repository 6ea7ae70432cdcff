"""Forced plans agree with the reference and with each other; every split count that is chosen runs."""

import itertools

import pytest
import torch

import flash_mla
from flash_mla.testing import assert_close_flashmla, make_case

pytestmark = pytest.mark.gpu

SPLITS = range(1, 17)
# (head_tile, block_keys)
TILES = [(8, 32), (8, 64), (16, 32), (16, 64), (64, 64)]


def forced(head_tile, splits, block_keys):
    return flash_mla.FlashMLASchedMeta().force_plan(
        head_tile=head_tile, splits=splits, block_keys=block_keys
    )


def as_tuple(plan):
    return plan.head_tile, plan.splits, plan.block_keys


@pytest.mark.parametrize("h_q", [8, 16, 40, 128])
@pytest.mark.parametrize("topk, extra_topk", [(1, 0), (70, 0), (128, 512), (1000, 333)])
def test_forced_splits_agree(record, h_q, topk, extra_topk, device):
    """All tiles, with any splits. Splits without a single key are among them: 16 of one key."""
    case = make_case(
        3, 2, h_q, topk, extra_topk, record=record, device=device, sinks=True, invalid_fraction=0.1
    )
    reference = case.reference()
    first = None
    for (head_tile, block_keys), splits in itertools.product(TILES, SPLITS):
        plan = head_tile, splits, block_keys
        meta = forced(*plan)
        result = case.run(meta)
        assert as_tuple(meta.plan) == plan
        assert_close_flashmla(*result, *reference)
        first = first or result
        assert_close_flashmla(*result, *first)


@pytest.mark.parametrize("h_q", [8, 24])
@pytest.mark.parametrize("head_tile, block_keys", TILES)
def test_forced_splits_with_any_lengths(record, head_tile, block_keys, h_q, device):
    """Tokens whose keys end before a split's range begins, in either cache: no CTA waits for ever."""
    lengths = [0, 0, 300, 300, 1, 17, 150, 300, 33]
    extra_lengths = [0, 200, 0, 200, 1, 0, 64, 199, 5]
    case = make_case(
        9, 1, h_q, 300, 200, record=record, device=device, lengths=lengths, extra_lengths=extra_lengths
    )
    reference = case.reference()
    for splits in SPLITS:
        assert_close_flashmla(*case.run(forced(head_tile, splits, block_keys)), *reference)


@pytest.mark.parametrize("h_q", [16, 24])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("head_tile, block_keys", TILES)
def test_last_blocks_of_any_length(record, head_tile, block_keys, splits, h_q, device):
    """What lies in a block behind a split's end is no key."""
    ends = [1, 16, 31, 32, 33, 47, 48, 49, 63]
    lengths = [whole + end for whole in (0, 64, 320) for end in (0, *ends)]
    case = make_case(
        len(lengths), 1, h_q, 400, record=record, device=device, lengths=lengths, invalid_fraction=0.1
    )
    assert_close_flashmla(*case.run(forced(head_tile, splits, block_keys)), *case.reference())


@pytest.mark.parametrize("blocks", [1, 3, 4, 5, 6, 7, 8, 9, 13])
@pytest.mark.parametrize("head_tile, block_keys", TILES)
def test_blocks_around_the_stages_of_the_ring(record, head_tile, block_keys, blocks, device):
    """4 stages of 64 keys or 6 of 32: fewer blocks than that fill them once, more fill them again.

    The last block is whole, or one of a few keys. Of 40 heads those from 16 on may be padding.
    """
    for real, missing in (16, 0), (40, block_keys - 3):
        topk = 2 * blocks * block_keys - missing
        case = make_case(
            2, 1, 40, topk, record=record, device=device, sinks=True, invalid_fraction=0.02
        )
        case.q[:, :, real:] = 0
        meta = forced(head_tile, 2, block_keys)
        assert_close_flashmla(*case.run(meta), *case.reference())


def test_every_split_count_that_the_plan_chooses(record, device):
    """One call for each plan found over the shapes that callers have."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    shapes = {}
    for tokens in [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 200, 256]:
        for width in [1, 16, 32, 48, 64, 96, 128, 192, 256, 320, 640, 1024, 1152, 2048, 4096]:
            for heads in [8, 16, 64]:
                plan = tuple(torch.ops.flash_mla.sparse_decode_plan(tokens, width, heads, num_sms))
                shapes.setdefault(plan, (tokens, width, heads))
    assert len(shapes) > 1
    for plan, (tokens, width, heads) in shapes.items():
        meta, _ = flash_mla.get_mla_metadata()
        make_case(tokens, 1, heads, width, record=record, device=device).check(meta)
        assert as_tuple(meta.plan) == plan
