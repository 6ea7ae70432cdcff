"""Where blocks lie: padded strides, interleaved caches, pools beyond 4 GiB, and the dtypes of bytes."""

import pytest
import torch

from flash_mla import kv_cache
from flash_mla.testing import make_case, poison_unused

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("any_tile")]


@pytest.mark.parametrize("gap", [0, 576 * 3, 576 * 1000])
def test_block_stride_larger_than_a_block(record, gap, device):
    """With NaN bytes in the gap."""
    stride = record.default_block_stride(16)
    gap = gap // record.block_align * record.block_align
    case = make_case(
        3, 1, 8, 100, 80, record=record, device=device, page=16, extra_page=16,
        block_stride=stride + gap, extra_block_stride=stride + 2 * gap,
    )  # fmt: skip
    assert case.kv.stride(0) == stride + gap
    poison_unused(case)
    case.check()


@pytest.mark.parametrize("page, extra_page", [(64, 2), (64, 64), (3, 256)])
def test_two_caches_interleaved_in_one_pool(record, page, extra_page, device):
    case = make_case(
        3, 1, 8, 100, 80, record=record, device=device, page=page, extra_page=extra_page,
        num_blocks=40, extra_num_blocks=40,
    )  # fmt: skip
    expected = case.run()
    main_bytes = record.default_block_stride(page)
    stride = main_bytes + record.default_block_stride(extra_page)
    pool = torch.zeros(40 * stride, dtype=torch.uint8, device=device)
    # The same bytes elsewhere: packed anew, a group may get another scale for the same values.
    kv = kv_cache.view_pool(pool, 40, page, record, stride).copy_(case.kv)
    extra_kv = kv_cache.view_pool(pool[main_bytes:], 40, extra_page, record, stride).copy_(case.extra_kv)
    interleaved = case.replace(kv=kv, extra_kv=extra_kv)
    poison_unused(interleaved)
    got = interleaved.run()
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("dtype", kv_cache.BYTE_DTYPES, ids=str)
def test_any_one_byte_dtype(record, dtype, device):
    case = make_case(3, 1, 8, 100, 80, record=record, device=device)
    expected = case.run()
    got = case.replace(kv=case.kv.view(dtype), extra_kv=case.extra_kv.view(dtype)).run()
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("any_tile", [None, (64, 1, 16)], indirect=True, ids=["planned", "tile64"])
@pytest.mark.parametrize("page", [1, 64])
def test_pool_beyond_4_gib(record, page, device):
    """Keys at both ends and just around 2 and 4 GiB of a pool of 5 GiB, in main and extra cache."""
    stride = record.default_block_stride(page)
    num_blocks = 5 * 2**30 // stride
    pool = torch.empty(num_blocks * stride, dtype=torch.uint8, device=device)
    kv = kv_cache.view_pool(pool, num_blocks, page, record, stride)
    num_slots = kv_cache.num_slots(kv)
    around = [0, 2**31 // stride * page, 2**32 // stride * page, num_slots - 1]
    slots = torch.tensor(
        [slot + i for slot in around for i in range(-16, 17) if 0 <= slot + i < num_slots],
        device=device,
    )
    small = make_case(2, 1, 8, len(slots), len(slots), record=record, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    keys = torch.randn(len(slots), record.d_qk, generator=generator, device=device) / 10
    kv_cache.scatter(kv, record, slots, keys, power_of_two_scales=True)
    order = torch.argsort(torch.rand(2, 1, len(slots), generator=generator, device=device))
    case = small.replace(
        kv=kv, extra_kv=kv, indices=slots[order].int(), extra_indices=slots[order.flip(0)].int()
    )
    case.check()
    # The keys that the reference gathered are those that were written, so both were read there.
    written = kv_cache.unpack(kv_cache.pack(keys[None], record, None, None, True), record)[0]
    assert torch.equal(kv_cache.gather(kv, record, slots), written)


def test_cache_in_the_middle_of_its_storage(record, device):
    case = make_case(2, 1, 8, 50, record=record, device=device)
    expected = case.run()
    offset = 5 * 576
    stride = case.kv.stride(0)
    pool = torch.full((offset + case.kv.shape[0] * stride + 999,), 0xFF, device=device).byte()
    num_blocks, page = case.kv.shape[:2]
    kv = kv_cache.view_pool(pool[offset:], num_blocks, page, record, stride).copy_(case.kv)
    got = case.replace(kv=kv).run()
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
