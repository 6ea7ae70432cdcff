"""FlashMLA's Python API on SM90.

vLLM vendors this file alone and replaces the line that assigns ``flash_mla_cuda`` by an import of its own library
followed by that line. So the file imports nothing else of this package and reaches every operator through
``flash_mla_cuda``. The package's ``__init__`` points the name at the package's own operators.
"""

import dataclasses
from typing import Optional, Tuple

import torch

flash_mla_cuda = torch.ops._flashmla_C

# SM count of an H200 (and H100 SXM): what a plan is shown for when the tensors are on the CPU.
_SMS_WITHOUT_GPU = 132


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a sparse decode call is laid out on the GPU.

    head_tile: rows of q (heads of one token) that a CTA works on.
    splits: CTAs, one thread-block cluster, that share the keys of a token and merge in the same launch.
    block_keys: keys that a CTA works on at a time: 64, or, with a head tile of 8 or 16, 32.
    reason: what the choice followed from.
    """

    head_tile: int
    splits: int
    block_keys: int
    reason: str

    def __str__(self) -> str:
        splits = f"{self.splits} split" + ("s" if self.splits != 1 else "")
        return f"head tile {self.head_tile}, {splits}, blocks of {self.block_keys} keys ({self.reason})"


@dataclasses.dataclass
class FlashMLASchedMeta:
    """What one decode step shares between its layers of one type.

    Nothing here depends on values (lengths, indices, q), only on shapes, so a captured CUDA graph may be replayed
    with other values. The first ``flash_mla_with_kvcache`` that gets the object fills ``config``; later calls must
    have the same shapes.
    """

    @dataclasses.dataclass
    class Config:
        b: int
        s_q: int
        h_q: int
        d_qk: int
        page_block_size: int
        h_k: int

        causal: bool
        is_fp8_kvcache: bool
        topk: Optional[int]

        extra_page_block_size: Optional[int]
        extra_topk: Optional[int]

        enable_batch_invariant: bool
        device: torch.device

    have_initialized: bool = False

    config: Optional[Config] = None

    # None, or a forced plan: int32 [head_tile, splits, block_keys] on the CPU. Nothing else is ever stored here:
    # the operator plans anew at each call, which takes it about a microsecond and no device work.
    tile_scheduler_metadata: Optional[torch.Tensor] = None
    num_splits: Optional[torch.Tensor] = None

    def force_plan(self, *, splits: int, block_keys: int = 64, head_tile: int = 8) -> "FlashMLASchedMeta":
        """For experiments: take this plan instead of the library's choice. Before the first call; returns self.

        splits: 1..16. head_tile: 8, 16 or 64. block_keys: 64, or 32 with head_tile 8 or 16. Any head_tile takes any number
        of heads. The operator refuses other values.

        Raises RuntimeError if a call has used the object already, ValueError if a number is not an int.
        """
        for name, value in (("splits", splits), ("block_keys", block_keys), ("head_tile", head_tile)):
            if not isinstance(value, int) or not -(2**31) <= value < 2**31:
                raise ValueError(f"{name}: got {value!r}; takes an int of 32 bits")
        if self.have_initialized:
            raise RuntimeError(
                "force_plan: got a FlashMLASchedMeta that a call has already used; takes a fresh one (get_mla_metadata())"
            )
        self.tile_scheduler_metadata = torch.tensor([head_tile, splits, block_keys], dtype=torch.int32, device="cpu")
        return self

    @property
    def plan(self) -> Optional[Plan]:
        """The plan of the calls that use this object; None before the first one, and for dense attention."""
        if self.config is None or self.config.topk is None:
            return None
        if self.tile_scheduler_metadata is not None:
            return Plan(*self.tile_scheduler_metadata.tolist(), reason="forced")
        c = self.config
        if c.device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(c.device).multi_processor_count
        else:
            num_sms = _SMS_WITHOUT_GPU
        tokens, width = c.b * c.s_q, c.topk + (c.extra_topk or 0)
        if c.enable_batch_invariant:
            reason = "batch-invariant: the same for every batch"
        else:
            reason = f"by estimated times for {tokens} tokens x {width} keys, {c.h_q} heads, on {num_sms} SMs"
        plan = flash_mla_cuda.sparse_decode_plan(tokens, width, c.h_q, num_sms, c.enable_batch_invariant)
        return Plan(*plan, reason=reason)


def get_mla_metadata(*args, **kwargs) -> Tuple[FlashMLASchedMeta, None]:
    """A fresh FlashMLASchedMeta for ``flash_mla_with_kvcache``. No device work, no synchronization.

    Takes no arguments, or those of FlashMLA's older form, ``(cache_seqlens, num_q_tokens_per_head_k, num_heads_k,
    num_heads_q=None, is_fp8_kvcache=False, topk=None)``, which are ignored: the plan follows from the shapes of
    the first call.

    Returns (sched_meta, None); the second element is what remains of the older form's ``num_splits``.
    """
    return FlashMLASchedMeta(), None


def _check_same_config(sched_meta: FlashMLASchedMeta, config: FlashMLASchedMeta.Config) -> None:
    """Raises ValueError if ``sched_meta`` was first used with another configuration."""
    for field in dataclasses.fields(config):
        had, got = getattr(sched_meta.config, field.name), getattr(config, field.name)
        if had != got:
            raise ValueError(
                f"tile_scheduler_metadata: its first call had {field.name} = {had}, this call has {field.name} = {got}; "
                "use a fresh object from get_mla_metadata() for each set of shapes"
            )


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: Optional[torch.Tensor],
    cache_seqlens: Optional[torch.Tensor],
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Optional[torch.Tensor] = None,
    attn_sink: Optional[torch.Tensor] = None,
    extra_k_cache: Optional[torch.Tensor] = None,
    extra_indices_in_kvcache: Optional[torch.Tensor] = None,
    topk_length: Optional[torch.Tensor] = None,
    extra_topk_length: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    enable_batch_invariant: bool = False,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Decode attention over a paged MLA cache. Sparse FP8 here; dense decoding is not implemented.

    The keys of a token are those that ``indices[:topk_length]`` names in ``k_cache``, then those that
    ``extra_indices_in_kvcache[:extra_topk_length]`` names in ``extra_k_cache``. With p = softmax(softmax_scale *
    q k^T) over them, out = p v, times 1 / (1 + exp(attn_sink - lse)). Duplicates count as often as they occur. A
    token without keys gets out = 0 and lse = +inf.

    Args:
        q: [b, s_q, h_q, d_qk] bfloat16, last dim contiguous, h_q 1..128. d_qk 512 (DeepSeek V4) or 576 (V3.2).
        k_cache: [num_blocks, page_block_size, 1, bytes per token] uint8, int8 or float8_e4m3fn; 584 bytes (V4) or
            656 (V3.2), laid out as ``flash_mla.kv_cache`` says. stride(0), in bytes, may exceed a block and is a
            multiple of 16.
        block_table, cache_seqlens: dense decoding's; ignored in sparse decoding.
        head_dim_v: 512.
        tile_scheduler_metadata: from ``get_mla_metadata()``; one object for all calls of the same shapes.
        num_splits: None.
        softmax_scale: defaults to d_qk ** -0.5.
        causal: False for sparse attention.
        is_fp8_kvcache: True for sparse attention.
        indices: [b, s_q, topk] int32: block * page_block_size + offset. A negative index, or one past the last
            slot of the cache, is no key. Any topk.
        attn_sink: [h_q] float32, in the unit of lse; -inf has no effect, +inf makes out 0.
        extra_k_cache, extra_indices_in_kvcache: a second cache of the same record with its own page size.
        topk_length, extra_topk_length: [b] int32, clamped to [0, topk]; what lies behind them is never followed.
        out: [b, s_q, h_q, 512] bfloat16 to write into, last dim contiguous, other strides free; apart from the
            memory of everything that is read.
        enable_batch_invariant: one split for every token, so that a token's result does not depend on the others.

    Returns:
        out: [b, s_q, h_q, 512] bfloat16.
        lse: [b, h_q, s_q] float32, natural logarithm of the sum of exponentials; it does not see the sink.
        Neither has gradients.

    Raises:
        ValueError, RuntimeError: an argument that this does not take; the message names it, what it got and what
            it takes. NotImplementedError: dense decoding.
    """
    sched_meta = tile_scheduler_metadata
    if not isinstance(sched_meta, FlashMLASchedMeta):
        raise ValueError(
            f"tile_scheduler_metadata: got {type(sched_meta).__name__}; takes the FlashMLASchedMeta of get_mla_metadata()"
        )
    if num_splits is not None:
        raise ValueError(f"num_splits: got {type(num_splits).__name__}; takes None")

    if indices is None:
        sparse_only = {
            "attn_sink": attn_sink,
            "extra_k_cache": extra_k_cache,
            "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length,
            "extra_topk_length": extra_topk_length,
        }
        for name, value in sparse_only.items():
            if value is not None:
                raise ValueError(f"{name}: got a tensor; takes None in dense decoding (indices is None)")
        if block_table is None or cache_seqlens is None:
            name = "block_table" if block_table is None else "cache_seqlens"
            raise ValueError(f"{name}: got None; takes a tensor in dense decoding (indices is None)")
    else:
        if causal:
            raise ValueError("causal: got True; takes False in sparse decoding (indices is given)")
        if not is_fp8_kvcache:
            raise ValueError("is_fp8_kvcache: got False; takes True in sparse decoding (indices is given)")
    for name, tensor, dims in (
        ("q", q, 4),
        ("k_cache", k_cache, 4),
        ("indices", indices, 3),
        ("extra_k_cache", extra_k_cache, 4),
        ("extra_indices_in_kvcache", extra_indices_in_kvcache, 3),
    ):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name in ("q", "k_cache")):
            raise ValueError(f"{name}: got {type(tensor).__name__}; takes a tensor of {dims} dims")
        if tensor is not None and tensor.dim() != dims:
            raise ValueError(f"{name}: got {tensor.dim()} dims, shape {tuple(tensor.shape)}; takes {dims}")
    if softmax_scale is None:
        softmax_scale = max(q.shape[-1], 1) ** -0.5  # the operator refuses 0 dims, by name

    config = FlashMLASchedMeta.Config(
        b=q.shape[0],
        s_q=q.shape[1],
        h_q=q.shape[2],
        d_qk=q.shape[3],
        page_block_size=k_cache.shape[1],
        h_k=k_cache.shape[2],
        causal=causal,
        is_fp8_kvcache=is_fp8_kvcache,
        topk=None if indices is None else indices.shape[2],
        extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
        extra_topk=None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[2],
        enable_batch_invariant=enable_batch_invariant,
        device=q.device,
    )
    if sched_meta.have_initialized:
        _check_same_config(sched_meta, config)

    if indices is not None:
        result = flash_mla_cuda.sparse_decode_fwd(
            q,
            k_cache,
            indices,
            topk_length,
            attn_sink,
            sched_meta.tile_scheduler_metadata,
            sched_meta.num_splits,
            extra_k_cache,
            extra_indices_in_kvcache,
            extra_topk_length,
            head_dim_v,
            softmax_scale,
            out,
            enable_batch_invariant,
        )
    else:
        result = flash_mla_cuda.dense_decode_fwd(
            q,
            k_cache,
            head_dim_v,
            cache_seqlens,
            block_table,
            softmax_scale,
            causal,
            sched_meta.tile_scheduler_metadata,
            sched_meta.num_splits,
            out,
        )
    out, lse, sched_meta.tile_scheduler_metadata, sched_meta.num_splits = result
    # Only now: a call that was refused leaves the object as it was.
    sched_meta.have_initialized, sched_meta.config = True, config
    return out, lse


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Optional[torch.Tensor] = None,
    topk_length: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill attention over a bfloat16 cache. Not implemented: raises NotImplementedError.

    Args:
        q: [s_q, h_q, d_qk] bfloat16.
        kv: [s_kv, 1, d_qk] bfloat16.
        indices: [s_q, 1, topk] int32.
        sm_scale: softmax scale.
        d_v: 512.
        attn_sink: [h_q] float32. topk_length: [s_q] int32. out: [s_q, h_q, d_v] bfloat16.

    Returns:
        out [s_q, h_q, d_v] bfloat16, max_logits [s_q, h_q] float32, lse [s_q, h_q] float32.
    """
    return flash_mla_cuda.sparse_prefill_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out)


def _only_on_sm100(name: str):
    raise NotImplementedError(
        f"{name} exists in FlashMLA for SM100 only, and this library is for SM90; use FlashMLA on SM100, or "
        "FlashAttention 3 on SM90"
    )


def flash_attn_varlen_func(*args, **kwargs):
    """Raises NotImplementedError: FlashMLA has it for SM100 only."""
    _only_on_sm100("flash_attn_varlen_func")


def flash_attn_varlen_qkvpacked_func(*args, **kwargs):
    """Raises NotImplementedError: FlashMLA has it for SM100 only."""
    _only_on_sm100("flash_attn_varlen_qkvpacked_func")


def flash_attn_varlen_kvpacked_func(*args, **kwargs):
    """Raises NotImplementedError: FlashMLA has it for SM100 only."""
    _only_on_sm100("flash_attn_varlen_kvpacked_func")
