"""The checks that CI makes of a build: they must fail where they should."""

import shutil
import subprocess

import pytest

from build_tools import check_ptxas, check_symbols

CLEAN = """\
ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function '_Z5cleanPf' for 'sm_90a'
ptxas info    : Function properties for _Z5cleanPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem
"""
SPILLING = """\
ptxas info    : Compiling entry function '_Z6spillyPfi' for 'sm_90a'
ptxas info    : Function properties for _Z6spillyPfi
    432 bytes stack frame, 848 bytes spill stores, 872 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 432 bytes cumulative stack size
"""
CALLED = """\
ptxas info    : Function properties for _Z6calledPf
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_ptxas_report_of_a_clean_kernel():
    (kernel,) = check_ptxas.parse(CLEAN)
    assert kernel == check_ptxas.Function("_Z5cleanPf", True, registers=40, shared=1024)


def test_ptxas_report_of_spills():
    _, kernel = check_ptxas.parse(CLEAN + SPILLING)
    assert (kernel.name, kernel.local, kernel.spilled) == ("_Z6spillyPfi", 432, 848 + 872)


def test_ptxas_report_of_a_function_that_is_called():
    kernel, called = check_ptxas.parse(CLEAN + CALLED)
    assert kernel.local == 0
    assert (called.is_kernel, called.local) == (False, 16)


@pytest.mark.parametrize(
    "report, passes", [(CLEAN, True), (CLEAN + SPILLING, False), (CLEAN + CALLED, False), ("", False)]
)
def test_check_ptxas(report, passes, tmp_path, monkeypatch):
    log = tmp_path / "kernel.cu.ptxas.log"
    log.write_text(report)
    monkeypatch.setattr(check_ptxas, "ROOT", tmp_path)
    monkeypatch.setattr(check_ptxas, "kernel_sources", lambda: [tmp_path / "kernel.cu"])
    monkeypatch.setattr(check_ptxas, "ptxas_log", lambda source: log)
    assert (check_ptxas.main() == 0) == passes


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_check_symbols(tmp_path):
    source, library = tmp_path / "module.cpp", tmp_path / "module.so"
    source.write_text(
        'extern "C" void torch_library_impl(), aoti_torch_get_current_cuda_stream(), cudaMalloc();\n'
        'extern "C" void run() { torch_library_impl(), aoti_torch_get_current_cuda_stream(), cudaMalloc(); }\n'
    )
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    problems = "\n".join(check_symbols.problems_of(library))
    assert "cudaMalloc, which is not in torch's C shim" in problems
    assert "aoti_torch_get_current_cuda_stream, which a torch without CUDA lacks" in problems
    assert "torch_library_impl" not in problems
    assert "PyInit__flashmla_C" in problems
