"""Figures measured before this library, on one H200 (torch 2.11+cu130, CUDA 13.0, driver 580).

`baseline_h200.csv`: microseconds per call of FlashMLA (64 rows, 8 real), of the public Triton
decoder (8 heads, vLLM pull request 59418) and of a kernel that only gathers the same bytes and
computes nothing, by the method of `flash_mla.timing`. The gather floor beside V3.2 is that of
2048 keys of 584 bytes.
"""

from __future__ import annotations

import functools
from pathlib import Path

from common import read_csv

_TABLE = Path(__file__).with_name("baseline_h200.csv")


def applies_to(gpu: str) -> bool:
    """Whether the figures say anything about a GPU of this name."""
    return "H200" in gpu


def measured(record: str, width: int, tokens: int, column: str) -> float | None:
    """The figure measured at exactly this point."""
    return _curve(record, width, column).get(tokens)


def interpolated(record: str, width: int, tokens: int, column: str) -> float | None:
    """The figure, linear in tokens between the nearest measured points; None outside them."""
    curve = _curve(record, width, column)
    low = max((t for t in curve if t <= tokens), default=None)
    high = min((t for t in curve if t >= tokens), default=None)
    if low is None or high is None:
        return None
    if low == high:
        return curve[low]
    return curve[low] + (curve[high] - curve[low]) * (tokens - low) / (high - low)


@functools.cache
def _curve(record: str, width: int, column: str) -> dict[int, float]:
    return {
        row["tokens"]: row[column]
        for row in read_csv(_TABLE)
        if row["record"] == record and row["width"] == width and row[column] is not None
    }
