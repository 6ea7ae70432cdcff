"""Fill the tables of README.md and docs/vllm.md from the CSVs in results/.

    python benchmark/figures.py            # write them
    python benchmark/figures.py --check    # status 1 if a document and its CSV differ

A table stands between `<!-- figures:NAME:begin -->` and `<!-- figures:NAME:end -->`. Nothing else in a document is touched.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import targets
from common import read_csv

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark" / "results"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
WIDTHS = (128, 192, 640)

Row = dict[str, Any]

def read(name: str) -> list[Row]:
    """The rows of results/NAME.csv."""
    return read_csv(RESULTS / f"{name}.csv")


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    header = list(header)
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def select(rows: list[Row], **wanted: int) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def machine(rows: list[Row]) -> str:
    row = rows[0]
    return (
        f"{row['gpu']}, torch {row['torch']}, CUDA {row['cuda']}, commit {row['commit']}, {row['date'][:10]}"
    )


def versus(row: Row) -> str:
    """Such as "4.03 / 12.9, 3.19x"."""
    mine, peer = row["ours_us"], row["flashmla_us"]
    return f"{mine:.2f} / {peer:.1f}, {peer / mine:.2f}x"


def speed() -> Iterator[str]:
    rows = read("sparse_decode_v4")
    yield f"{machine(rows)}. V4 record; µs of this library / of FlashMLA (64 rows, zeros behind the real heads), speed-up,"
    yield "and in brackets our time over the gather floor (the time to fetch the same bytes):"
    for heads in 8, 16:
        yield ""
        yield from table(
            [f"tokens, {heads} heads", *(f"width {width}" for width in WIDTHS)],
            (
                [str(tokens)]
                + [
                    f"{versus(row)} ({row['over_floor']:.1f})"
                    for width in WIDTHS
                    for row in select(rows, heads=heads, tokens=tokens, width=width)
                ]
                for tokens in TOKENS
            ),
        )
    yield ""
    yield "V3.2 record, top-k 2048 (native / FlashMLA):"
    yield ""
    v32 = read("sparse_decode_v32")
    yield from table(
        ["tokens", "8 heads", "16 heads"],
        (
            [str(tokens)]
            + [versus(row) for heads in (8, 16) for row in select(v32, heads=heads, tokens=tokens)]
            for tokens in TOKENS
        ),
    )


def reached() -> Iterator[str]:
    rows = read("sparse_decode_v4")
    wanted = [target for target in targets.TARGETS if target.title == "Issue 3: over FlashMLA"]
    for heads in 8, 16:
        yield f"{heads} heads:"
        yield ""
        outcomes = targets.evaluate(select(rows, heads=heads), wanted)
        yield "\n".join(targets.tables(outcomes, markdown=True)).split("\n\n", 1)[1].strip()
        yield ""


def padded() -> Iterator[str]:
    rows = read("sparse_decode_v4_pad64")
    yield f"{machine(rows)}. V4 record, µs: FlashMLA on 64 rows; this library on the same 64 rows; on the real heads alone."
    for heads in 8, 16:
        yield ""
        yield from table(
            [f"tokens, {heads} heads", *(f"width {width}" for width in WIDTHS)],
            (
                [str(tokens)]
                + [
                    f"{row['flashmla_us']:.1f}; {row['ours_us']:.1f}; {row['native_us']:.1f}"
                    for width in WIDTHS
                    for row in select(rows, heads=heads, tokens=tokens, width=width)
                ]
                for tokens in TOKENS
            ),
        )


TABLES = {
    ("README.md", "speed"): speed,
    ("README.md", "targets"): reached,
    ("docs/vllm.md", "padded"): padded,
}


def filled(text: str, name: str, lines: Iterable[str]) -> str:
    """The document with the table's lines between its two markers."""
    begin, end = f"<!-- figures:{name}:begin -->", f"<!-- figures:{name}:end -->"
    if not re.search(f"{begin}.*{end}", text, re.DOTALL):
        raise ValueError(f"no {begin} ... {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n" + "\n".join(lines).strip() + f"\n{end}{rest.split(end)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a table is out of date")
    check = parser.parse_args().check
    stale = False
    for (document, name), make in TABLES.items():
        path = ROOT / document
        old = path.read_text()
        new = filled(old, name, make())
        if new == old:
            continue
        stale = True
        print(f"{document}: {name} " + ("differs from its CSV" if check else "written"))
        if not check:
            path.write_text(new)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
