"""Regret of a plan: how much slower its choice is than the best one that was timed.

Rows are those of `search_plan.py`'s CSV: tokens, width, heads, sms, head_tile, splits, block_keys, us.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from typing import Any, Callable, Iterable, NamedTuple, Sequence


class Point(NamedTuple):
    """What a plan is made for: `plan(tokens, width, heads, num_sms)`."""

    tokens: int
    width: int
    heads: int
    num_sms: int


class Choice(NamedTuple):
    """What a plan chooses: rows of q that a CTA works on, CTAs that share the keys of a token, keys of a block."""

    head_tile: int
    splits: int
    block_keys: int

    def __str__(self) -> str:
        return f"{self.head_tile} x {self.splits} x {self.block_keys}"


@dataclasses.dataclass(frozen=True)
class Regret:
    """One point: what was chosen and what would have been best, in microseconds."""

    point: Point
    chosen: Choice
    chosen_us: float
    best: Choice
    best_us: float

    @property
    def value(self) -> float:
        """0 where the best was chosen, 0.1 where it would have taken 1/1.1 of the time."""
        return self.chosen_us / self.best_us - 1.0


@dataclasses.dataclass(frozen=True)
class Summary:
    """Regrets of all points, largest first, and the points whose choice was never timed."""

    regrets: Sequence[Regret]
    untimed: Sequence[tuple[Point, Choice]]

    @property
    def median(self) -> float:
        return statistics.median(r.value for r in self.regrets) if self.regrets else float("nan")

    @property
    def worst(self) -> float:
        return self.regrets[0].value if self.regrets else float("nan")


def times_by_point(rows: Iterable[dict[str, Any]]) -> dict[Point, dict[Choice, float]]:
    """The measured times of every point; a later row replaces an earlier one of the same choice."""
    times: dict[Point, dict[Choice, float]] = collections.defaultdict(dict)
    for row in rows:
        point = Point(row["tokens"], row["width"], row["heads"], row["sms"])
        times[point][Choice(row["head_tile"], row["splits"], row["block_keys"])] = float(row["us"])
    return dict(times)


def summarize(times: dict[Point, dict[Choice, float]], plan: Callable[[Point], Choice]) -> Summary:
    """Compare `plan`'s choice at every point with the best choice that was timed there."""
    regrets, untimed = [], []
    for point, choices in times.items():
        chosen = plan(point)
        if chosen not in choices:
            untimed.append((point, chosen))
            continue
        best = min(choices, key=choices.__getitem__)
        regrets.append(Regret(point, chosen, choices[chosen], best, choices[best]))
    return Summary(sorted(regrets, key=lambda r: -r.value), untimed)
