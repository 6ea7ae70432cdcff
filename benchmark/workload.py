"""The calls that are timed: a pool of random records, random indices into it, one call by number.

Everything that calls attention here takes an *api*: any object with FlashMLA's
`get_mla_metadata` and `flash_mla_with_kvcache`, be it this package or the peer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable

import torch
from torch import Tensor

import common  # noqa: F401  (puts the repository on the path)
from flash_mla import kv_cache, testing
from flash_mla.reference import sparse_decode

RECORDS = {"v4": kv_cache.V4, "v32": kv_cache.V32}
WINDOW = 128  # keys of the main cache in a V4 call: the sliding window
PAGE = 64
POOL_BYTES = 1 << 30
D_V = 512

_TEMPLATE_BLOCKS = 256
_SLOTS_DRAWN = 1 << 23  # random indices, shared by all calls


@dataclasses.dataclass(frozen=True)
class Shape:
    """One configuration: how many tokens and real heads, keys of the main and the extra cache.

    `s_q` tokens make a request: q is [tokens / s_q, s_q, ...]. vLLM's V3.2 path has one request of all tokens.
    """

    tokens: int
    heads: int
    main: int
    extra: int = 0
    s_q: int = 1

    @property
    def width(self) -> int:
        return self.main + self.extra

    @property
    def batch(self) -> tuple[int, int]:
        """(b, s_q)."""
        if self.tokens % self.s_q:
            raise ValueError(f"s_q: got {self.s_q}; takes a divisor of the {self.tokens} tokens")
        return self.tokens // self.s_q, self.s_q

    @classmethod
    def of_width(cls, tokens: int, heads: int, width: int) -> Shape:
        """The V4 call of this many keys: up to a window from the main cache, the rest extra."""
        main = min(width, WINDOW)
        return cls(tokens, heads, main, width - main)

    def key_bytes(self, record: kv_cache.Record) -> int:
        """Bytes of keys that one call reads."""
        return self.tokens * self.width * record.bytes_per_token

    def flops(self, record: kv_cache.Record) -> int:
        """Multiplications and additions of QK and PV of the real heads of one call."""
        return 2 * self.tokens * self.heads * self.width * (record.d_qk + D_V)


def random_records(record: kv_cache.Record, device: str, seed: int = 0) -> Tensor:
    """A small cache of random keys, N(0, 1) / 10 clamped to ±1, to fill large ones from."""
    generator = torch.Generator(device).manual_seed(seed)
    keys = torch.randn(_TEMPLATE_BLOCKS, PAGE, record.d_qk, generator=generator, device=device)
    return kv_cache.pack((keys / 10).clamp_(-1, 1), record, power_of_two_scales=True)


def filled_pool(blocks: int, record: kv_cache.Record, template: Tensor) -> Tensor:
    """A cache of `blocks` blocks, the template's over and over: packing 1 GiB would take longer."""
    kv = kv_cache.empty_pool(blocks, PAGE, record, device=str(template.device))
    # A block's bytes lie side by side, whatever their order: copy them as one row.
    into, source = kv.view(blocks, -1), template.view(len(template), -1)
    for start in range(0, blocks, len(source)):
        part = into[start : start + len(source)]
        part.copy_(source[: len(part)])
    return kv


class Workload:
    """One pool of records and one long list of random slots; every call reads a part of its own."""

    def __init__(self, record_name: str, *, pool_bytes: int = POOL_BYTES, device: str = "cuda"):
        self.record = RECORDS[record_name]
        self.device = device
        blocks = pool_bytes // self.record.default_block_stride(PAGE)
        self.kv = filled_pool(blocks, self.record, random_records(self.record, device))
        generator = torch.Generator(device).manual_seed(1)
        self._slots = torch.randint(
            blocks * PAGE, (_SLOTS_DRAWN,), generator=generator, device=device, dtype=torch.int32
        )
        # V3.2 models have no attention sink.
        self.has_sink = record_name == "v4"
        self.sm_scale = self.record.d_qk**-0.55

    def indices(self, shape: Shape, i: int) -> tuple[Tensor, Tensor | None]:
        """Slots of call i: [b, s_q, main], and [b, s_q, extra] or None. Aligned to 256 bytes."""
        keys = shape.tokens * shape.width
        room = len(self._slots) - keys
        start = (i * keys) % max(room, 1) // 64 * 64
        main, extra = self._slots[start : start + keys].split(
            [shape.tokens * shape.main, shape.tokens * shape.extra]
        )
        b, s_q = shape.batch
        return main.view(b, s_q, shape.main), extra.view(b, s_q, -1) if shape.extra else None

    def queries(self, shape: Shape, rows: int) -> tuple[Tensor, Tensor | None]:
        """q [b, s_q, rows, d_qk] bfloat16 and attn_sink [rows]: `shape.heads` real heads, then
        zero rows with a sink of -inf, as vLLM pads them."""
        generator = torch.Generator(self.device).manual_seed(2)
        real = (*shape.batch, shape.heads, self.record.d_qk)
        q = torch.zeros(
            *shape.batch, rows, self.record.d_qk, dtype=torch.bfloat16, device=self.device
        )
        q[:, :, : shape.heads] = torch.randn(real, generator=generator, device=self.device).clamp_(
            -1, 1
        )
        if not self.has_sink:
            return q, None
        sink = torch.full((rows,), -math.inf, device=self.device)
        sink[: shape.heads] = torch.randn(shape.heads, generator=generator, device=self.device)
        return q, sink

    def call(self, api: Any, shape: Shape, rows: int, meta: Any = None) -> Callable[[int], Any]:
        """The function that makes call number i of this shape through `api`, with `rows` head rows.

        `meta` is the call's scheduling object; by default one of its own, made by `api`.
        """
        q, sink = self.queries(shape, rows)
        meta = api.get_mla_metadata()[0] if meta is None else meta

        def call(i: int) -> Any:
            main, extra = self.indices(shape, i)
            return api.flash_mla_with_kvcache(
                q,
                self.kv,
                None,
                None,
                D_V,
                meta,
                softmax_scale=self.sm_scale,
                is_fp8_kvcache=True,
                indices=main,
                attn_sink=sink,
                extra_k_cache=None if extra is None else self.kv,
                extra_indices_in_kvcache=extra,
            )

        return call

    def reference(self, shape: Shape, i: int) -> tuple[Tensor, Tensor]:
        """float32 (out, lse) of call i, real heads only."""
        q, sink = self.queries(shape, shape.heads)
        main, extra = self.indices(shape, i)
        return sparse_decode(
            q,
            self.kv,
            main,
            sm_scale=self.sm_scale,
            attn_sink=sink,
            extra_kv=None if extra is None else self.kv,
            extra_indices=extra,
            out=torch.empty(*q.shape[:3], D_V, device=self.device),
        )


@dataclasses.dataclass(frozen=True)
class Errors:
    """Largest relative error of a row of `out`: against the reference, against the peer."""

    reference: float
    peer: float | None


# Two results that each keep the contract's 5e-3 of the reference's row norm may differ by this.
_PEER_TOLERANCE = 1e-2


def check(workload: Workload, shape: Shape, call: Callable, peer: Callable | None) -> Errors:
    """Compare call 0 with the reference at FlashMLA's tolerances, and with the peer's call.

    Raises AssertionError that says what differs, and from what.
    """
    heads = shape.heads
    out, lse = call(0)
    out, lse = out[:, :, :heads], lse[:, :heads]
    ref_out, ref_lse = workload.reference(shape, 0)
    testing.assert_close_flashmla(out, lse, ref_out, ref_lse)
    if peer is None:
        return Errors(row_error(out, ref_out), None)
    peer_error = row_error(out, peer(0)[0][:, :, :heads])
    assert peer_error < _PEER_TOLERANCE, f"out: differs from FlashMLA's by {peer_error:.2e}"
    return Errors(row_error(out, ref_out), peer_error)


def row_error(out: Tensor, expected: Tensor) -> float:
    """The largest norm of a row's (last dim) difference, over the norm of the expected row."""
    error = (out.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return error.max().item()
