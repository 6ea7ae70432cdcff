"""Indices that name no key, lengths out of range, and NaN and Inf bytes in every slot not used."""

import itertools

import pytest
import torch

import flash_mla
from flash_mla import kv_cache
from flash_mla.testing import (
    INT32_MAX,
    INT32_MIN,
    assert_close_flashmla,
    make_case,
    poison_unused,
)

pytestmark = pytest.mark.gpu

# (head tile, splits, block keys); None: the library's choice.
PLANS = [None, (8, 1, 32), (8, 1, 64), (16, 3, 64), (8, 16, 32), (16, 16, 64)]
PLANS += [(64, 1, 64), (64, 3, 64), (64, 16, 64)]


def check_with_every_plan(case):
    """Poison what no index names, then compare; forced plans put the holes into other splits."""
    poison_unused(case)
    reference = case.reference()
    for plan in PLANS:
        meta = flash_mla.FlashMLASchedMeta()
        if plan is not None:
            meta = meta.force_plan(head_tile=plan[0], splits=plan[1], block_keys=plan[2])
        assert_close_flashmla(*case.run(meta), *reference)


# Which of 200 indices are made invalid.
PLACES = {
    "first": lambda i: i == 0,
    "last": lambda i: i == 199,
    "leading 32": lambda i: i < 32,
    "leading 64": lambda i: i < 64,
    "leading 70": lambda i: i < 70,
    "trailing 64": lambda i: i >= 136,
    "trailing 70": lambda i: i >= 130,
    "every other": lambda i: i % 2 == 0,
    "every other 16": lambda i: i // 16 % 2 == 0,
    "all but the first": lambda i: i > 0,
    "all but one in the middle": lambda i: i != 100,
    "all but the last": lambda i: i < 199,
    "all": lambda i: i >= 0,
}


@pytest.mark.parametrize("place", PLACES)
def test_places_of_invalid_indices(record, place, device):
    """Each place in the main cache, in the extra cache, and in both (one token each)."""
    case = make_case(3, 1, 8, 200, 200, record=record, device=device)
    hole = PLACES[place](torch.arange(200, device=device))
    for token, lists in enumerate(
        [(case.indices,), (case.extra_indices,), (case.indices, case.extra_indices)]
    ):
        for indices in lists:
            indices[token, :, hole] = -1
    check_with_every_plan(case)


@pytest.mark.parametrize("bad", [-1, -2, INT32_MIN, INT32_MAX, "one past the end", "far past the end"])
def test_values_of_invalid_indices(record, bad, device):
    """The extra cache is the smaller one: what is past its end is a slot of the main cache."""
    case = make_case(
        4, 1, 8, 100, 100, record=record, device=device, page=3, extra_page=2,
        num_blocks=200, extra_num_blocks=100,
    )  # fmt: skip
    for kv, indices in (case.kv, case.indices), (case.extra_kv, case.extra_indices):
        past = {"one past the end": 0, "far past the end": 300}
        value = kv_cache.num_slots(kv) + past[bad] if bad in past else bad
        indices[0, :, 10:40] = value
        indices[1, :, ::3] = value
        indices[2] = value
    check_with_every_plan(case)


def test_one_past_the_end_with_a_slot_behind_it(device):
    """The next block exists in the pool but not in the cache, and holds NaN."""
    case = make_case(2, 1, 8, 60, device=device, num_blocks=8)
    case = case.replace(kv=case.kv[:4])
    case.indices[0, :, ::2] = 4 * 64
    check_with_every_plan(case)


@pytest.mark.parametrize("h_q", [8, 16])
def test_lengths_out_of_range(record, h_q, device):
    """Every pair of lengths of the two caches; behind a length lies garbage."""
    topk, extra_topk = 100, 70
    lengths = [INT32_MIN, -1, 0, 1, 50, topk - 1, topk, topk + 1, INT32_MAX]
    extra_lengths = [-1, 0, 1, 33, extra_topk, extra_topk + 1, INT32_MAX]
    pairs = list(itertools.product(lengths, extra_lengths))
    case = make_case(
        len(pairs), 1, h_q, topk, extra_topk, record=record, device=device,
        lengths=[pair[0] for pair in pairs], extra_lengths=[pair[1] for pair in pairs],
    )  # fmt: skip
    garbage_behind_the_lengths(case)
    check_with_every_plan(case)


def garbage_behind_the_lengths(case):
    values = torch.tensor([INT32_MIN, -1, INT32_MAX, 2**30, 10**9 + 7, 0, 1], dtype=torch.int32)
    for indices, length in (
        (case.indices, case.topk_length),
        (case.extra_indices, case.extra_topk_length),
    ):
        column = torch.arange(indices.shape[-1], device=indices.device)
        garbage = values.to(indices.device)[column % len(values)]
        behind = column >= length[:, None, None].clamp(0, indices.shape[-1])
        indices.copy_(torch.where(behind, garbage, indices))


def test_length_of_one_cache_only(record, device):
    case = make_case(3, 2, 8, 100, 70, record=record, device=device, lengths=[0, 33, 100])
    check_with_every_plan(case)
    case = make_case(3, 2, 8, 100, 70, record=record, device=device, extra_lengths=[0, 33, 70])
    check_with_every_plan(case)


def test_rows_with_keys_in_neither_one_or_both_caches(record, device):
    case = make_case(
        4, 1, 8, 130, 70, record=record, device=device, sinks=True,
        lengths=[0, 130, 0, 130], extra_lengths=[0, 0, 70, 70],
    )  # fmt: skip
    check_with_every_plan(case)
    out, lse = case.run()
    assert (out[0] == 0).all() and (lse[0] == torch.inf).all()
    assert lse[1:].isfinite().all()


def test_no_row_has_a_key(record, device):
    case = make_case(5, 2, 20, 130, 70, record=record, device=device, sinks=True)
    case.indices.fill_(-1)
    case.extra_indices.fill_(INT32_MAX)
    check_with_every_plan(case)
    out, lse = case.run()
    assert (out == 0).all() and (lse == torch.inf).all()


def test_slot_zero_is_no_substitute_for_an_invalid_one(record, device):
    """Slot 0, where an index clamped to the cache would end up, holds NaN like all unused slots."""
    case = make_case(3, 1, 8, 100, 100, record=record, device=device)
    for indices in case.indices, case.extra_indices:
        indices.clamp_(min=64)
        indices[..., ::7] = -1
    check_with_every_plan(case)


@pytest.mark.parametrize("seed", range(6))
def test_random_holes_and_lengths(record, seed, device):
    case = make_case(
        13, 2, [1, 8, 16, 17, 64, 128][seed], [640, 1, 100, 65, 128, 2000][seed],
        [512, 64, 0, 700, 1, 2000][seed], record=record, device=device, seed=seed, sinks=True,
        invalid_fraction=[0.05, 0.3, 0.9, 0.5, 0.1, 0.99][seed],
        lengths="random", extra_lengths="random", page=[64, 3, 53, 256, 1, 64][seed],
    )  # fmt: skip
    check_with_every_plan(case)


def test_the_process_goes_on_after_the_worst_input(device):
    """No sticky CUDA error: the next call is right."""
    case = make_case(4, 1, 8, 100, 100, device=device, lengths=[INT32_MAX] * 4)
    case.indices.random_(INT32_MIN, INT32_MAX)
    case.extra_indices.random_(INT32_MIN, INT32_MAX)
    case.check()
    torch.cuda.synchronize(device)
    make_case(4, 1, 8, 100, 100, device=device, seed=1).check()
