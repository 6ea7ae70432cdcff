"""FP8 KV cache records: where every byte of a token lies, and packing to and from them.

A cache is passed around as FlashMLA callers pass it: a tensor ``kv`` of one-byte elements and
shape ``[num_blocks, page_block_size, 1, bytes_per_token]``. Block ``i`` starts
``i * kv.stride(0)`` bytes after the first one; ``kv.stride(0)`` may exceed the bytes of a block
(padding, or several caches interleaved in one pool). The two inner strides are nominal: a V4
block is *not* a row of 584-byte tokens but all data rows followed by all scale rows, so read a
cache through :func:`gather` or :func:`unpack` and never by indexing ``kv``.

A *slot* is the number an ``indices`` tensor holds: ``block * page_block_size + offset``.

The layouts are FlashMLA's; ``csrc/kv_format.h`` holds the same numbers for the kernels and
``tests/test_kv_format_mirror.py`` compares the two.
"""

from __future__ import annotations

import dataclasses
from typing import Iterator, Optional, Tuple

import torch
from torch import Tensor

E4M3_MAX = 448.0
BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)

# Blocks are quantized a few at a time, so that packing a pool needs little more than the pool.
_PACK_CHUNK_ELEMENTS = 16 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Record:
    """The bytes of one token. Offsets and sizes are in bytes, ``*_dims`` in elements.

    The first ``nope_dims`` dims are e4m3 with one scale per ``scale_group`` dims; the last
    ``rope_dims`` are bfloat16. A block holds one *row* of ``row_bytes`` per token. The scales of
    a token lie in its row at ``scale_offset``, or, with ``scales_after_rows``, behind the last
    row of the block, ``scale_bytes`` per token (there ``scale_offset`` is 0).
    """

    name: str
    d_qk: int
    bytes_per_token: int
    nope_dims: int
    rope_dims: int
    scale_group: int
    num_scales: int
    scale_bytes: int  # of one token, padding included
    scale_is_ue8m0: bool  # one byte e meaning 2^(e-127); otherwise float32
    row_bytes: int
    rope_offset: int  # from the start of the row
    scale_offset: int
    scales_after_rows: bool
    block_align: int  # callers round the block stride up to a multiple of this
    dim_v: int = 512  # V is the first dim_v dims of the dequantized key

    @property
    def rope_in_v(self) -> bool:
        """Whether the bfloat16 dims are part of V, or only of the scores."""
        return self.dim_v > self.nope_dims

    def block_bytes(self, page_block_size: int) -> int:
        """Bytes a block occupies, without padding behind it."""
        return page_block_size * self.bytes_per_token

    def default_block_stride(self, page_block_size: int) -> int:
        """Bytes between blocks where the caller does not choose: rounded up to ``block_align``."""
        return -(-self.block_bytes(page_block_size) // self.block_align) * self.block_align


V4 = Record(
    name="V4",
    d_qk=512,
    bytes_per_token=584,
    nope_dims=448,
    rope_dims=64,
    scale_group=64,
    num_scales=7,
    scale_bytes=8,
    scale_is_ue8m0=True,
    row_bytes=576,
    rope_offset=448,
    scale_offset=0,
    scales_after_rows=True,
    block_align=576,
)

V32 = Record(
    name="V3.2",
    d_qk=576,
    bytes_per_token=656,
    nope_dims=512,
    rope_dims=64,
    scale_group=128,
    num_scales=4,
    scale_bytes=16,
    scale_is_ue8m0=False,
    row_bytes=656,
    rope_offset=528,
    scale_offset=512,
    scales_after_rows=False,
    block_align=1,
)

RECORDS = (V4, V32)


def record_of(d_qk: int, bytes_per_token: int) -> Record:
    """The record that ``q.shape[-1]`` and ``kv.shape[-1]`` name together.

    Raises ValueError, listing the pairs there are, for any other pair.
    """
    for record in RECORDS:
        if (record.d_qk, record.bytes_per_token) == (d_qk, bytes_per_token):
            return record
    known = ", ".join(f"{r.name}: d_qk {r.d_qk} with {r.bytes_per_token} bytes" for r in RECORDS)
    raise ValueError(
        f"kv: no record has d_qk {d_qk} with {bytes_per_token} bytes per token; there are {known}"
    )


# ---- Pools ------------------------------------------------------------------------------------


def empty_pool(
    num_blocks: int,
    page_block_size: int,
    record: Record,
    block_stride: Optional[int] = None,
    device: "torch.device | str" = "cpu",
) -> Tensor:
    """A cache of zero bytes: every token unpacks to zeros.

    Args:
        block_stride: bytes between blocks; default ``record.default_block_stride(...)``.

    Returns:
        uint8 ``kv`` [num_blocks, page_block_size, 1, bytes_per_token] over a pool of
        ``num_blocks * block_stride`` bytes. Raises ValueError for a stride below a block's bytes.
    """
    stride = record.default_block_stride(page_block_size) if block_stride is None else block_stride
    pool = torch.zeros(num_blocks * max(stride, 0), dtype=torch.uint8, device=device)
    return view_pool(pool, num_blocks, page_block_size, record, stride)


def view_pool(
    pool: Tensor, num_blocks: int, page_block_size: int, record: Record, block_stride: int
) -> Tensor:
    """The cache whose block ``i`` starts at byte ``i * block_stride`` of ``pool`` (1-D uint8).

    ``view_pool(pool[offset:], ...)`` with one stride and two offsets interleaves two caches.
    Raises ValueError where blocks would overlap or the last one would leave the pool.
    """
    block_bytes = record.block_bytes(page_block_size)
    if pool.dim() != 1 or pool.dtype != torch.uint8 or (pool.numel() > 1 and pool.stride(0) != 1):
        raise ValueError(
            f"pool: got {pool.dtype} of shape {tuple(pool.shape)}; takes contiguous 1-D uint8"
        )
    if block_stride < block_bytes:
        raise ValueError(
            f"block_stride: got {block_stride} bytes; takes at least the {block_bytes} bytes of "
            f"{page_block_size} {record.name} tokens"
        )
    needed = (num_blocks - 1) * block_stride + block_bytes if num_blocks > 0 else 0
    if pool.numel() < needed:
        raise ValueError(
            f"pool: got {pool.numel()} bytes; takes at least {needed} for {num_blocks} blocks "
            f"{block_stride} bytes apart"
        )
    token = record.bytes_per_token
    return pool.as_strided(
        (num_blocks, page_block_size, 1, token), (block_stride, token, token, 1)
    )


def num_slots(kv: Tensor) -> int:
    """Tokens that the cache has room for; valid indices are 0 .. num_slots - 1."""
    return kv.shape[0] * kv.shape[1]


def regions(kv: Tensor, record: Record) -> Tuple[Tensor, Optional[Tensor]]:
    """The real layout of a cache, as uint8 views of it.

    Returns:
        rows [num_blocks, page_block_size, row_bytes], and, for a record with its scales behind
        the rows of a block, scales [num_blocks, page_block_size, scale_bytes], else None.

    Raises:
        ValueError: ``kv`` is no cache of this record (dtype, shape or strides).
    """
    token = record.bytes_per_token
    if kv.dtype not in BYTE_DTYPES:
        raise ValueError(f"kv: got dtype {kv.dtype}; takes uint8, int8 or float8_e4m3fn")
    if kv.dim() != 4 or kv.shape[2] != 1 or kv.shape[3] != token:
        raise ValueError(
            f"kv: got shape {tuple(kv.shape)}; takes [num_blocks, page_block_size, 1, {token}]"
        )
    num_blocks, page = kv.shape[:2]
    # The stride of a dimension of size 1 is never followed and may be anything.
    if kv.stride(3) != 1 or (page > 1 and kv.stride(1) != token):
        raise ValueError(
            f"kv: got strides {kv.stride()}; takes a contiguous block of {token}-byte tokens"
        )
    if num_blocks > 1 and kv.stride(0) < record.block_bytes(page):
        raise ValueError(
            f"kv: got blocks {kv.stride(0)} bytes apart; takes at least "
            f"{record.block_bytes(page)} bytes, those of {page} tokens"
        )
    raw = kv.view(torch.uint8)
    stride, start = kv.stride(0), kv.storage_offset()
    rows = raw.as_strided(
        (num_blocks, page, record.row_bytes), (stride, record.row_bytes, 1), start
    )
    if not record.scales_after_rows:
        return rows, None
    scales = raw.as_strided(
        (num_blocks, page, record.scale_bytes),
        (stride, record.scale_bytes, 1),
        start + page * record.row_bytes,
    )
    return rows, scales


# ---- Quantization ------------------------------------------------------------------------------


def ue8m0_to_float(exponent: Tensor) -> Tensor:
    """2^(e-127) of every byte e, in float32: e = 0 is the subnormal 2^-127, and 2^128 is Inf."""
    bits = exponent.to(torch.int32) << 23
    # 2^-127 is half of the smallest normal number: the exponent field is 0, the top bit is set.
    return torch.where(exponent == 0, 1 << 22, bits).view(torch.float32)


def power_of_two_exponent(amax: Tensor) -> Tensor:
    """The smallest int32 k with amax <= 448 * 2^k, limited to ue8m0's [-127, 127]; 0 for amax 0.

    Exact, by exponent and mantissa: the usual ceil(log2(amax / 448)) is off by one where the
    division or the logarithm rounds.
    """
    # amax = mantissa * 2^exponent with mantissa in [0.5, 1), and 448 = 0.875 * 2^9.
    mantissa, exponent = torch.frexp(amax)
    k = torch.where(mantissa <= 0.875, exponent - 9, exponent - 8).to(torch.int32)
    return torch.where(amax > 0, k, 0).clamp(-127, 127)


def _quantize(
    keys: Tensor, record: Record, power_of_two_scales: bool
) -> Tuple[Tensor, Tensor]:
    """float32 keys [..., d_qk] -> e4m3 bytes [..., nope_dims] and scale bytes [..., scale_bytes]."""
    groups = keys[..., : record.nope_dims].unflatten(-1, (record.num_scales, record.scale_group))
    # An Inf or NaN key becomes e4m3's NaN below and must not decide its neighbours' scale.
    amax = torch.where(groups.isfinite(), groups, 0.0).abs().amax(dim=-1)
    if record.scale_is_ue8m0 or power_of_two_scales:
        exponent = power_of_two_exponent(amax) + 127
        scale = ue8m0_to_float(exponent)
    else:
        smallest_normal = torch.finfo(torch.float32).tiny
        scale = torch.where(amax > 0, (amax / E4M3_MAX).clamp_min(smallest_normal), 1.0)

    scaled = groups / scale.unsqueeze(-1)
    # clamp for the half ulp by which amax / 448 may have been rounded down; it keeps NaN.
    scaled = torch.where(scaled.isinf(), torch.nan, scaled).clamp(-E4M3_MAX, E4M3_MAX)
    data = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)

    if record.scale_is_ue8m0:
        scale_bytes = exponent.to(torch.uint8)
        padding = record.scale_bytes - record.num_scales
        scale_bytes = torch.nn.functional.pad(scale_bytes, (0, padding))
    else:
        scale_bytes = scale.contiguous().view(torch.uint8)
    return data, scale_bytes


def _encode(
    keys: Tensor, record: Record, power_of_two_scales: bool
) -> Tuple[Tensor, Optional[Tensor]]:
    """keys [..., d_qk] -> bytes of the row and, where they lie apart, of the scales."""
    data, scales = _quantize(keys.to(torch.float32), record, power_of_two_scales)
    rope = keys[..., record.nope_dims :].to(torch.bfloat16).contiguous().view(torch.uint8)
    row = [data, rope] if record.scales_after_rows else [data, scales, rope]
    return torch.cat(row, dim=-1), scales if record.scales_after_rows else None


def _decode(row: Tensor, scales: Optional[Tensor], record: Record) -> Tensor:
    """Bytes of rows (and of scales that lie apart) -> float32 keys [..., d_qk]."""
    if scales is None:
        scales = row[..., record.scale_offset : record.scale_offset + record.scale_bytes]
    if record.scale_is_ue8m0:
        scale = ue8m0_to_float(scales[..., : record.num_scales])
    else:
        scale = _reinterpret(scales, torch.float32)

    keys = torch.empty(*row.shape[:-1], record.d_qk, dtype=torch.float32, device=row.device)
    nope = keys[..., : record.nope_dims]
    nope.copy_(row[..., : record.nope_dims].view(torch.float8_e4m3fn))
    nope.unflatten(-1, (record.num_scales, record.scale_group)).mul_(scale.unsqueeze(-1))
    rope = row[..., record.rope_offset : record.rope_offset + 2 * record.rope_dims]
    keys[..., record.nope_dims :].copy_(_reinterpret(rope, torch.bfloat16))
    return keys


def _reinterpret(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [..., n * size] as [..., n] of a wider type. The copy aligns what may not be."""
    return raw.clone(memory_format=torch.contiguous_format).view(dtype)


# ---- Reading and writing -----------------------------------------------------------------------


def _split(slots: Tensor, kv: Tensor) -> Tuple[Tensor, Tensor]:
    """Slots -> (block, offset in block), in int64: a pool may exceed 2^31 bytes and slots."""
    slots = slots.to(torch.int64)
    page = kv.shape[1]
    block = torch.div(slots, page, rounding_mode="floor")
    return block, slots - block * page


def gather(kv: Tensor, record: Record, slots: Tensor) -> Tensor:
    """Dequantize the named tokens only.

    Args:
        kv: [num_blocks, page_block_size, 1, bytes_per_token], one-byte dtype.
        slots: integer tensor of any shape, every element in 0 .. num_slots(kv) - 1 (not checked: it would
            synchronize; use ``reference.is_key`` to tell).

    Returns:
        float32 [*slots.shape, d_qk]: e4m3 times scale, then the bfloat16 dims.
    """
    rows, scales = regions(kv, record)
    block, offset = _split(slots, kv)
    return _decode(
        rows[block, offset], None if scales is None else scales[block, offset], record
    )


def scatter(
    kv: Tensor,
    record: Record,
    slots: Tensor,
    keys: Tensor,
    power_of_two_scales: bool = False,
) -> None:
    """Quantize ``keys`` [*slots.shape, d_qk] into the named tokens of ``kv``; see :func:`pack`.

    Raises ValueError if ``keys`` has another shape.
    """
    if keys.shape != (*slots.shape, record.d_qk):
        raise ValueError(f"keys: got {list(keys.shape)}; takes {[*slots.shape, record.d_qk]}, a key for each slot")
    rows, scales = regions(kv, record)
    block, offset = _split(slots, kv)
    row_bytes, scale_bytes = _encode(keys, record, power_of_two_scales)
    rows[block, offset] = row_bytes
    if scales is not None:
        scales[block, offset] = scale_bytes


def pack(
    keys: Tensor,
    record: Record,
    block_stride: Optional[int] = None,
    pool: Optional[Tensor] = None,
    power_of_two_scales: bool = False,
) -> Tensor:
    """Quantize keys into a paged cache.

    A group's scale is amax / 448, for a ue8m0 record rounded up to a power of two (limited to
    2^-127 .. 2^127), so that no element exceeds e4m3's range. NaN and Inf become e4m3's NaN.

    Args:
        keys: bfloat16 or float32 [num_blocks, page_block_size, d_qk].
        block_stride: bytes between blocks; default ``record.default_block_stride(...)``.
        pool: 1-D uint8 to lay the blocks into; bytes between blocks keep their values.
            Default: a new one, zeros between blocks.
        power_of_two_scales: round a float32-scaled record's scales up to powers of two as well.

    Returns:
        uint8 ``kv`` [num_blocks, page_block_size, 1, bytes_per_token], a view of the pool.

    Raises:
        ValueError: ``keys`` is not of that shape, or the blocks do not fit stride or pool.
    """
    if keys.dim() != 3 or keys.shape[-1] != record.d_qk:
        raise ValueError(
            f"keys: got shape {tuple(keys.shape)}; takes [num_blocks, page_block_size, "
            f"{record.d_qk}] for record {record.name}"
        )
    num_blocks, page = keys.shape[:2]
    if pool is None:
        kv = empty_pool(num_blocks, page, record, block_stride, keys.device)
    else:
        stride = record.default_block_stride(page) if block_stride is None else block_stride
        kv = view_pool(pool, num_blocks, page, record, stride)

    rows, scales = regions(kv, record)
    for part in _chunks(num_blocks, page * record.d_qk):
        row_bytes, scale_bytes = _encode(keys[part], record, power_of_two_scales)
        rows[part] = row_bytes
        if scales is not None:
            scales[part] = scale_bytes
    return kv


def unpack(kv: Tensor, record: Record) -> Tensor:
    """Dequantize a whole cache to float32 [num_blocks, page_block_size, d_qk]."""
    rows, scales = regions(kv, record)
    return _decode(rows, scales, record)


def _chunks(num_blocks: int, elements_per_block: int) -> Iterator[slice]:
    step = max(1, _PACK_CHUNK_ELEMENTS // max(elements_per_block, 1))
    for start in range(0, num_blocks, step):
        yield slice(start, start + step)
