"""Fill the figures of README.md, benchmark/README.md and docs/vllm.md from the CSVs in results/.

    python benchmark/figures.py            # write them
    python benchmark/figures.py --check    # status 1 if a document and its CSV differ

They stand between `<!-- figures:NAME:begin -->` and `<!-- figures:NAME:end -->`; nothing else in a document is touched.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Callable, Sequence

import search_plan
import targets
from common import RESULTS, ROOT, Machine, read_csv
from regret import summarize, times_by_point

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
WIDTHS = (128, 192, 640)
HEADS = (8, 16)
MANY_HEADS = (64, 128)
MANY_HEADS_TOKENS = (*TOKENS, 256)
MANY_HEADS_WIDTHS = (128, 640, 1152)

Row = dict[str, Any]


def read(name: str) -> list[Row]:
    """The rows of results/NAME.csv."""
    return read_csv(RESULTS / f"{name}.csv")


def machine(rows: Sequence[Row]) -> str:
    return str(Machine.of_row(rows[0]))


def only(rows: Sequence[Row], **wanted: int) -> Row:
    """The one row that has these values."""
    (row,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return row


def by_width(
    rows: Sequence[Row],
    heads: int,
    cell: Callable[[Row], str],
    tokens: Sequence[int] = TOKENS,
    widths: Sequence[int] = WIDTHS,
) -> str:
    """A table of tokens by widths."""
    return targets.markdown_table(
        [f"tokens, {heads} heads", *(f"width {width}" for width in widths)],
        [
            [str(n), *(cell(only(rows, heads=heads, tokens=n, width=width)) for width in widths)]
            for n in tokens
        ],
    )


def versus(row: Row) -> str:
    """Such as "4.03 / 12.9, 3.19x"."""
    return f"{row['ours_us']:.2f} / {row['flashmla_us']:.1f}, {row['speedup']:.2f}x"


def speed() -> str:
    rows, v32 = read("sparse_decode_v4"), read("sparse_decode_v32")
    v4_tables = (
        by_width(rows, heads, lambda row: f"{versus(row)} ({row['over_floor']:.1f})") for heads in HEADS
    )
    v32_lines = [
        [str(n), *(versus(only(v32, heads=heads, tokens=n)) for heads in HEADS)] for n in TOKENS
    ]
    return "\n\n".join(
        [
            f"{machine(rows)}.",
            "V4 record; µs of this library / of FlashMLA (64 rows, zeros behind the real heads), speed-up, and in "
            "brackets our time over the gather floor (the time to fetch the same bytes, of an earlier run):",
            *v4_tables,
            "V3.2 record, top-k 2048:",
            targets.markdown_table(["tokens", *(f"{heads} heads" for heads in HEADS)], v32_lines),
        ]
    )


def many_heads() -> str:
    rows, v32 = read("sparse_decode_v4_h64_128"), read("sparse_decode_v32_h64_128")

    def cell(row: Row) -> str:
        return f"{versus(row)}, {row['tflops']:.0f}"

    v4_tables = (
        by_width(rows, heads, cell, MANY_HEADS_TOKENS, MANY_HEADS_WIDTHS) for heads in MANY_HEADS
    )
    v32_lines = [
        [str(n), *(cell(only(v32, heads=heads, tokens=n)) for heads in MANY_HEADS)]
        for n in MANY_HEADS_TOKENS
    ]
    return "\n\n".join(
        [
            f"{machine(rows)}.",
            "64 and 128 real heads: µs of this library / of FlashMLA, speed-up, TFLOP/s of this library. V4 record:",
            *v4_tables,
            "V3.2 record, top-k 2048:",
            targets.markdown_table(["tokens", *(f"{heads} heads" for heads in MANY_HEADS)], v32_lines),
        ]
    )


# Where the rows of the targets with a title are.
CSV_OF_TARGETS = {
    "Issue 2: over FlashMLA": "sparse_decode_v4",
    "Issue 3: over FlashMLA": "sparse_decode_v4",
    "Issue 3: over the Triton decoder": "sparse_decode_v4",
    "Issue 4: padded to 64 rows, over FlashMLA": "sparse_decode_v4_pad64",
    "Issue 4: V3.2, over FlashMLA": "sparse_decode_v32",
    "Issue 4: V3.2, native over padded time": "sparse_decode_v32_pad64",
    "Issue 4: 64 real heads, over FlashMLA": "sparse_decode_v4_h64_128",
    "Issue 5: V3.2, s_q 2, over FlashMLA": "sparse_decode_v32_s_q2_h64_128",
    "Issue 5: V4, over FlashMLA, 64 heads": "sparse_decode_v4_h64_128",
    "Issue 5: V4, over FlashMLA, 128 heads": "sparse_decode_v4_h64_128",
    "Issue 5: V3.2, over FlashMLA": "sparse_decode_v32_h64_128",
}


def reached(is_wanted: Callable[[str], bool]) -> str:
    """What must be reached and what is, a table for each wanted title and number of heads."""
    parts = []
    for title, name in CSV_OF_TARGETS.items():
        if not is_wanted(title):
            continue
        rows = read(name)
        wanted = [target for target in targets.TARGETS if target.title == title]
        for heads in wanted[0].heads:
            outcomes = targets.evaluate([row for row in rows if row["heads"] == heads], wanted)
            (table,) = targets.tables(outcomes, markdown=True)
            parts.append(table.replace(title, f"{title}: {heads} heads", 1).rstrip())
    return "\n\n".join(parts)


def is_near_the_gather_floor(title: str) -> bool:
    """Whether these targets are those that the README shows itself."""
    return title.startswith("Issue 3")


def regret() -> str:
    def of(rows: Sequence[Row]) -> str:
        return search_plan.in_words(summarize(times_by_point(rows), search_plan.chosen_plan))

    rows, many = read("plan_search"), read("plan_search_h64_128")
    of_many = "; ".join(
        f"{heads} heads, {of([row for row in many if row['heads'] == heads])}" for heads in MANY_HEADS
    )
    return "\n\n".join(
        [
            f"Today's plan on the times in `plan_search.csv` ({machine(rows)}): 8 and 16 heads, {of(rows)} ({search_plan.LIMITS}).",
            f"On those in `plan_search_h64_128.csv` ({machine(many)}): {of_many}.",
        ]
    )


def padded() -> str:
    rows = read("sparse_decode_v4_pad64")
    intro = "V4 record, µs: FlashMLA on 64 rows; this library on the same 64 rows; on the real heads alone."
    tables = (
        by_width(
            rows,
            heads,
            lambda row: f"{row['flashmla_us']:.1f}; {row['ours_us']:.1f}; {row['native_us']:.1f}",
        )
        for heads in HEADS
    )
    return "\n\n".join([f"{machine(rows)}.", intro, *tables])


def v32_padded() -> str:
    padded_rows, native = read("sparse_decode_v32_pad64"), read("sparse_decode_v32")

    tokens = {row["tokens"] for row in padded_rows if 2 <= row["tokens"] <= 16}

    def span(rows: Sequence[Row], heads: int) -> str:
        speedups = [row["speedup"] for row in rows if row["heads"] == heads and row["tokens"] in tokens]
        return f"{min(speedups):.2f} to {max(speedups):.2f}x"

    rest = "; ".join(f"{heads} heads: {span(padded_rows, heads)}, native {span(native, heads)}" for heads in HEADS)
    listed = ", ".join(map(str, sorted(tokens)))
    return f"V3.2 record at {listed} tokens, speed-up over FlashMLA with 64 rows. {rest}."


def step() -> str:
    rows = read("step")
    first = rows[0]
    lines = [
        [
            str(row["concurrency"]),
            str(row["tokens"]),
            f"{row['flashmla_us']:.0f}",
            f"{row['ours_us']:.0f}",
            f"{row['saved_us']:.0f}",
            f"{row['speedup']:.2f}x",
        ]
        for row in rows
    ]
    return "\n\n".join(
        [
            f"{machine(rows)}.",
            f"Attention of one decode step, {first['layers']} layers, {first['topk_layers']} of them with 512 top-k keys beside "
            "the window of 128, 64 rows of which 8 are real, one CUDA graph, both libraries behind vLLM's interface file, µs:",
            targets.markdown_table(
                ["requests", "tokens", "FlashMLA", "this library", "saved", "speed-up"], lines
            ),
        ]
    )


FIGURES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "speed"): speed,
    ("README.md", "many-heads"): many_heads,
    ("README.md", "targets"): lambda: reached(is_near_the_gather_floor),
    ("benchmark/README.md", "targets"): lambda: reached(lambda title: not is_near_the_gather_floor(title)),
    ("README.md", "regret"): regret,
    ("docs/vllm.md", "padded"): padded,
    ("docs/vllm.md", "v32-padded"): v32_padded,
    ("docs/vllm.md", "step"): step,
}


def filled(text: str, name: str, figures: str) -> str:
    """The document with the figures between their two markers; ValueError if it lacks one."""
    begin, end = f"<!-- figures:{name}:begin -->", f"<!-- figures:{name}:end -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"no {begin} ... {end}")
    return f"{before}{begin}\n{figures}\n{end}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 where a figure is out of date"
    )
    check = parser.parse_args(argv).check
    stale = False
    for (document, name), make in FIGURES.items():
        path = ROOT / document
        old = path.read_text()
        new = filled(old, name, make())
        if new == old:
            continue
        stale = True
        print(f"{document}: {name} " + ("differs from its CSV" if check else "written"))
        if not check:
            path.write_text(new)
    if check and not stale:
        print("every figure is that of its CSV")
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
