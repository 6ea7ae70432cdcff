"""Sparse FP8 MLA decoding for 1 to 128 heads on Hopper: FlashMLA's API, see the README.

CUDA tensors run the kernels (SM90), CPU tensors the PyTorch reference.
"""

__version__ = "0.1.0"

from flash_mla import _operators, flash_mla_interface  # noqa: F401
from flash_mla._library import HAS_KERNELS, ops as _ops

# The interface module is written to be vendored by vLLM, whose own library registers the operators
# under another name. Here they are these.
flash_mla_interface.flash_mla_cuda = _ops

from flash_mla.flash_mla_interface import (  # noqa: E402
    FlashMLASchedMeta,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

__all__ = [
    "HAS_KERNELS",
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]
