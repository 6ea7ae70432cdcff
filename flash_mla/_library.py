"""Loads the compiled library, which registers the operators of namespace ``flash_mla``.

After the import, ``ops`` is that namespace, and ``HAS_KERNELS`` says whether the library was built
with its GPU kernels; without, it serves CPU tensors only.
"""

from pathlib import Path

import torch

PATH = Path(__file__).with_name("_flashmla_C.abi3.so")

if not PATH.exists():
    raise ImportError(
        f"{PATH} is missing: flash_mla was not built. In its repository run "
        "`make build`, or `pip install --no-build-isolation .` with torch 2.11 or later installed."
    )
torch.ops.load_library(PATH)

ops = torch.ops.flash_mla
HAS_KERNELS: bool = torch._C._dispatch_has_kernel_for_dispatch_key("flash_mla::sparse_decode_fwd", "CUDA")
