"""Where the tools and headers of a build come from: nvcc, torch, CUTLASS, ninja.

Nothing here imports torch: its headers and ``libtorch.so`` are all that a build needs, and they
can be located without running it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MINIMUM_NVCC = (12, 3)  # the first with everything that FlashMLA-style SM90 code needs

# nvcc as PyPI packages. 13.0, because a kernel built by it runs under every driver that serves
# torch's CUDA 13 builds; the static runtime keeps it independent of the CUDA torch was built for.
NVCC_FROM_PYPI = [
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
]
CUTLASS_FROM_PYPI = ["nvidia-cutlass==4.2.*"]


class ToolchainError(RuntimeError):
    """Something that a build cannot do without is missing; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Cuda:
    """A usable CUDA toolkit."""

    nvcc: Path
    root: Path
    version: tuple[int, int]

    @property
    def include(self) -> Path:
        return self.root / "include"

    @property
    def libraries(self) -> Path:
        """The folder of libcudart_static.a (``lib64`` in a toolkit, ``lib`` in PyPI's packages)."""
        for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            if (self.root / name / "libcudart_static.a").is_file():
                return self.root / name
        raise ToolchainError(f"no libcudart_static.a under {self.root}")


def wants_kernels() -> str:
    """``FLASH_MLA_KERNELS``: auto (default: if there is an nvcc), on (fail without), off."""
    choice = os.environ.get("FLASH_MLA_KERNELS", "auto")
    if choice not in ("auto", "on", "off"):
        raise ToolchainError(f"FLASH_MLA_KERNELS is {choice!r}, expected auto, on or off")
    return choice


def find_cuda() -> Cuda | None:
    """The first usable toolkit of: CUDA_HOME, nvcc on the PATH, /usr/local/cuda, PyPI's packages."""
    for nvcc in _nvcc_candidates():
        cuda = _probe(nvcc)
        if cuda and cuda.version >= MINIMUM_NVCC and (cuda.include / "cuda_runtime.h").is_file():
            return cuda
    return None


def _nvcc_candidates():
    if os.environ.get("CUDA_HOME"):
        yield Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"
    if found := shutil.which("nvcc"):
        yield Path(found)
    yield Path("/usr/local/cuda/bin/nvcc")
    for site in _site_folders():
        yield site / "nvidia" / "cu13" / "bin" / "nvcc"


def _probe(nvcc: Path) -> Cuda | None:
    """Ask nvcc itself for its version and root: the file on the PATH may be a link or a script."""
    if not nvcc.is_file():
        return None
    try:
        asked = {
            flag: subprocess.run([str(nvcc), *flag.split()], capture_output=True, text=True)
            for flag in ("--version", "--dryrun -c probe.cu")
        }
    except OSError:
        return None
    version = re.search(r"release (\d+)\.(\d+)", asked["--version"].stdout)
    top = re.search(r"^#\$ TOP=(.+)$", asked["--dryrun -c probe.cu"].stderr, re.MULTILINE)
    if not version or not top:
        return None
    return Cuda(nvcc, Path(top[1].strip()).resolve(), (int(version[1]), int(version[2])))


def nvcc_requirements() -> list[str]:
    """What pip has to install so that ``find_cuda`` finds something: nothing if it already does."""
    if wants_kernels() == "off" or not sys.platform.startswith("linux") or find_cuda():
        return []
    return NVCC_FROM_PYPI


def find_torch() -> Path | None:
    """The folder of an installed torch.

    pip's build isolation hides the environment that the package is being installed into, which
    is where its torch lies; sysconfig still tells that environment's folder.
    """
    for site in _site_folders():
        if (site / "torch" / "include" / "torch" / "csrc" / "stable" / "library.h").is_file():
            return site / "torch"
    return None


def torch_requirements() -> list[str]:
    return [] if find_torch() else ["torch>=2.11"]


def find_cutlass() -> Path | None:
    """The folder of CUTLASS's headers: from CUTLASS_PATH, or PyPI's nvidia-cutlass."""
    candidates = [site / "cutlass_library" / "source" / "include" for site in _site_folders()]
    if os.environ.get("CUTLASS_PATH"):
        candidates.insert(0, Path(os.environ["CUTLASS_PATH"]) / "include")
    for include in candidates:
        if (include / "cutlass" / "cutlass.h").is_file():
            return include
    return None


def includes_cutlass(source: Path) -> bool:
    return bool(re.search(r'^\s*#\s*include\s*[<"](cute|cutlass)/', source.read_text(), re.MULTILINE))


def cutlass_requirements(sources: list[Path]) -> list[str]:
    """Nothing unless one of the sources includes CUTLASS and it is not here yet."""
    return CUTLASS_FROM_PYPI if any(map(includes_cutlass, sources)) and not find_cutlass() else []


def find_ninja() -> str:
    """PyPI's ninja of this Python (its scripts need not be on the PATH), else the system's."""
    if importlib.util.find_spec("ninja"):
        import ninja

        if (binary := Path(ninja.BIN_DIR) / "ninja").is_file():
            return str(binary)
    if found := shutil.which("ninja"):
        return found
    raise ToolchainError("ninja not found: pip install ninja")


def find_compiler() -> str:
    """The host C++ compiler: CXX, else g++. It must know C++20."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise ToolchainError("no C++ compiler: install g++ (10 or later), or set CXX")
    return compiler


def python_include() -> Path | None:
    """Python's headers, if installed: with them the library can also be imported as a module."""
    include = Path(sysconfig.get_path("include"))
    return include if (include / "Python.h").is_file() else None


def _site_folders() -> list[Path]:
    """Every folder that Python packages may lie in: sys.path, then the environment's own."""
    folders = [Path(entry) for entry in sys.path if entry]
    folders += [Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
