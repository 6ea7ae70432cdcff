"""What loading the library costs a process, and its first call."""

import subprocess
import sys
from pathlib import Path

import pytest

from flash_mla import _library

LOAD = """
import time, torch
start = time.perf_counter()
torch.ops.load_library({path!r})
print(time.perf_counter() - start)
"""

FIRST_CALL = """
import time, torch
from flash_mla.testing import make_case
case = make_case(2, 1, 8, 640).to("cuda")
(torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()   # CUDA's own start
torch.cuda.synchronize()
start = time.perf_counter()
case.run()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def seconds(script: str) -> float:
    """What the script prints, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def test_it_loads_in_half_a_second():
    assert min(seconds(LOAD.format(path=str(_library.PATH))) for _ in range(2)) < 0.5


def test_it_is_below_20_megabytes():
    assert Path(_library.PATH).stat().st_size < 20e6


@pytest.mark.gpu
def test_the_first_call_takes_less_than_50_ms():
    """Nothing compiles at run time."""
    assert min(seconds(FIRST_CALL) for _ in range(2)) < 0.05
