"""This repository built by CMake as vLLM builds FlashMLA: tests/cmake/, and what it installs, tried as a vLLM."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vllm_process
from build_tools import build, toolchain

PROJECT = build.ROOT / "tests" / "cmake"
MINIMUM_CMAKE = (3, 26)


def find_cmake() -> str:
    """PyPI's cmake lies beside this Python; else the one on the PATH."""
    beside = Path(sys.executable).with_name("cmake")
    found = str(beside) if beside.is_file() else shutil.which("cmake")
    version = re.search(r"(\d+)\.(\d+)", _output([found, "--version"])) if found else None
    if not version or (int(version[1]), int(version[2])) < MINIMUM_CMAKE:
        pytest.skip("needs CMake {}.{} or later: pip install cmake".format(*MINIMUM_CMAKE))
    return found


def find_cuda() -> toolchain.Cuda:
    cuda = toolchain.find_cuda()
    if cuda is None:
        pytest.skip("needs nvcc 12.3 or later")
    if not toolchain.python_include():
        pytest.skip("needs Python's headers")
    if not list(cuda.libraries.glob("libcudart.so*")):
        pytest.skip(f"needs libcudart.so, which {cuda.libraries} lacks")
    return cuda


def find_ninja() -> str:
    try:
        return toolchain.find_ninja()
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))


def _output(command) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def run(command, environment) -> None:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}"


def cuda_arguments(cuda: toolchain.Cuda) -> list:
    """Where CUDA is, for CMake's own module and, in the second line, for the older one that a torch with CUDA uses.

    PyPI's CUDA packages have libcudart.so.13 and no libcudart.so, which both look for.
    """
    runtime = sorted(cuda.libraries.glob("libcudart.so*"))[0]
    return [
        f"-DCMAKE_CUDA_COMPILER={cuda.nvcc}", f"-DCUDAToolkit_ROOT={cuda.root}", f"-DCUDA_CUDART={runtime}",
        f"-DCUDA_TOOLKIT_ROOT_DIR={cuda.root}", f"-DCUDA_TOOLKIT_INCLUDE={cuda.include}",
        f"-DCUDA_cudart_LIBRARY={runtime}", f"-DCUDA_CUDART_LIBRARY={runtime}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder that the build was installed into; it lies beside the folder of the build."""
    cmake, cuda = find_cmake(), find_cuda()
    folder = tmp_path_factory.mktemp("cmake")
    environment = {**os.environ, "FLASH_MLA_SRC_DIR": str(build.ROOT), "LIBRARY_PATH": str(cuda.libraries)}
    configure = [cmake, "-G", "Ninja", "-S", PROJECT, "-B", folder / "build", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    configure += ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={find_ninja()}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", *cuda_arguments(cuda)]
    run(configure, environment)
    run([cmake, "--build", folder / "build", "-j", str(len(os.sched_getaffinity(0)))], environment)
    run([cmake, "--install", folder / "build", "--prefix", folder / "site"], environment)
    return folder / "site"


@pytest.fixture(scope="module")
def process(installed):
    # In vLLM these exist already.
    for package in ("vllm", "vllm/third_party", "vllm/third_party/flashmla"):
        (installed / package / "__init__.py").touch()
    process = vllm_process.Process(installed)
    yield process
    process.close()


def test_sources_are_those_of_our_own_build(installed):
    commands = json.loads((installed.parent / "build" / "compile_commands.json").read_text())
    compiled = sorted(Path(command["file"]) for command in commands)
    assert compiled == sorted([*build.host_sources(), *build.kernel_sources()])


def test_what_is_installed(installed):
    assert (installed / "vllm" / "_flashmla_C.abi3.so").is_file()
    text = (installed / "vllm" / "third_party" / "flashmla" / "flash_mla_interface.py").read_text()
    ours = (build.ROOT / "flash_mla" / "flash_mla_interface.py").read_text()
    assert text == ours.replace(vllm_process.REPLACED, vllm_process.REPLACEMENT)


def test_it_imports(process):
    assert process.run(vllm_process.where_loaded)["operators"] == vllm_process.NAMESPACE
    assert "sparse_decode_fwd" in process.run(vllm_process.schemas)


def test_it_refuses(process):
    assert process.run(vllm_process.call_sparse_prefill)[0] == "NotImplementedError"
    assert "takes one on an SM90 GPU" in process.run(vllm_process.call_on_cpu)[1]


@pytest.mark.gpu
def test_it_decodes(process):
    process.run(vllm_process.decode_v4, 8, 512, 8, 64)
