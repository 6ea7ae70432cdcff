"""What must be reached, and whether the rows of a benchmark reach it.

A row is a dict with the fields of `bench_sparse_decode.FIELDS`. A cell is a group of token
counts at one width; its value is that of its worst row, over all token and head counts in it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable, Sequence


from rich.table import Table

from common import new_table, ratio, shown, unique


@dataclasses.dataclass(frozen=True)
class Target:
    """`metric` at least `least` at `low`..`high` tokens of this width."""

    title: str
    low: int
    high: int
    width: int
    least: float
    record: str = "v4"
    heads: tuple[int, ...] = (8, 16)
    padded: bool = False
    s_q: int | None = None  # None: whatever it is
    metric: str = "speedup"

    @property
    def group(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}–{self.high}"

    def value(self, row: dict[str, Any]) -> float | None:
        """The row's figure for this target, 0 for a wrong result; None where it has no such figure
        or is no row of this cell."""
        here = (
            row["record"] == self.record
            and row["width"] == self.width
            and self.low <= row["tokens"] <= self.high
            and row["heads"] in self.heads
            and bool(row["pad_to"]) == self.padded
            and self.s_q in (None, row["s_q"])
        )
        if not here:
            return None
        return METRICS[self.metric](row) if row["status"] == "ok" else 0.0


# Larger is better in all of them.
METRICS = {
    "speedup": lambda row: row["speedup"],
    "over Triton": lambda row: ratio(row["triton_us"], row["ours_us"]),
    "native over padded": lambda row: ratio(row["native_us"], row["ours_us"]),
}


def _cells(
    title: str, groups: Sequence[tuple[int, int]], table: dict[int, Sequence[float]], **kind: Any
) -> list[Target]:
    return [
        Target(title, low, high, width, least, **kind)
        for width, column in table.items()
        for (low, high), least in zip(groups, column)
    ]


_V4_WIDTHS = (128, 192, 640)

TARGETS: list[Target] = [
    *_cells("Issue 2: over FlashMLA", [(1, 16), (17, 128)], {w: (1.5, 1.0) for w in _V4_WIDTHS}),
    *_cells(
        "Issue 3: over FlashMLA",
        [(1, 4), (5, 16), (24, 32), (64, 64), (128, 128)],
        {
            128: (2.8, 2.6, 2.3, 2.0, 1.8),
            192: (2.8, 2.6, 2.5, 2.2, 2.0),
            640: (2.8, 2.6, 2.6, 3.0, 2.0),
        },
    ),
    *_cells(
        "Issue 3: over the Triton decoder",
        [(1, 128)],
        {w: (1.0,) for w in _V4_WIDTHS},
        metric="over Triton",
    ),
    *_cells(
        "Issue 4: padded to 64 rows, over FlashMLA",
        [(1, 16), (17, 128)],
        {w: (2.3, 1.0) for w in _V4_WIDTHS},
        padded=True,
    ),
    *_cells(
        "Issue 4: V3.2, over FlashMLA",
        [(1, 8), (16, 32), (64, 128)],
        {2048: (2.2, 1.8, 1.3)},
        record="v32",
    ),
    *_cells(
        "Issue 4: V3.2, native over padded time",
        [(1, 16)],
        {2048: (1 / 1.10,)},
        record="v32",
        padded=True,
        metric="native over padded",
    ),
    *_cells(
        "Issue 4: 64 real heads, over FlashMLA",
        [(1, 16)],
        {w: (0.95,) for w in _V4_WIDTHS},
        heads=(64,),
    ),
    *_cells(
        "Issue 5: V3.2, s_q 2, over FlashMLA",
        [(128, 128), (256, 256)],
        {2048: (1.15, 1.15)},
        record="v32",
        heads=(64, 128),
        s_q=2,
    ),
    *(
        cell
        for heads, many_tokens in ((64, 1.4), (128, 1.15))
        for cell in _cells(
            f"Issue 5: V4, over FlashMLA, {heads} heads",
            [(1, 16), (17, 63), (64, 256)],
            {128: (1.5, 1.0, 1.0), 640: (1.5, 1.0, many_tokens), 1152: (1.5, 1.0, many_tokens)},
            heads=(heads,),
        )
    ),
    *_cells(
        "Issue 5: V3.2, over FlashMLA", [(1, 256)], {2048: (1.0,)}, record="v32", heads=(64, 128)
    ),
]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A target, its worst row and that row's value; both None if nothing was measured."""

    target: Target
    value: float | None
    row: dict[str, Any] | None

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.value >= self.target.least

    def __str__(self) -> str:
        aim = f"≥ {self.target.least:.2f}"
        if self.value is None or self.row is None:
            return f"{aim}: not measured"
        word = "met" if self.met else "NOT MET"
        where = f"{self.row['tokens']} tok, {self.row['heads']} h, {shown(self.row['ours_us'])} us"
        return f"{aim}: {word}, {self.value:.2f} ({where})"


def evaluate(rows: Iterable[dict[str, Any]], targets: Sequence[Target] = TARGETS) -> list[Outcome]:
    """The outcome of every target."""
    rows = list(rows)
    outcomes = []
    for target in targets:
        values = [(value, row) for row in rows if (value := target.value(row)) is not None]
        value, row = min(values, key=lambda pair: pair[0], default=(None, None))
        outcomes.append(Outcome(target, value, row))
    return outcomes


def tables(outcomes: Sequence[Outcome], *, markdown: bool = False) -> Iterable[Any]:
    """One printable per title, token groups down, widths across; titles never measured are left out."""
    for title in unique(outcome.target.title for outcome in outcomes):
        mine = [o for o in outcomes if o.target.title == title]
        if all(o.value is None for o in mine):
            continue
        widths = unique(o.target.width for o in mine)
        cells = {(o.target.group, o.target.width): o for o in mine}
        lines = [
            [group, *(str(cells[group, width]) for width in widths)]
            for group in unique(o.target.group for o in mine)
        ]
        header = ["tokens", *(f"width {width}" for width in widths)]
        if markdown:
            yield f"{title}\n\n{markdown_table(header, lines)}\n"
        else:
            yield _rich(title, header, lines)


def _rich(title: str, header: list[str], lines: list[list[str]]) -> Table:
    table = new_table(*header, title=title)
    for line in lines:
        bold = any("NOT MET" in cell for cell in line)
        table.add_row(*line, style="bold" if bold else "")
    return table


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines])
