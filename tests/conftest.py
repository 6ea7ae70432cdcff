"""Markers, the device fixture, and the record of a run on a GPU.

``gpu`` tests are skipped with a reason where there is no SM90 GPU, ``multi_gpu`` tests where there
are not two. With ``--write-gpu-results`` a run that executed gpu tests writes
``benchmark/results/gpu_tests.json`` (see gpu_results.py).
"""

import collections
import functools
from pathlib import Path
from typing import Optional

import pytest
import torch

import flash_mla
import gpu_results
from flash_mla.kv_cache import V4, V32


def pytest_addoption(parser):
    parser.addoption(
        "--write-gpu-results",
        nargs="?",
        const=gpu_results.DEFAULT_PATH,
        type=Path,
        metavar="PATH",
        help=f"write the outcome of the gpu tests to PATH (default {gpu_results.DEFAULT_PATH})",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU of compute capability 9.0 and the kernels")
    config.addinivalue_line("markers", "multi_gpu: needs two such GPUs (implies gpu)")
    if not hasattr(config, "workerinput"):  # not in the workers of pytest-xdist
        config.pluginmanager.register(_GpuOutcomes(config), "gpu-outcomes")


# ---- Skipping ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def sm90_gpus() -> int:
    """How many GPUs of compute capability 9.0 torch sees, counted from device 0."""
    if not torch.cuda.is_available():
        return 0
    count = 0
    while count < torch.cuda.device_count() and torch.cuda.get_device_capability(count) == (9, 0):
        count += 1
    return count


def reason_to_skip(needed: int) -> Optional[str]:
    if sm90_gpus() >= needed:
        return None if flash_mla.HAS_KERNELS else "needs the kernels: the library was built without"
    if not torch.cuda.is_available():
        return f"needs {needed} SM90 GPU(s): torch {torch.__version__} sees no GPU"
    found = ", ".join(
        "{} (sm_{}{})".format(torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i))
        for i in range(torch.cuda.device_count())
    )
    return f"needs {needed} SM90 GPU(s): found {found}"


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marker that is added here
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("multi_gpu"):
            item.add_marker("gpu")
            reason = reason_to_skip(2)
        elif item.get_closest_marker("gpu"):
            reason = reason_to_skip(1)
        else:
            continue
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


# ---- Fixtures ----------------------------------------------------------------------------------


@pytest.fixture
def device() -> torch.device:
    """The GPU that gpu tests run on."""
    return torch.device("cuda", 0)


@pytest.fixture(params=[V4, V32], ids=lambda record: record.name)
def record(request):
    """Every record that the kernels read."""
    return request.param


# Besides what the plan chooses, which is mostly tiles of 8 rows on blocks of 32 keys: (head_tile, splits, n). Calls of n heads or fewer
# repeat their heads until they have more, so that tiles of 64 rows are not padded.
FORCED_TILES = {
    "planned": None,
    "tile8": (8, 1, 0),
    "tile8-splits2": (8, 2, 0),
    "tile16": (16, 1, 0),
    "tile16-splits2": (16, 2, 0),
    "tile64-padded": (64, 1, 0),
    "tile64": (64, 1, 16),
    "tile64-splits2": (64, 2, 16),
    "two-tiles64": (64, 3, 64),
}


@pytest.fixture(params=FORCED_TILES.values(), ids=list(FORCED_TILES))
def any_tile(request, monkeypatch):
    """Runs a test as planned, then with blocks of 64 keys in every tile, for calls without a plan of their own."""
    if request.param is not None:
        head_tile, splits, more_than = request.param
        if more_than:
            repeated = _with_repeated_heads(flash_mla.flash_mla_with_kvcache, more_than)
            monkeypatch.setattr(flash_mla, "flash_mla_with_kvcache", repeated)

        def get_mla_metadata(*_, **__):
            meta = flash_mla.FlashMLASchedMeta()
            return meta.force_plan(head_tile=head_tile, splits=splits, block_keys=64), None

        monkeypatch.setattr(flash_mla, "get_mla_metadata", get_mla_metadata)


def _with_repeated_heads(call, more_than):
    def repeated(q, *arguments, attn_sink=None, out=None, **keywords):
        heads = q.shape[2]
        if heads > more_than:
            return call(q, *arguments, attn_sink=attn_sink, out=out, **keywords)
        times = more_than // heads + 1
        sinks = None if attn_sink is None else attn_sink.repeat(times)
        got, lse = call(q.repeat(1, 1, times, 1), *arguments, attn_sink=sinks, **keywords)
        got, lse = got[:, :, :heads].contiguous(), lse[:, :heads].contiguous()
        return (got, lse) if out is None else (out.copy_(got), lse)

    return repeated


# ---- The record of a run -------------------------------------------------------------------------


class _GpuOutcomes:
    """Counts the outcomes of tests marked ``gpu`` and writes them at the end."""

    def __init__(self, config):
        self.config = config
        self.outcome = {}  # test -> its worst outcome over setup, call and teardown

    def pytest_runtest_logreport(self, report):
        if "gpu" not in report.keywords:
            return
        if report.failed:
            self.outcome[report.nodeid] = "failed"
        elif report.skipped:
            self.outcome.setdefault(report.nodeid, "skipped")
        elif report.when == "call":
            self.outcome.setdefault(report.nodeid, "passed")

    def pytest_sessionfinish(self):
        path = self.config.getoption("--write-gpu-results")
        counts = collections.Counter(self.outcome.values())
        if path is None or counts["passed"] + counts["failed"] == 0:
            return
        gpu_results.write(path, counts["passed"], counts["failed"], counts["skipped"])
