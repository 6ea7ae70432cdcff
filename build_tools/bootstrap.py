"""Make a virtual environment in which everything works: ``python3 build_tools/bootstrap.py .venv``.

Installs torch (the smallest build that serves), nvcc if the machine has none, and this package in
editable mode with what its tests need. Run again, it only adds what is missing.

Environment: TORCH, a pip requirement such as ``torch==2.12.*``, overrides the choice of torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TORCH = "torch>=2.11"
# Where there is no GPU. The release is named, not a range, because PyPI's newest torch is a
# CUDA build of several GB, which would win over a CPU build that pip knows from elsewhere.
TORCH_FOR_CPU = "torch==2.13.0"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    if sys.version_info < (3, 10):
        sys.exit(f"flash_mla needs Python 3.10 or later, this is {sys.version.split()[0]}")
    environment = Path(sys.argv[1]).resolve()
    python = make_environment(environment)

    install(python, "setuptools>=77", "ninja")
    install_torch(python)
    if missing := requirements(python, "nvcc_requirements()"):
        step("nvcc from PyPI (none on this machine)")
        if not install(python, "--no-deps", *missing, check=False, quiet=False):
            step("WARNING: nvcc could not be installed; the library will have no GPU kernels")
    if missing := requirements(python, "cutlass_requirements(all_sources())"):
        step("CUTLASS headers from PyPI")
        install(python, "--no-deps", *missing)

    # Built before pip asks for it, because pip would hide the progress.
    step("the library")
    run(python, "-m", "build_tools.build")
    step("the package, editable, and what its tests need")
    install(python, "--no-build-isolation", "--editable", ".[test,benchmark]")
    (environment / ".ready").touch()


def make_environment(folder: Path) -> str:
    python = folder / "bin" / "python"
    if not python.exists():
        step(f"virtual environment {folder}")
        if subprocess.run([sys.executable, "-m", "venv", str(folder)]).returncode:
            sys.exit("Python's venv module is incomplete here (Debian and Ubuntu: apt install python3-venv)")
    return str(python)


def install_torch(python: str) -> bool:
    wanted = os.environ.get("TORCH") or TORCH
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0:
        return install(python, wanted)  # satisfied already, or an upgrade that was asked for
    if os.environ.get("TORCH") or has_nvidia_gpu():
        step(f"{wanted} (large: it brings CUDA's libraries)")
        return install(python, wanted, quiet=False)
    step(f"{TORCH_FOR_CPU}, CPU build: no NVIDIA GPU here")
    if pip_would_take_a_cpu_build(python):
        return install(python, TORCH_FOR_CPU)
    if not install(python, TORCH_FOR_CPU, "--index-url", PYTORCH_CPU_INDEX, check=False, quiet=False):
        step("PyTorch's index of CPU builds failed; taking the build from PyPI")
        return install(python, TORCH, quiet=False)
    return True


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def pip_would_take_a_cpu_build(python: str) -> bool:
    """Whether pip, as configured on this machine, resolves torch to a build without CUDA."""
    command = pip(python, "install", "--dry-run", "--no-deps", "--quiet", "--report=-", TORCH_FOR_CPU)
    answer = subprocess.run(command, capture_output=True, text=True)
    try:
        return json.loads(answer.stdout)["install"][0]["metadata"]["version"].endswith("+cpu")
    except (ValueError, LookupError):
        return False


def requirements(python: str, expression: str) -> list[str]:
    """Requirements that the new environment's Python finds missing: toolchain.<expression>."""
    code = (
        "import json; from build_tools.build import all_sources; "
        f"from build_tools import toolchain; print(json.dumps(toolchain.{expression}))"
    )
    return json.loads(subprocess.run([python, "-c", code], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def install(python: str, *arguments: str, check: bool = True, quiet: bool = True) -> bool:
    """pip install. ``quiet`` for what takes seconds; otherwise pip shows how far it is."""
    options = ["--quiet"] if quiet else []
    done = subprocess.run(pip(python, "install", *options, *arguments), cwd=ROOT).returncode == 0
    if check and not done:
        sys.exit(f"pip install {' '.join(arguments)} failed; its message is above")
    return done


def run(python: str, *arguments: str) -> None:
    if subprocess.run([python, *arguments], cwd=ROOT).returncode:
        sys.exit(1)


def pip(python: str, *arguments: str) -> list[str]:
    return [python, "-m", "pip", "--disable-pip-version-check", *arguments]


def step(what: str) -> None:
    print(f"==> {what}", flush=True)


if __name__ == "__main__":
    main()
