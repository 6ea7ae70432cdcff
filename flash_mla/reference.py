"""Sparse decode in plain PyTorch: what the kernels are compared with, and what serves CPU tensors.

float32 throughout, from the dequantized cache. Everything the public API promises about values is
written down here once: which indices name a key, what the sink does, what a row without keys gives.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Iterator, Optional, Tuple

import torch
from torch import Tensor

from flash_mla import kv_cache

# Tokens are handled a few at a time, and the keys of one too, if need be: dequantizing 128 tokens
# x 2048 keys at once would take over 1 GiB. A key of a chunk costs about this much at its peak: its
# raw bytes, the float32 key, and one temporary of that size.
_CHUNK_BYTES = 256 * 1024 * 1024
_BYTES_PER_KEY = 6 * 1024
_CHUNK_KEYS = _CHUNK_BYTES // _BYTES_PER_KEY


def sparse_decode(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    sm_scale: float,
    topk_length: Optional[Tensor] = None,
    attn_sink: Optional[Tensor] = None,
    extra_kv: Optional[Tensor] = None,
    extra_indices: Optional[Tensor] = None,
    extra_topk_length: Optional[Tensor] = None,
    d_v: int = 512,
    out: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Attention of every query over the keys that its indices name.

    The keys of a token are those of ``indices[..., :topk_length]`` and then those of
    ``extra_indices[..., :extra_topk_length]``, each from its own cache, a duplicate counted as
    often as it occurs. An index that is negative or past the last slot of its cache is no key,
    and no byte of a slot that is no key is ever looked at. Lengths below 0 count as 0 and above
    the width as the width.

        p = softmax(sm_scale * q·k),  out = sum p v * 1 / (1 + exp(attn_sink - lse))

    ``lse`` (natural log) does not see the sink. A row without keys: out = 0, lse = +inf.

    Args:
        q: [b, s_q, h_q, d_qk], bfloat16 or float32.
        kv, extra_kv: caches as in :mod:`flash_mla.kv_cache`; the record follows from d_qk and the
            bytes per token.
        indices, extra_indices: [b, s_q, topk] and [b, s_q, extra_topk], integer slots.
        topk_length, extra_topk_length: [b] integer.
        attn_sink: [h_q] float32, natural-log units like ``lse``.
        out: [b, s_q, h_q, d_v] to write into, any dtype and strides; default: a new bfloat16 one.

    Returns:
        out, and lse [b, h_q, s_q] float32.
    """
    b, s_q, h_q, _ = q.shape
    if out is None:
        out = torch.empty(b, s_q, h_q, d_v, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(b, h_q, s_q, dtype=torch.float32, device=q.device)

    caches = [_Cache(kv, indices, topk_length, q.shape[-1])]
    if extra_kv is not None:
        caches.append(_Cache(extra_kv, extra_indices, extra_topk_length, q.shape[-1]))

    width = sum(cache.indices.shape[-1] for cache in caches)
    step = max(1, _CHUNK_KEYS // max(width, 1))
    with _full_float32(q.device.type):
        # Rows of one request share nothing, so (request, position) pairs form one list of tokens.
        for start in range(0, b * s_q, step):
            tokens = torch.arange(start, min(start + step, b * s_q), device=q.device)
            request, position = tokens // s_q, tokens % s_q
            rows, row_lse = _attend(
                q[request, position].float(), caches, request, position, sm_scale, attn_sink, d_v
            )
            out[request, position] = rows.to(out.dtype)
            lse[request, :, position] = row_lse
    return out, lse


def is_key(slots: Tensor, kv: Tensor, length: Optional[Tensor]) -> Tensor:
    """Bool, of the shape of ``slots`` [n, ..., width]: which of them name a key of ``kv``; ``length`` [n] or None."""
    valid = (slots >= 0) & (slots < kv_cache.num_slots(kv))
    if length is not None:
        column = torch.arange(slots.shape[-1], device=slots.device)
        valid &= column < length.reshape(-1, *[1] * (slots.dim() - 1))
    return valid


class _Cache:
    """One cache with the indices into it."""

    def __init__(self, kv: Tensor, indices: Tensor, length: Optional[Tensor], d_qk: int):
        self.kv = kv
        self.indices = indices
        self.length = length
        self.record = kv_cache.record_of(d_qk, kv.shape[-1])

    def valid(self, request: Tensor, position: Tensor) -> Tensor:
        """Bool [tokens, width]: which indices of the tokens name a key."""
        slots = self.indices[request, position]
        return is_key(slots, self.kv, None if self.length is None else self.length[request])

    def keys(self, request: Tensor, position: Tensor, valid: Tensor, columns: slice) -> Tensor:
        """Keys of the tokens, float32 [tokens, columns, d_qk], zero where ``valid`` is not set."""
        slots, valid = self.indices[request, position, columns].to(torch.int64), valid[:, columns]
        if kv_cache.num_slots(self.kv) == 0:
            shape = (*slots.shape, self.record.d_qk)
            return torch.zeros(shape, dtype=torch.float32, device=slots.device)
        keys = kv_cache.gather(self.kv, self.record, torch.where(valid, slots, 0))
        # Slot 0 stood in for the others and may hold NaN: replaced, not multiplied by zero.
        return keys.masked_fill_(~valid.unsqueeze(-1), 0.0)


def _attend(
    q: Tensor,
    caches: "list[_Cache]",
    request: Tensor,
    position: Tensor,
    sm_scale: float,
    attn_sink: Optional[Tensor],
    d_v: int,
) -> Tuple[Tensor, Tensor]:
    """q [tokens, h_q, d_qk] -> out [tokens, h_q, d_v] and lse [tokens, h_q], float32."""
    valid_of = [cache.valid(request, position) for cache in caches]
    valid = torch.cat(valid_of, dim=-1)
    empty = ~valid.any(dim=-1, keepdim=True)  # [tokens, 1]

    def pieces() -> Iterator[Tensor]:
        for cache, cache_valid in zip(caches, valid_of):
            for start in range(0, cache_valid.shape[-1], _CHUNK_KEYS):
                columns = slice(start, start + _CHUNK_KEYS)
                yield cache.keys(request, position, cache_valid, columns)

    # Keys are needed twice: kept if all of them fit, else fetched again.
    fits = all(part.shape[-1] <= _CHUNK_KEYS for part in valid_of)
    kept = list(pieces()) if fits else None
    # (Without columns there is no piece.)
    none = [q.new_empty(*q.shape[:2], 0)]
    scores = torch.cat(none + [q @ keys.mT for keys in kept or pieces()], dim=-1) * sm_scale
    scores.masked_fill_(~valid.unsqueeze(1), -torch.inf)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(empty, torch.inf)  # [tokens, h_q]

    p = torch.exp(scores - lse.unsqueeze(-1))  # exp(-inf - inf) = 0 in an empty row
    out, column = q.new_zeros(*q.shape[:2], d_v), 0
    for keys in kept or pieces():
        out += p[..., column : column + keys.shape[1]] @ keys[..., :d_v]
        column += keys.shape[1]
    if attn_sink is not None:
        # 1 / (1 + exp(sink - lse)) without overflow; +inf - +inf of an empty row is masked below.
        out = out * torch.sigmoid(lse - attn_sink).unsqueeze(-1)
    return out.masked_fill(empty.unsqueeze(-1), 0.0), lse


# Precision is the process's, not a thread's: one call at a time.
_precision_lock = threading.RLock()


@contextlib.contextmanager
def _full_float32(device_type: str) -> Iterator[None]:
    """No TF32, bfloat16 or autocast in matrix products, whatever the caller has set for his own."""
    backend = torch.backends.cuda.matmul if device_type == "cuda" else torch.backends.mkldnn.matmul
    with _precision_lock, torch.autocast(device_type, enabled=False):
        saved = backend.fp32_precision
        if saved in ("ieee", "none"):
            yield
            return
        # What is read may be inherited from the setting for all backends, and then stays so.
        inherited = saved == torch.backends.fp32_precision
        backend.fp32_precision = "ieee"
        try:
            yield
        finally:
            backend.fp32_precision = "none" if inherited else saved
