"""Build the library with ninja: ``python -m build_tools.build [package|vllm]``.

One ninja file describes both libraries. They share the kernels' objects and differ in the
namespace that their operators are registered under:

    package   build/flash_mla/_flashmla_C.abi3.so, copied to flash_mla/; namespace flash_mla
    vllm      build/vllm/_flashmla_C.abi3.so; namespace _flashmla_C, the one that vLLM calls

Environment: FLASH_MLA_KERNELS (auto, on, off), MAX_JOBS, CUDA_HOME, CXX, CUTLASS_PATH.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from build_tools import toolchain
from build_tools.toolchain import ROOT, ToolchainError

BUILD = ROOT / "build"
LIBRARY_NAME = "_flashmla_C.abi3.so"
LIBRARIES = {
    "package": (BUILD / "flash_mla" / LIBRARY_NAME, "flash_mla"),
    "vllm": (BUILD / "vllm" / LIBRARY_NAME, "_flashmla_C"),
}

# The oldest torch that the library runs under (2.11). The headers of a newer torch then offer
# nothing that 2.11 lacks, so one binary serves 2.11 and everything later.
TORCH_TARGET_VERSION = "0x020B000000000000"

HOST_FLAGS = ["-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "-gencode=arch=compute_90a,code=sm_90a",
    "--expt-relaxed-constexpr",
    "-Xptxas=-v",  # registers, spills and shared memory, which check_ptxas reads
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall",
]

# nvcc prints what ptxas reports between its warnings. The report goes to a file beside the
# object; the rest is shown.
RULES = """
rule host
  command = $cxx $flags -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = g++ $in

rule nvcc
  command = $nvcc $flags -MD -MF $out.d -c $in -o $out > $log 2>&1; status=$$?; $
    grep -v -e 'ptxas info' -e 'bytes stack frame' $log; exit $$status
  depfile = $out.d
  deps = gcc
  description = nvcc $in

rule link
  command = $cxx -shared $in -o $out $flags
  description = link $out
"""


def host_sources() -> list[Path]:
    return sorted((ROOT / "csrc" / "api").glob("*.cpp"))


def kernel_sources() -> list[Path]:
    return sorted((ROOT / "csrc" / "sm90").rglob("*.cu"))


def all_sources() -> list[Path]:
    return sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())


def ptxas_log(kernel_source: Path) -> Path:
    """Where the build leaves what ptxas reported for a source."""
    return BUILD / "kernels" / f"{kernel_source.relative_to(ROOT)}.ptxas.log"


def write_ninja_file(cuda: toolchain.Cuda | None) -> Path:
    """Describe both libraries; without ``cuda``, both get operators and plan but no kernels."""
    torch = toolchain.find_torch()
    if torch is None:
        raise ToolchainError("torch 2.11 or later is not installed for this Python; its headers are needed")

    includes = [ROOT / "csrc"]
    if missing := toolchain.cutlass_requirements(all_sources()):
        raise ToolchainError(f"CUTLASS not found: set CUTLASS_PATH, or pip install --no-deps {missing[0]!r}")
    if any(map(toolchain.includes_cutlass, all_sources())):
        includes.append(toolchain.find_cutlass())
    host_includes = [*includes, torch / "include"]
    if python := toolchain.python_include():
        host_includes.append(python)

    host_flags = [*HOST_FLAGS, f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    nvcc_flags = [*NVCC_FLAGS, *(f"-I{_relative(folder)}" for folder in includes)]
    if os.environ.get("CXX"):
        nvcc_flags.append(f"-ccbin={os.environ['CXX']}")
    # Without --no-as-needed the linker drops libtorch, which nothing refers to by itself: it is
    # there for what it pulls in, libtorch_cuda where torch has one.
    link_flags = [f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
    if cuda:
        host_flags += ["-DFLASH_MLA_WITH_KERNELS", "-DUSE_CUDA"]
        host_includes.append(cuda.include)
        link_flags += [f"-L{cuda.libraries}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        link_flags.append("-Wl,--exclude-libs,ALL")  # our cudart is nobody else's
    # -isystem: other people's headers are not ours to warn about
    host_flags += [f"-I{_relative(includes[0])}", *(f"-isystem{folder}" for folder in host_includes[1:])]

    lines = ["ninja_required_version = 1.10", f"builddir = {_path(BUILD)}"]
    lines.append(f"cxx = {_command([toolchain.find_compiler()])}")
    lines.append(f"nvcc = {_command([cuda.nvcc]) if cuda else 'nvcc'}")
    lines.append(RULES)

    kernels = []
    for source in kernel_sources() if cuda else []:
        log = ptxas_log(source)
        kernels.append(log.with_name(f"{source.name}.o"))
        lines += [
            f"build {_path(kernels[-1])} | {_path(log)}: nvcc {_path(source)}",
            f"  flags = {_command(nvcc_flags)}",
            f"  log = {_command([_relative(log)])}",
        ]
    for name, (library, namespace) in LIBRARIES.items():
        objects = []
        for source in host_sources():
            objects.append(library.parent / f"{source.relative_to(ROOT)}.o")
            flags = _command([*host_flags, f"-DFLASH_MLA_NAMESPACE={namespace}"])
            lines += [f"build {_path(objects[-1])}: host {_path(source)}", f"  flags = {flags}"]
        inputs = " ".join(_path(path) for path in [*objects, *kernels])
        lines += [f"build {_path(library)}: link {inputs}", f"  flags = {_command(link_flags)}"]
        lines += [f"build {name}: phony {_path(library)}"]

    BUILD.mkdir(exist_ok=True)
    ninja_file = BUILD / "build.ninja"
    ninja_file.write_text("\n".join(lines) + "\n")
    return ninja_file


def build(name: str) -> Path:
    """Build the library called ``name`` in LIBRARIES and return its path."""
    wanted = toolchain.wants_kernels()
    cuda = None if wanted == "off" else toolchain.find_cuda()
    if cuda:
        print(f"flash_mla: CUDA {cuda.version[0]}.{cuda.version[1]} at {cuda.root}", flush=True)
    elif wanted == "on":
        raise ToolchainError(
            "FLASH_MLA_KERNELS=on, but no nvcc (12.3 or later) on the PATH, in CUDA_HOME or from PyPI: "
            f"pip install {' '.join(toolchain.NVCC_FROM_PYPI)}"
        )
    else:
        why = "FLASH_MLA_KERNELS=off" if wanted == "off" else "no nvcc (12.3 or later) was found"
        print(f"flash_mla: WARNING: {why}: building WITHOUT GPU kernels. CPU tensors work, slowly.", flush=True)

    command = [toolchain.find_ninja(), "-f", str(write_ninja_file(cuda)), f"-j{_jobs()}", name]
    environment = {"NINJA_STATUS": "[%f/%t, %es] ", **os.environ}
    if subprocess.run(command, cwd=ROOT, env=environment).returncode:
        raise ToolchainError(f"building {name} failed; the compiler's message is above")
    return LIBRARIES[name][0]


def install(library: Path, destination: Path) -> None:
    """Copy by rename, so that a process that has the old file mapped keeps the old file."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f"{destination.name}.new")
    shutil.copy2(library, temporary)
    temporary.replace(destination)


def _jobs() -> int:
    return int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))


def _relative(path: Path) -> Path:
    """Paths in the repository are relative to it, where ninja runs: __FILE__ ends up in the library."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def _path(path: Path) -> str:
    """A path as it is written in a ninja file's build lines."""
    return str(_relative(path)).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _command(words: list) -> str:
    """Words as a shell must see them, in a ninja variable."""
    return shlex.join(str(word) for word in words).replace("$", "$$")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", nargs="?", default="package", choices=LIBRARIES)
    name = parser.parse_args().library
    try:
        library = build(name)
    except ToolchainError as error:
        print(f"flash_mla: {error}", file=sys.stderr)
        return 1
    if name == "package":
        install(library, ROOT / "flash_mla" / LIBRARY_NAME)
        library = ROOT / "flash_mla" / LIBRARY_NAME
    print(f"flash_mla: {library.relative_to(ROOT)}, {library.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
