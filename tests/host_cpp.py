"""Runs a few lines of C++ against the host-only headers of csrc/."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent / "csrc"


def run(tmp_path: Path, headers: list[str], body: list[str]) -> list[str]:
    """What a program prints, by line: ``body`` is that of main, after ``headers`` of csrc/.

    Skips the test where there is no C++ compiler.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    includes = [f'#include "{header}"' for header in headers]
    lines = [*includes, "#include <cstdio>", "int main() {", *body, "}", ""]
    source, program = tmp_path / "print.cpp", tmp_path / "print"
    source.write_text("\n".join(lines))
    command = [compiler, "-std=c++20", "-Wall", "-Werror", f"-I{CSRC}", source, "-o", program]
    subprocess.run(command, check=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
