"""Timing of short GPU calls: many calls in one CUDA graph, contenders side by side.

A decode call takes a few microseconds, less than the CPU needs to launch it, and in service its
keys come from HBM. So each contender becomes one graph of many calls, every call with keys of
its own, enough of them that none is still in the L2 cache when the graph is replayed. Contenders
are replayed in turn, round after round, so that a drifting clock meets all of them alike.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from typing import Callable, Mapping

import torch

# Keys that a graph reads, in bytes: well over the 60 MB of L2 of an H200.
COLD_BYTES = 160_000_000
# Read between two replays: evicts the L2, and keeps the GPU busy while the CPU launches the graph.
_FLUSH_BYTES = 256 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per call: median, fastest and slowest of the replays."""

    median: float
    fastest: float
    slowest: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        return cls(statistics.median(samples), min(samples), max(samples))


def calls_per_graph(
    bytes_per_call: int, *, touch: int = COLD_BYTES, least: int = 20, most: int = 4096
) -> int:
    """How many calls a graph needs to read ``touch`` bytes, at least ``least``, at most ``most``.

    A call that reads nothing gets ``most``. At most: capturing a call costs the CPU some 20 us.
    """
    if bytes_per_call <= 0:
        return most
    return min(max(-(-touch // bytes_per_call), least), most)


def time_graphs(
    contenders: Mapping[str, Callable[[int], object]], calls: int, *, rounds: int = 7
) -> dict[str, Timing]:
    """Time contenders against each other on the current CUDA device.

    Args:
        contenders: name -> function that makes call number ``i``, 0 <= i < ``calls``, on the
            current stream. It runs once outside the graph first, so what only a first call does
            (FlashMLA's planner, lazy loading) is not in the figure. What it returns is dropped
            while capturing, so the calls of a graph, and the graphs, share that memory.
        calls: calls per graph; see :func:`calls_per_graph`.
        rounds: timed replays of every graph.

    Returns:
        name -> Timing in microseconds per call.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("time_graphs: got no CUDA device; takes a GPU")
    pool = torch.cuda.graph_pool_handle()
    graphs = {name: _capture(call, calls, pool) for name, call in contenders.items()}
    flush = _flush_buffer(torch.cuda.current_device())

    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in graphs}
    for timed in [False] + [True] * rounds:  # the first round uploads the graphs
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.sum()
            start.record()
            graph.replay()
            end.record()
            if timed:
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: Timing.of([start.elapsed_time(end) * 1e3 / calls for start, end in pairs])
        for name, pairs in events.items()
    }


def _capture(call: Callable[[int], object], calls: int, pool: object) -> torch.cuda.CUDAGraph:
    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for i in range(calls):
            call(i)
    return graph


@functools.cache
def _flush_buffer(device: int) -> torch.Tensor:
    return torch.ones(_FLUSH_BYTES // 4, dtype=torch.float32, device=f"cuda:{device}")
