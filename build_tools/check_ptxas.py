"""Fail if a kernel spills registers or uses local memory: ``python -m build_tools.check_ptxas``.

Reads what ptxas reported while the library was built, prints a line for each kernel, and fails
also where a CUDA source has no report, so that a source that was never compiled cannot pass.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys

from build_tools.build import ROOT, kernel_sources, ptxas_log

COMPILING = re.compile(r"Compiling entry function '(\w+)'")
PROPERTIES = re.compile(r"Function properties for (\w+)")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
LOCAL = re.compile(r"(\d+) bytes lmem")


@dataclasses.dataclass
class Function:
    """A kernel, or a device function that ptxas did not inline."""

    name: str
    is_kernel: bool
    registers: int = 0
    shared: int = 0  # bytes of static shared memory; dynamic is set at launch
    local: int = 0  # bytes of stack frame or local memory a thread
    spilled: int = 0  # bytes spilled, stores and loads


def parse(report: str) -> list[Function]:
    """The functions in the output of ``ptxas -v``, in its order."""
    functions: dict[str, Function] = {}
    kernel = current = None
    for line in report.splitlines():
        if match := COMPILING.search(line):
            kernel = current = functions.setdefault(match[1], Function(match[1], True))
        elif match := PROPERTIES.search(line):
            current = functions.setdefault(match[1], Function(match[1], False))
        elif (match := STACK.search(line)) and current:
            current.local = max(current.local, int(match[1]))
            current.spilled += int(match[2]) + int(match[3])
        elif (match := USED.search(line)) and kernel:
            kernel.registers = int(match[1])
            if match := SHARED.search(line):
                kernel.shared = int(match[1])
            if match := LOCAL.search(line):
                kernel.local = max(kernel.local, int(match[1]))
    return list(functions.values())


def readable(names: list[str]) -> list[str]:
    """Demangled, without the parameter list; the mangled names where there is no c++filt."""
    if not names or not shutil.which("c++filt"):
        return names
    answer = subprocess.run(["c++filt", "--no-params"], input="\n".join(names), capture_output=True, text=True)
    return answer.stdout.splitlines()


def main() -> int:
    problems = []
    sources = kernel_sources()
    if not sources:
        problems.append("there is no CUDA source")
    print(f"{'registers':>9} {'static smem':>11} {'local':>6} {'spilled':>7}  kernel")
    for source in sources:
        name, log = source.relative_to(ROOT), ptxas_log(source)
        functions = parse(log.read_text()) if log.exists() else []
        if not any(function.is_kernel for function in functions):
            problems.append(f"{name}: no kernel in {log.relative_to(ROOT)}: was it compiled?")
        for function, shown in zip(functions, readable([function.name for function in functions])):
            print(f"{function.registers:9} {function.shared:11} {function.local:6} {function.spilled:7}  {shown}")
            if function.local or function.spilled:
                problems.append(
                    f"{name}: {shown}: {function.local} bytes of local memory, {function.spilled} bytes spilled"
                )
    for problem in problems:
        print(f"check_ptxas: {problem}", file=sys.stderr)
    if not problems:
        print(f"check_ptxas: {len(sources)} CUDA sources, no spills, no local memory")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
