"""Inputs and tolerances for tests, the demo and benchmarks.

The distributions and the tolerances are those at which FlashMLA's own tests compare a kernel with
a float32 reference on the dequantized cache; the row-norm tolerance is this project's, for inputs
of any magnitude.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from flash_mla import kv_cache, reference
from flash_mla.kv_cache import V4, Record

Lengths = Union[None, str, Sequence[int], Tensor]

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


# ---- Inputs ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """The tensors of one sparse decode call, named as in ``flash_mla_with_kvcache``."""

    record: Record
    q: Tensor  # [b, s_q, h_q, d_qk] bfloat16
    kv: Tensor  # uint8 [num_blocks, page, 1, bytes_per_token]
    indices: Tensor  # [b, s_q, topk] int32
    sm_scale: float
    topk_length: Optional[Tensor] = None  # [b] int32
    attn_sink: Optional[Tensor] = None  # [h_q] float32
    extra_kv: Optional[Tensor] = None
    extra_indices: Optional[Tensor] = None
    extra_topk_length: Optional[Tensor] = None

    @property
    def tokens(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    def replace(self, **changes) -> "Case":
        """A copy with other tensors in some places; the rest is shared."""
        return dataclasses.replace(self, **changes)

    def to(self, device: "torch.device | str") -> "Case":
        """A copy on another device. Whole storages are copied, so that strides stay as they are."""
        moved = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                storage = _storage_bytes(value).to(device).view(value.dtype)
                value = storage.as_strided(value.shape, value.stride(), value.storage_offset())
            moved[field.name] = value
        return Case(**moved)

    def run(
        self, sched_meta=None, out: Optional[Tensor] = None, **keywords
    ) -> Tuple[Tensor, Tensor]:
        """The call through the public API: ``(out, lse)``. ``keywords`` override arguments."""
        import flash_mla  # not at the top: this module is part of that package

        if sched_meta is None:
            sched_meta, _ = flash_mla.get_mla_metadata()
        return flash_mla.flash_mla_with_kvcache(**{**self.keywords(sched_meta), "out": out, **keywords})

    def keywords(self, sched_meta) -> Dict[str, Any]:
        """The call's arguments, those that vLLM gives, for this package's function or FlashMLA's."""
        return dict(
            q=self.q,
            k_cache=self.kv,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=self.record.dim_v,
            tile_scheduler_metadata=sched_meta,
            softmax_scale=self.sm_scale,
            is_fp8_kvcache=True,
            indices=self.indices,
            attn_sink=self.attn_sink,
            extra_k_cache=self.extra_kv,
            extra_indices_in_kvcache=self.extra_indices,
            topk_length=self.topk_length,
            extra_topk_length=self.extra_topk_length,
        )

    def reference(self) -> Tuple[Tensor, Tensor]:
        """float32 ``(out, lse)``: not rounded to bfloat16 as the operator's result is."""
        b, s_q, h_q, _ = self.q.shape
        return reference.sparse_decode(
            self.q,
            self.kv,
            self.indices,
            sm_scale=self.sm_scale,
            topk_length=self.topk_length,
            attn_sink=self.attn_sink,
            extra_kv=self.extra_kv,
            extra_indices=self.extra_indices,
            extra_topk_length=self.extra_topk_length,
            out=torch.empty(b, s_q, h_q, self.record.dim_v, device=self.q.device),
        )

    def check(self, sched_meta=None) -> Tuple[Tensor, Tensor]:
        """Run it, compare it with the reference at FlashMLA's tolerances, return the result."""
        out, lse = self.run(sched_meta)
        assert_close_flashmla(out, lse, *self.reference())
        return out, lse


def make_case(
    b: int,
    s_q: int,
    h_q: int,
    topk: int,
    extra_topk: int = 0,
    *,
    record: Record = V4,
    page: int = 64,
    extra_page: int = 64,
    num_blocks: Optional[int] = None,
    extra_num_blocks: Optional[int] = None,
    block_stride: Optional[int] = None,
    extra_block_stride: Optional[int] = None,
    device: "torch.device | str" = "cpu",
    seed: int = 0,
    invalid_fraction: float = 0.0,
    lengths: Lengths = None,
    extra_lengths: Lengths = None,
    sinks: bool = False,
) -> Case:
    """Random inputs of FlashMLA's test distribution.

    q ~ N(0, 1) and keys ~ N(0, 1) / 10, both clamped to ±1; power-of-two scales; softmax scale
    d_qk^-0.55. Indices are uniform over the cache and may repeat.

    Args:
        extra_topk: keys of a second cache; 0 for none.
        num_blocks, extra_num_blocks: default: room for about twice the indices of a token.
        block_stride, extra_block_stride: bytes; default: the record's.
        invalid_fraction: share of the indices, at random places, that name no slot.
        lengths, extra_lengths: None (all keys), "random" (0 .. topk), or b numbers.
        sinks: draw ``attn_sink`` ~ N(0, 1), with its first two heads at -inf and +inf.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def cache(
        width: int, page: int, blocks: Optional[int], stride: Optional[int]
    ) -> Tuple[Tensor, Tensor]:
        if blocks is None:
            blocks = max(2, -(-2 * width // page))
        keys = (normal(blocks, page, record.d_qk) / 10).clamp_(-1, 1)
        kv = kv_cache.pack(keys, record, block_stride=stride, power_of_two_scales=True)
        slots = torch.randint(
            blocks * page, (b, s_q, width), generator=generator, device=device, dtype=torch.int32
        )
        return kv, slots

    def spoil(slots: Tensor, num_slots: int) -> Tensor:
        no_keys = torch.tensor(
            [-1, -2, INT32_MIN, INT32_MAX, num_slots], dtype=torch.int32, device=device
        )
        which = torch.randint(len(no_keys), slots.shape, generator=generator, device=device)
        chosen = torch.rand(slots.shape, generator=generator, device=device) < invalid_fraction
        return torch.where(chosen, no_keys[which], slots)

    def length_of(given: Lengths, width: int) -> Optional[Tensor]:
        if given is None:
            return None
        if isinstance(given, str):
            if given != "random":
                raise ValueError(f'lengths: got "{given}"; takes None, "random" or {b} numbers')
            return torch.randint(
                width + 1, (b,), generator=generator, device=device, dtype=torch.int32
            )
        return torch.as_tensor(given, dtype=torch.int32, device=device)

    q = normal(b, s_q, h_q, record.d_qk).clamp_(-1, 1).to(torch.bfloat16)
    kv, indices = cache(topk, page, num_blocks, block_stride)
    extra_kv = extra_indices = None
    if extra_topk > 0:
        extra_kv, extra_indices = cache(
            extra_topk, extra_page, extra_num_blocks, extra_block_stride
        )
    if invalid_fraction > 0:
        indices = spoil(indices, kv_cache.num_slots(kv))
        if extra_kv is not None:
            extra_indices = spoil(extra_indices, kv_cache.num_slots(extra_kv))
    attn_sink = None
    if sinks:
        attn_sink = normal(h_q)
        attn_sink[:2] = torch.tensor([-torch.inf, torch.inf], device=device)[:h_q]
    return Case(
        record=record,
        q=q,
        kv=kv,
        indices=indices,
        sm_scale=record.d_qk**-0.55,
        topk_length=length_of(lengths, topk),
        attn_sink=attn_sink,
        extra_kv=extra_kv,
        extra_indices=extra_indices,
        extra_topk_length=length_of(extra_lengths, extra_topk) if extra_topk > 0 else None,
    )


# Bytes that read as NaN or Inf in whatever part of a record they land: NaN of every format (an
# ue8m0 scale of 255 is 2^128), +Inf and -Inf of bfloat16 (and e4m3 NaN), +Inf of float32.
_POISONS = ((0xFF,), (0x80, 0x7F), (0x80, 0xFF), (0x00, 0x00, 0x80, 0x7F))
_POISON_RUN = 592  # bytes of one pattern; no divisor of a row, so every place sees every pattern


def poison_unused(case: Case) -> None:
    """Overwrite with NaN and Inf patterns every byte of the pools that no valid index needs.

    That is whole unused slots (e4m3, RoPE and scale bytes), the padding behind a token's scales,
    and everything between blocks. The two caches may lie interleaved in one pool. A bool and a
    byte per byte of pool are allocated, so this is for small pools.
    """
    caches: List[Tuple[Tensor, Tensor, Optional[Tensor]]] = [
        (case.kv, case.indices, case.topk_length)
    ]
    if case.extra_kv is not None:
        caches.append((case.extra_kv, case.extra_indices, case.extra_topk_length))

    # One flag per byte of each distinct storage.
    keeps: Dict[int, Tuple[Tensor, Tensor]] = {}
    for kv, indices, length in caches:
        pool = _storage_bytes(kv)
        _, keep = keeps.setdefault(
            pool.data_ptr(), (pool, torch.zeros_like(pool, dtype=torch.uint8))
        )
        flags = keep.as_strided(kv.shape, kv.stride(), kv.storage_offset())
        rows, scales = kv_cache.regions(flags, case.record)
        slots = indices.to(torch.int64)
        slots = slots[reference.is_key(slots, kv, length)]
        block, offset = slots // kv.shape[1], slots % kv.shape[1]
        rows[block, offset] = 1
        if scales is not None:
            scales[block, offset, : case.record.num_scales] = 1

    for pool, keep in keeps.values():
        pattern = torch.tensor(
            [poison * (_POISON_RUN // len(poison)) for poison in _POISONS],
            dtype=torch.uint8,
            device=pool.device,
        ).flatten()
        repeats = -(-pool.numel() // pattern.numel())
        pool.copy_(torch.where(keep.bool(), pool, pattern.repeat(repeats)[: pool.numel()]))


def _storage_bytes(tensor: Tensor) -> Tensor:
    """All bytes of the storage behind a tensor, as 1-D uint8."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


# ---- Tolerances --------------------------------------------------------------------------------

OUT_ABS, OUT_REL, OUT_COSINE = 1e-3, 2.01 / 128, 5e-6
LSE_ABS, LSE_REL = 1e-6, 8.01 / 65536


def assert_close_flashmla(out: Tensor, lse: Tensor, ref_out: Tensor, ref_lse: Tensor) -> None:
    """FlashMLA's tolerances, for inputs of its tests' distribution (see :func:`make_case`).

    out: every element within 1e-3, or within 2.01/128 of the reference's; cosine difference
    below 5e-6. lse: every element within 1e-6, or within 8.01/65536; the same elements infinite,
    with the same sign. No NaN anywhere. AssertionError says what failed, where and by how much.
    """
    _assert_close("out", out, ref_out, OUT_ABS, OUT_REL)
    difference = cosine_difference(out, ref_out)
    assert (
        difference < OUT_COSINE
    ), f"out: cosine difference {difference:.2e}, not below {OUT_COSINE}"
    _assert_close("lse", lse, ref_lse, LSE_ABS, LSE_REL)


def assert_close_rownorm(out: Tensor, ref: Tensor, tolerance: float = 5e-3) -> None:
    """Every row (last dim) of ``out`` within ``tolerance`` times the norm of the reference's row.

    For inputs of any magnitude. A reference row of zeros takes zeros only. No NaN, no Inf.
    """
    _assert_shape("out", out, ref)
    assert out.isfinite().all(), f"out: {(~out.isfinite()).sum().item()} elements are NaN or Inf"
    # float64: squares of float32's largest and smallest numbers leave its range.
    norm = ref.double().norm(dim=-1)
    error = (out.double() - ref.double()).norm(dim=-1)
    bad = ~(error <= tolerance * norm)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        worst = (error / norm)[bad].max().item()
        raise AssertionError(
            f"out: {bad.sum().item()} of {bad.numel()} rows differ by more than {tolerance} of "
            f"their norm, the worst by {worst:.3g}; first at {where}: error "
            f"{error[where].item():.3g}, norm {norm[where].item():.3g}"
        )


def cosine_difference(x: Tensor, y: Tensor) -> float:
    """1 - 2 x·y / (x² + y²) over all elements, in float64; 0 where both are all zero."""
    x, y = x.double().flatten(), y.double().flatten()
    denominator = (x.square().sum() + y.square().sum()).item()
    return 0.0 if denominator == 0 else 1.0 - 2.0 * torch.dot(x, y).item() / denominator


def _assert_shape(name: str, ours: Tensor, ref: Tensor) -> None:
    assert ours.shape == ref.shape, f"{name}: shape {tuple(ours.shape)}, not {tuple(ref.shape)}"


def _assert_close(name: str, ours: Tensor, ref: Tensor, abs_tol: float, rel_tol: float) -> None:
    _assert_shape(name, ours, ref)
    x, y = ours.double(), ref.double()
    assert not x.isnan().any(), f"{name}: {x.isnan().sum().item()} elements are NaN"
    infinite = x.isinf() | y.isinf()
    error = torch.where(infinite, 0.0, (x - y).abs())
    good = (error < abs_tol) | (error < rel_tol * y.abs())
    bad = torch.where(infinite, x != y, ~good)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {bad.sum().item()} of {bad.numel()} elements differ (abs {abs_tol:.3g}, "
            f"rel {rel_tol:.3g}), the worst finite one by {error.max().item():.3g}; first at "
            f"{where}: got {x[where].item():.6g}, reference {y[where].item():.6g}"
        )
