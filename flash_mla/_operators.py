"""The operators' implementations that are written in Python: CPU tensors, tracing, refusals.

The library defines the schemas and serves CUDA tensors. Everything here is for namespace
``flash_mla`` alone; the library that is built for vLLM does without.

Tracing. FlashMLA's schema of ``sparse_decode_fwd`` returns its arguments (``Tensor(c!)? out_`` comes
back as the first result, the scheduler tensors as the last two). Eager PyTorch does not mind, but
functionalization, a step of ``torch.compile`` and ``torch.export``, refuses a custom operator whose
results alias its arguments, whatever its fake implementation does. So while tracing, the operator is
decomposed: ``sparse_decode_out`` does the work, writes into a tensor that is always given and returns
only what is new, which PyTorch functionalizes by itself; passing the arguments back is left to
Python. A CompositeImplicitAutograd kernel is exactly such a decomposition. The dispatcher prefers
the kernels registered for CPU and CUDA, so calls outside of a trace never see it.
"""

from typing import NamedTuple, NoReturn, Optional, Tuple

import torch
from torch import Tensor

from flash_mla import reference
from flash_mla._library import HAS_KERNELS, ops

# The arguments of sparse_decode_fwd up to sm_scale, then the one that is written.
_SPARSE_DECODE_OUT = (
    "sparse_decode_out(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "Tensor? tile_scheduler_metadata, Tensor? num_splits, "
    "Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_topk_length, "
    "int d_v, float sm_scale, Tensor(a!) out_, bool enable_batch_invariant) -> Tensor"
)

SparseDecodeResult = Tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]


class _Arguments(NamedTuple):
    """Those of ``sparse_decode_fwd``. PyTorch leaves out the last ones where they have their defaults."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Optional[Tensor]
    attn_sink: Optional[Tensor]
    tile_scheduler_metadata: Optional[Tensor]
    num_splits: Optional[Tensor]
    extra_kv: Optional[Tensor]
    extra_indices: Optional[Tensor]
    extra_topk_length: Optional[Tensor]
    d_v: int
    sm_scale: float
    out_: Optional[Tensor] = None
    enable_batch_invariant: bool = False


@torch.no_grad()
def _sparse_decode_on_cpu(*arguments) -> SparseDecodeResult:
    """The reference, behind the same checks that the CUDA operator makes. As there, results have no gradients."""
    a = _Arguments(*arguments)
    ops.sparse_decode_check(*a)
    out, lse = reference.sparse_decode(
        a.q,
        a.kv,
        a.indices,
        topk_length=a.topk_length,
        attn_sink=a.attn_sink,
        extra_kv=a.extra_kv,
        extra_indices=a.extra_indices,
        extra_topk_length=a.extra_topk_length,
        d_v=a.d_v,
        sm_scale=a.sm_scale,
        out=a.out_,
    )
    return out, lse, a.tile_scheduler_metadata, a.num_splits


def _sparse_decode_traced(*arguments) -> SparseDecodeResult:
    """``sparse_decode_fwd`` in terms of ``sparse_decode_out``.

    A call also comes here if any of its tensors is on a device that no kernel serves, such as meta: only all of them may be.
    """
    a = _Arguments(*arguments)
    for name, value in a._asdict().items():
        expected, takes = a.q.device, f"the device of q, {a.q.device}"
        if name == "tile_scheduler_metadata":
            expected, takes = torch.device("cpu"), "None, or a forced plan on the CPU"
        if isinstance(value, Tensor) and value.device != expected:
            raise RuntimeError(f"flash_mla: {name}: got a tensor on {value.device}; takes {takes}")
    _check_traced(a)
    if a.out_ is None:
        a = a._replace(out_=a.q.new_empty(*a.q.shape[:-1], a.d_v))
    return a.out_, ops.sparse_decode_out(*a), a.tile_scheduler_metadata, a.num_splits


# name -> rank and, unless it may have several, dtype
_TRACED = {
    "q": (4, torch.bfloat16),
    "kv": (4, None),
    "indices": (3, torch.int32),
    "topk_length": (1, torch.int32),
    "attn_sink": (1, torch.float32),
    "extra_kv": (4, None),
    "extra_indices": (3, torch.int32),
    "extra_topk_length": (1, torch.int32),
    "out_": (4, torch.bfloat16),
}


def _check_traced(a: _Arguments) -> None:
    """What shapes follow from. The rest is checked when the graph runs: `sparse_decode_check` wants no symbolic sizes."""
    for name, (rank, dtype) in _TRACED.items():
        value = getattr(a, name)
        if value is not None and (value.dim() != rank or dtype not in (None, value.dtype)):
            got = f"{value.dtype} {list(value.shape)}"
            takes = f"{rank} dimensions" + (f" of {dtype}" if dtype else "")
            raise RuntimeError(f"flash_mla: {name}: got {got}; takes {takes}")
    if a.d_v != 512:
        raise RuntimeError(f"flash_mla: d_v (head_dim_v): got {a.d_v}; takes 512")
    if a.q.shape[-1] not in (512, 576):
        raise RuntimeError(f"flash_mla: q: got d_qk {a.q.shape[-1]}; takes 512 (V4) or 576 (V3.2)")
    if a.out_ is not None and a.out_.shape != (*a.q.shape[:-1], a.d_v):
        raise RuntimeError(
            f"flash_mla: out_ (out): got {list(a.out_.shape)}; takes {[*a.q.shape[:-1], a.d_v]}"
        )


def _sparse_decode_out(*arguments) -> Tensor:
    """What a traced graph runs: back to the kernel of the tensors' device."""
    return ops.sparse_decode_fwd(*arguments)[1]


def _sparse_decode_out_fake(q: Tensor, *arguments) -> Tensor:
    b, s_q, h_q, _ = q.shape
    return q.new_empty(b, h_q, s_q, dtype=torch.float32)


def _without_kernels(q: Tensor, *arguments, **keywords) -> NoReturn:
    raise RuntimeError(
        f"q: got a tensor on {q.device}, but this flash_mla was built without GPU kernels, because "
        "its build found no nvcc; takes CPU tensors, or a build with CUDA 12.3 or later installed"
    )


def _refusal(message: str):
    def refuse(*arguments, **keywords) -> NoReturn:
        raise NotImplementedError(message)

    return refuse


# Registrations last as long as this object does.
_library = torch.library.Library("flash_mla", "FRAGMENT")
_library.impl("sparse_decode_fwd", _sparse_decode_on_cpu, "CPU")
_library.impl("sparse_decode_fwd", _sparse_decode_traced, "CompositeImplicitAutograd")
# There is no backward, so results do not require gradients, whatever the arguments do.
for _device in ("CPU", "CUDA"):
    _library.impl("sparse_decode_fwd", torch.library.fallthrough_kernel, f"Autograd{_device}")
if not HAS_KERNELS:
    _library.impl("sparse_decode_fwd", _without_kernels, "CUDA")
_library.define(_SPARSE_DECODE_OUT)
_library.impl("sparse_decode_out", _sparse_decode_out, "CPU")
_library.impl("sparse_decode_out", _sparse_decode_out, "CUDA")
torch.library.register_fake("flash_mla::sparse_decode_out", _sparse_decode_out_fake, lib=_library)
# FlashMLA's operators that this project does not have: name, message, name, message, ...
_missing = iter(ops.missing_operators())
for _name, _message in zip(_missing, _missing):
    _library.impl(_name, _refusal(_message), "CompositeExplicitAutograd")
