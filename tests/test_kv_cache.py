"""Packing and unpacking cache records, against bytes decoded one by one as the formats say."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_mla import kv_cache
from flash_mla.kv_cache import RECORDS, V4, V32

records = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)


# ---- An independent reader: plain Python, offsets written out from the contract ------------------


def e4m3(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def bf16(low: int, high: int) -> float:
    return struct.unpack("<f", bytes([0, 0, low, high]))[0]


def read_v4(block: bytes, page: int, offset: int) -> list:
    row = block[576 * offset : 576 * offset + 576]
    scales = block[576 * page + 8 * offset : 576 * page + 8 * offset + 7]
    nope = [e4m3(row[i]) * 2.0 ** (scales[i // 64] - 127) for i in range(448)]
    return nope + [bf16(row[i], row[i + 1]) for i in range(448, 576, 2)]


def read_v32(block: bytes, page: int, offset: int) -> list:
    token = block[656 * offset : 656 * offset + 656]
    scales = struct.unpack("<4f", token[512:528])
    nope = [e4m3(token[i]) * scales[i // 128] for i in range(512)]
    return nope + [bf16(token[i], token[i + 1]) for i in range(528, 656, 2)]


def read_pool(pool: torch.Tensor, record, num_blocks: int, page: int, stride: int) -> torch.Tensor:
    """float32 [num_blocks, page, d_qk] from the raw bytes of a pool."""
    read = {"V4": read_v4, "V3.2": read_v32}[record.name]
    data = bytes(pool.tolist())
    blocks = [data[i * stride : (i + 1) * stride] for i in range(num_blocks)]
    return torch.tensor([[read(block, page, t) for t in range(page)] for block in blocks])


def storage_bytes(kv: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(kv.untyped_storage())


def random_keys(num_blocks, page, record, seed=0, magnitude=0.1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_blocks, page, record.d_qk, generator=generator) * magnitude


# ---- Layout ------------------------------------------------------------------------------------


@records
@pytest.mark.parametrize("page", [1, 3, 64])
def test_unpack_reads_what_the_format_says(record, page):
    kv = kv_cache.pack(random_keys(2, page, record), record)
    expected = read_pool(storage_bytes(kv), record, 2, page, kv.stride(0))
    assert torch.equal(kv_cache.unpack(kv, record), expected)


def test_unpack_reads_every_e4m3_byte():
    """All 254 numbers, subnormals and ±448 among them, come out exactly; 0x7f and 0xff are NaN."""
    kv = kv_cache.empty_pool(1, 1, V4)
    pool = storage_bytes(kv)
    pool[:256] = torch.arange(256, dtype=torch.uint8)
    pool[576 : 576 + 7] = 127
    got = kv_cache.unpack(kv, V4)[0, 0, :256]
    expected = torch.tensor([e4m3(byte) for byte in range(256)])
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@records
def test_v_is_the_first_512_dims(record):
    assert record.dim_v == 512
    assert record.rope_in_v == (record is V4)


@records
def test_offsets_tile_the_token_exactly(record):
    """No byte of a token is claimed twice and none is left over, but for V4's padding byte."""
    owners = [0] * record.bytes_per_token
    scale_start = record.row_bytes if record.scales_after_rows else record.scale_offset
    spans = [
        (0, record.nope_dims),
        (record.rope_offset, 2 * record.rope_dims),
        (scale_start, record.scale_bytes),
    ]
    for start, size in spans:
        for byte in range(start, start + size):
            owners[byte] += 1
    assert owners == [1] * record.bytes_per_token
    assert record.nope_dims == record.num_scales * record.scale_group
    assert record.nope_dims + record.rope_dims == record.d_qk


@pytest.mark.parametrize("page", [1, 2, 3, 32, 53, 61, 64, 69, 128, 256, 576])
def test_default_stride_of_v4_is_the_next_multiple_of_576(page):
    stride = V4.default_block_stride(page)
    assert stride % 576 == 0
    assert 584 * page <= stride < 584 * page + 576
    assert V32.default_block_stride(page) == 656 * page


@records
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_stride_and_pool_offset(record, data):
    """Blocks land where stride and offset say, and not one byte between them changes."""
    num_blocks = data.draw(st.integers(1, 4))
    page = data.draw(st.integers(1, 7))
    gap = data.draw(st.integers(0, 700))
    offset = data.draw(st.integers(0, 50)) * 16
    keys = random_keys(num_blocks, page, record, seed=page)
    block = record.block_bytes(page)
    stride = block + gap
    whole = torch.full((offset + num_blocks * stride,), 0xA5, dtype=torch.uint8)
    kv = kv_cache.pack(keys, record, block_stride=stride, pool=whole[offset:])

    assert kv.shape == (num_blocks, page, 1, record.bytes_per_token)
    assert kv.stride(0) == stride and kv.data_ptr() == whole.data_ptr() + offset
    got = kv_cache.unpack(kv, record)
    assert torch.equal(got, kv_cache.unpack(kv_cache.pack(keys, record), record))
    assert torch.equal(got, read_pool(whole[offset:], record, num_blocks, page, stride))
    assert (whole[:offset] == 0xA5).all()
    assert (whole[offset:].view(num_blocks, stride)[:, block:] == 0xA5).all()


def test_two_caches_interleaved_in_one_pool():
    """Blocks of 64 and of 2 tokens take turns; each cache reads as if it were alone."""
    main_bytes, extra_bytes = V4.default_block_stride(64), V4.default_block_stride(2)
    stride = main_bytes + extra_bytes
    pool = torch.zeros(5 * stride, dtype=torch.uint8)
    main_keys, extra_keys = random_keys(5, 64, V4, seed=1), random_keys(5, 2, V4, seed=2)
    main = kv_cache.pack(main_keys, V4, stride, pool)
    extra = kv_cache.pack(extra_keys, V4, stride, pool[main_bytes:])
    for kv, keys in (main, main_keys), (extra, extra_keys):
        alone = kv_cache.pack(keys, V4)
        assert torch.equal(kv_cache.unpack(kv, V4), kv_cache.unpack(alone, V4))


@records
@pytest.mark.parametrize("dtype", kv_cache.BYTE_DTYPES, ids=str)
def test_any_one_byte_dtype(record, dtype):
    kv = kv_cache.pack(random_keys(3, 5, record), record)
    slots = torch.tensor([14, 0, 7])
    assert torch.equal(kv_cache.unpack(kv.view(dtype), record), kv_cache.unpack(kv, record))
    assert torch.equal(
        kv_cache.gather(kv.view(dtype), record, slots), kv_cache.gather(kv, record, slots)
    )
    written = kv_cache.empty_pool(3, 5, record).view(dtype)
    kv_cache.scatter(written, record, slots, kv_cache.gather(kv, record, slots), True)
    assert torch.equal(
        kv_cache.gather(written, record, slots)[..., record.nope_dims :],
        kv_cache.gather(kv, record, slots)[..., record.nope_dims :],
    )


@records
def test_gather_and_scatter_are_unpack_and_pack_by_slot(record):
    keys = random_keys(4, 6, record)
    packed = kv_cache.pack(keys, record)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    written = kv_cache.empty_pool(4, 6, record)
    kv_cache.scatter(written, record, order, keys.flatten(0, 1)[order])
    assert torch.equal(kv_cache.unpack(written, record), kv_cache.unpack(packed, record))
    slots = order.view(2, 3, 4).to(torch.int32)
    expected = kv_cache.unpack(packed, record).flatten(0, 1)[order].view(2, 3, 4, -1)
    assert torch.equal(kv_cache.gather(packed, record, slots), expected)


@records
def test_slots_beyond_4_gib(record):
    """Offsets are computed in 64 bits. The pool is never touched but at its two ends."""
    stride = record.default_block_stride(64)
    num_blocks = 5 * 2**30 // stride
    pool = torch.empty(num_blocks * stride, dtype=torch.uint8)
    kv = kv_cache.view_pool(pool, num_blocks, 64, record, stride)
    keys = random_keys(1, 3, record)[0]
    slots = torch.tensor([0, num_blocks * 64 - 2, num_blocks * 64 - 1])
    kv_cache.scatter(kv, record, slots, keys)
    expected = kv_cache.unpack(kv_cache.pack(keys[None], record), record)[0]
    assert torch.equal(kv_cache.gather(kv, record, slots), expected)
    last = (num_blocks - 1) * stride + 63 * record.row_bytes
    assert torch.equal(
        pool[last + record.rope_offset :][: 2 * record.rope_dims].view(torch.bfloat16).float(),
        expected[2, record.nope_dims :],
    )


# ---- Scales and rounding -------------------------------------------------------------------------


def test_every_ue8m0_byte_is_its_power_of_two():
    values = kv_cache.ue8m0_to_float(torch.arange(256, dtype=torch.uint8))
    for byte in range(255):
        assert values[byte].item() == math.ldexp(1.0, byte - 127)
    assert values[255].item() == math.inf  # 2^128 is no float32


@given(st.floats(min_value=2.0**-149, max_value=2.0**127, width=32))
@settings(max_examples=500, deadline=None)
def test_power_of_two_scale_is_the_smallest_that_fits(amax):
    k = kv_cache.power_of_two_exponent(torch.tensor(amax)).item()
    assert amax <= math.ldexp(448.0, k)
    assert k == -127 or amax > math.ldexp(448.0, k - 1)


@pytest.mark.parametrize("k", [-127, -126, -1, 0, 1, 118])
def test_power_of_two_scale_at_the_edge(k):
    """448 * 2^k takes exactly 2^k, the next float32 above it takes the next power."""
    edge = torch.tensor(math.ldexp(448.0, k))
    assert kv_cache.power_of_two_exponent(edge).item() == k
    assert kv_cache.power_of_two_exponent(torch.nextafter(edge, edge * 2)).item() == k + 1


@records
def test_rounding_error_is_half_a_step_of_e4m3(record):
    """|error| <= 2^-4 of the element, or half of e4m3's smallest step times the scale."""
    keys = random_keys(4, 16, record, magnitude=3.0)
    kv = kv_cache.pack(keys, record)
    got = kv_cache.unpack(kv, record)
    nope = keys[..., : record.nope_dims].unflatten(-1, (record.num_scales, -1))
    error = (got[..., : record.nope_dims].unflatten(-1, (record.num_scales, -1)) - nope).abs()
    scale = nope.abs().amax(dim=-1, keepdim=True) / 448 * (2 if record.scale_is_ue8m0 else 1)
    allowed = torch.maximum(nope.abs() * 2**-4, scale * 2**-10) * (1 + 1e-6)
    assert (error <= allowed).all()
    rope = keys[..., record.nope_dims :]
    assert torch.equal(got[..., record.nope_dims :], rope.bfloat16().float())


@records
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_packing_what_was_unpacked_changes_nothing(record, data):
    """Any finite data bytes under any scale that keeps keys finite survive a round trip exactly."""
    seed = data.draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    kv = kv_cache.empty_pool(1, 2, record)
    rows, scales = kv_cache.regions(kv, record)
    bytes_ = torch.randint(256, (1, 2, record.nope_dims), generator=generator, dtype=torch.uint8)
    bytes_[(bytes_ & 0x7F) == 0x7F] = 0x7E  # NaN -> 448
    rows[..., : record.nope_dims] = bytes_
    count = record.num_scales
    exponents = data.draw(st.lists(st.integers(0, 246), min_size=count, max_size=count))
    exponents = torch.tensor(exponents, dtype=torch.uint8)
    if scales is None:
        rows[..., record.scale_offset : record.scale_offset + record.scale_bytes] = (
            kv_cache.ue8m0_to_float(exponents).view(torch.uint8)
        )
    else:
        scales[..., : record.num_scales] = exponents

    keys = kv_cache.unpack(kv, record)
    assert keys.isfinite().all()
    again = kv_cache.unpack(kv_cache.pack(keys, record, power_of_two_scales=True), record)
    assert torch.equal(again, keys)


def test_v32_scales_are_amax_over_448_unless_asked_for_powers_of_two():
    keys = random_keys(2, 3, V32)
    amax = keys[..., :512].unflatten(-1, (4, 128)).abs().amax(dim=-1)

    def scales(kv):
        return kv_cache.regions(kv, V32)[0][..., 512:528].contiguous().view(torch.float32)

    assert torch.equal(scales(kv_cache.pack(keys, V32)), amax / 448)
    rounded = scales(kv_cache.pack(keys, V32, power_of_two_scales=True))
    assert (torch.frexp(rounded).mantissa == 0.5).all()
    assert (rounded >= amax / 448).all() and (rounded < 2 * amax / 448).all()


@records
@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-140, 2.0**-126, 3e38])
def test_extreme_magnitudes_neither_overflow_nor_become_nan(record, amax):
    keys = torch.full((1, 1, record.d_qk), amax)
    keys[..., ::2] = 0
    got = kv_cache.unpack(kv_cache.pack(keys, record), record)[..., : record.nope_dims]
    assert got.isfinite().all()
    step = 2.0**-136  # e4m3's smallest number times the smallest scale
    assert ((got - keys[..., : record.nope_dims]).abs() <= max(amax * 2**-4, step)).all()


@records
def test_zero_keys_stay_zero(record):
    keys = torch.zeros(1, 4, record.d_qk)
    assert torch.equal(kv_cache.unpack(kv_cache.pack(keys, record), record), keys)


@records
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_key_that_is_not_finite_becomes_nan_alone(record, value):
    keys = random_keys(1, 2, record)
    clean = kv_cache.unpack(kv_cache.pack(keys, record), record)
    largest_elsewhere = keys.clone()
    largest_elsewhere[0, 0, 5] = value
    got = kv_cache.unpack(kv_cache.pack(largest_elsewhere, record), record)
    assert got[0, 0, 5].isnan()
    got[0, 0, 5] = clean[0, 0, 5]
    assert torch.equal(got, clean)


@records
def test_bfloat16_keys(record):
    keys = random_keys(2, 3, record).bfloat16()
    from_float = kv_cache.pack(keys.float(), record)
    assert torch.equal(kv_cache.pack(keys, record), from_float)


@records
def test_packing_in_chunks_is_packing_at_once(record, monkeypatch):
    keys = random_keys(7, 3, record)
    expected = kv_cache.pack(keys, record)
    monkeypatch.setattr(kv_cache, "_PACK_CHUNK_ELEMENTS", 2 * 3 * record.d_qk)
    assert torch.equal(kv_cache.pack(keys, record), expected)


def test_no_blocks():
    kv = kv_cache.pack(torch.zeros(0, 64, 512), V4)
    assert kv.shape == (0, 64, 1, 584) and kv_cache.num_slots(kv) == 0
    assert kv_cache.unpack(kv, V4).shape == (0, 64, 512)


# ---- Refusals ------------------------------------------------------------------------------------


def test_record_of():
    assert kv_cache.record_of(512, 584) is V4
    assert kv_cache.record_of(576, 656) is V32
    with pytest.raises(ValueError, match="d_qk 512 with 656 bytes.*584.*656"):
        kv_cache.record_of(512, 656)


def byte_zeros(*shape):
    return torch.zeros(*shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: kv_cache.pack(torch.zeros(2, 3, 576), V4),
            r"keys: got shape \(2, 3, 576\); takes .*512",
        ),
        (lambda: kv_cache.pack(torch.zeros(6, 512), V4), r"keys: got shape \(6, 512\)"),
        (
            lambda: kv_cache.empty_pool(2, 64, V4, block_stride=37375),
            r"block_stride: got 37375 .* 37376",
        ),
        (
            lambda: kv_cache.pack(torch.zeros(2, 1, 512), V4, 600, byte_zeros(1183)),
            r"pool: got 1183 bytes; takes at least 1184",
        ),
        (
            lambda: kv_cache.view_pool(byte_zeros(4, 600), 1, 1, V4, 600),
            r"pool: got torch.uint8 of shape \(4, 600\); takes contiguous 1-D uint8",
        ),
        (
            lambda: kv_cache.unpack(torch.zeros(1, 1, 1, 584), V4),
            r"kv: got dtype torch.float32; takes uint8, int8 or float8_e4m3fn",
        ),
        (
            lambda: kv_cache.unpack(kv_cache.empty_pool(1, 1, V32), V4),
            r"kv: got shape \(1, 1, 1, 656\); takes .*584",
        ),
        (
            lambda: kv_cache.unpack(byte_zeros(1, 4, 1, 584)[:, ::2], V4),
            r"kv: got strides .*; takes a contiguous block",
        ),
        (
            lambda: kv_cache.unpack(byte_zeros(1, 4, 1, 584).expand(2, 4, 1, 584), V4),
            r"kv: got blocks 0 bytes apart",
        ),
    ],
)
def test_refusals_name_the_argument_what_it_got_and_what_it_takes(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_scatter_refuses_keys_of_another_shape():
    kv = kv_cache.pack(torch.zeros(2, 4, V4.d_qk), V4)
    with pytest.raises(ValueError, match=r"keys: got \[3, 511\]; takes \[3, 512\]"):
        kv_cache.scatter(kv, V4, torch.tensor([0, 1, 2]), torch.zeros(3, 511))
