"""Fail if a built library would not load everywhere: ``python -m build_tools.check_symbols FILE...``.

One binary has to serve every torch from 2.11 and every Python from 3.10. So all that it may ask
of them is torch's C shim (which TORCH_TARGET_VERSION holds to what 2.11 has) and Python's limited
API; a C++ symbol of torch would tie it to one release, and a symbol of libtorch_cuda, unless weak,
to a torch with CUDA.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LARGEST = 20e6  # bytes

ALLOWED = re.compile(
    r"""  aoti_torch_\w+ | torch_\w+                # torch's C shim
        | Py\w+                                   # Python's limited API
        | .+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\w.]+    # the C and C++ run time
        | __cxa_finalize | __gmon_start__ | _ITM_\w+  # what every shared object refers to
    """,
    re.VERBOSE,
)
# In libtorch_cuda alone, which a torch without CUDA lacks
ONLY_WEAK = re.compile(r"(?!aoti_torch_device_type_)(aoti_)?torch_.*cuda.*")


def problems_of(library: Path) -> list[str]:
    problems = []
    if library.stat().st_size > LARGEST:
        problems.append(f"{library.stat().st_size / 1e6:.1f} MB, more than {LARGEST / 1e6:.0f}")
    exported = set()
    listing = subprocess.run(["nm", "-D", str(library)], check=True, capture_output=True, text=True).stdout
    for line in listing.splitlines():
        kind, symbol = line[16:].split()
        if kind not in "UwWv" or line[:16].strip():
            exported.add(symbol)
        elif not ALLOWED.fullmatch(symbol):
            problems.append(f"needs {symbol}, which is not in torch's C shim")
        elif kind == "U" and ONLY_WEAK.fullmatch(symbol):
            problems.append(f"needs {symbol}, which a torch without CUDA lacks; declare it weak")
    if "PyInit__flashmla_C" not in exported:
        problems.append("does not export PyInit__flashmla_C (are Python's headers installed?)")
    return problems


def main() -> int:
    failed = False
    for library in map(Path, sys.argv[1:]):
        problems = problems_of(library)
        failed |= bool(problems)
        for problem in problems:
            print(f"check_symbols: {library}: {problem}", file=sys.stderr)
        if not problems:
            print(f"check_symbols: {library}: {library.stat().st_size / 1e6:.1f} MB, torch's C shim only")
    return failed


if __name__ == "__main__":
    sys.exit(main())
