"""Sparse decode against FlashMLA: one call at 1 to 128 tokens, cold keys, CUDA graphs.

Every configuration is first compared with the fp32 reference and with FlashMLA's result, then
both are timed in alternating rounds (see `flash_mla.timing`). Writes a CSV and a plot under
`benchmark/results/`. Without FlashMLA's library it times this package alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any, Sequence

from rich.table import Table

import baseline
import peer as flashmla
import targets
from common import (
    RESULTS,
    Machine,
    ResultsCsv,
    add_from_csv,
    console,
    hbm_peak_gbs,
    new_table,
    numbers,
    progress,
    pyplot,
    ratio,
    read_csv,
    require_sm90,
    shown,
    sign_figure,
    unique,
)
from workload import RECORDS, WINDOW, Shape, Workload, check

TOKENS = [*range(1, 17), 24, 32, 64, 128]
QUICK_TOKENS = [1, 4, 16, 64, 128]

FIELDS = (
    "record",
    "tokens",
    "heads",
    "pad_to",  # head rows of our call where it is padded as FlashMLA's is
    "width",
    "s_q",
    "calls",  # per graph
    "plan",  # of our call
    "ours_us",
    "native_us",  # our call with the real heads only, beside a padded one
    "flashmla_us",
    "speedup",  # flashmla_us / ours_us
    "ours_spread",  # (slowest - fastest) / median of the replays
    "gbs",  # bytes of keys over our time
    "hbm_fraction",  # of the datasheet's peak
    "tflops",  # of the real heads
    "floor_us",  # time to gather the same bytes, from baseline_h200.csv; linear between its tokens
    "over_floor",
    "triton_us",  # from the same table, only at its own points
    "error_reference",  # largest error of a row of out, relative to its norm
    "error_flashmla",
    "status",  # "ok", or what was wrong; a wrong result is not timed
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.from_csv:
        rows = read_csv(arguments.from_csv)
        plot_path = arguments.from_csv.with_suffix(".png")
    else:
        require_sm90()
        path = arguments.out / f"{arguments.name or default_name(arguments)}.csv"
        rows = run(arguments, path)
        plot_path = path.with_suffix(".png")
    console.print(results_table(rows))
    plot(rows, plot_path)
    if arguments.targets:
        for table in targets.tables(targets.evaluate(rows), markdown=arguments.markdown):
            # Markdown is for pasting, so it goes out as it is: no markup, no folding.
            print(table) if arguments.markdown else console.print(table)
    wrong = [row for row in rows if row["status"] != "ok"]
    for row in wrong:
        console.print(
            f"WRONG at {row['tokens']} tokens, {row['heads']} heads, width {row['width']}: {row['status']}",
            style="red",
            markup=False,
        )
    return 1 if wrong else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", choices=RECORDS, default="v4")
    parser.add_argument(
        "--tokens", type=numbers, default=None, help="such as 1-16,24 (default: 1-16,24,32,64,128)"
    )
    parser.add_argument(
        "--heads", type=int, nargs="+", default=None, help="real heads (default: 8 16)"
    )
    parser.add_argument(
        "--topk",
        type=int,
        nargs="+",
        default=None,
        help="V4: keys beside the window of 128 (default: 0 64 512); V3.2: all keys (default: 2048)",
    )
    parser.add_argument(
        "--s-q",
        type=int,
        default=None,
        help="tokens of a request, a divisor of all token counts (default: V4 1; V3.2 all of them, as in vLLM)",
    )
    parser.add_argument(
        "--pad-to",
        type=int,
        default=None,
        metavar="ROWS",
        help="call this package, too, with zero rows up to ROWS, and natively beside it",
    )
    flashmla.add_arguments(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few configurations, for development: tokens 1 4 16 64 128, top-k 0 512, 8 heads",
    )
    parser.add_argument("--rounds", type=int, default=7, help="replays of each graph")
    parser.add_argument(
        "--targets", action="store_true", help="say of each target whether it is met"
    )
    parser.add_argument("--markdown", action="store_true", help="print the targets in Markdown")
    add_from_csv(parser, "table, plot and targets of an earlier run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of CSV and plot")
    parser.add_argument("--name", default=None, help="their name without suffix")
    arguments = parser.parse_args(argv)
    arguments.tokens = arguments.tokens or (QUICK_TOKENS if arguments.quick else TOKENS)
    arguments.heads = arguments.heads or ([8] if arguments.quick else [8, 16])
    if arguments.topk is None:
        arguments.topk = (
            [2048] if arguments.record == "v32" else [0, 512] if arguments.quick else [0, 64, 512]
        )
    if arguments.s_q and any(tokens % arguments.s_q for tokens in arguments.tokens):
        parser.error(f"--s-q: got {arguments.s_q}; takes a divisor of all token counts, {arguments.tokens}")
    if arguments.pad_to is not None and arguments.pad_to < max(arguments.heads):
        parser.error(
            f"--pad-to: got {arguments.pad_to}; takes at least the {max(arguments.heads)} real heads"
        )
    return arguments


def default_name(arguments: argparse.Namespace) -> str:
    parts = ["sparse_decode", arguments.record]
    parts += [f"pad{arguments.pad_to}"] if arguments.pad_to else []
    parts += [f"s_q{arguments.s_q}"] if arguments.s_q else []
    parts += [] if max(arguments.heads) <= 16 else ["h" + "_".join(map(str, arguments.heads))]
    parts += ["quick"] if arguments.quick else []
    return "_".join(parts)


def shapes(arguments: argparse.Namespace) -> list[Shape]:
    """Every configuration of this run."""
    all_points = itertools.product(arguments.topk, arguments.heads, arguments.tokens)
    if arguments.record == "v32":
        return [
            Shape(tokens, heads, topk, s_q=arguments.s_q or tokens)
            for topk, heads, tokens in all_points
        ]
    return [
        Shape(tokens, heads, WINDOW, topk, s_q=arguments.s_q or 1)
        for topk, heads, tokens in all_points
    ]


def run(arguments: argparse.Namespace, path: Path) -> list[dict[str, Any]]:
    """Measure every configuration and write the CSV."""
    peer = flashmla.chosen(arguments)
    machine = Machine.here()
    console.print(str(machine), markup=False)
    workload = Workload(arguments.record)
    rows = []
    with ResultsCsv(path, FIELDS, machine) as results, progress() as bar:
        points = shapes(arguments)
        task = bar.add_task("", total=len(points))
        for shape in points:
            bar.update(
                task, description=f"{shape.tokens} tokens, {shape.heads} heads, width {shape.width}"
            )
            row = measure(workload, shape, arguments, peer, machine)
            rows.append(results.write(row))
            bar.advance(task)
    console.print(f"wrote {path}", markup=False)
    return rows


def measure(
    workload: Workload, shape: Shape, arguments: argparse.Namespace, peer: Any, machine: Machine
) -> dict[str, Any]:
    """Check and time one configuration: a row of the CSV."""
    import flash_mla
    from flash_mla.timing import calls_per_graph, time_graphs

    record = workload.record
    key_bytes = shape.key_bytes(record)
    row: dict[str, Any] = dict.fromkeys(FIELDS)
    row.update(
        record=arguments.record,
        tokens=shape.tokens,
        heads=shape.heads,
        pad_to=arguments.pad_to,
        width=shape.width,
        s_q=shape.s_q,
    )
    row.update(calls=calls_per_graph(key_bytes))

    meta, _ = flash_mla.get_mla_metadata()
    contenders = {"ours": workload.call(flash_mla, shape, arguments.pad_to or shape.heads, meta)}
    if arguments.pad_to:
        contenders["native"] = workload.call(flash_mla, shape, shape.heads)
    if peer is not None:
        contenders["flashmla"] = workload.call(
            peer, shape, arguments.pad_to or flashmla.head_rows(shape.heads)
        )
    try:
        errors = check(workload, shape, contenders["ours"], contenders.get("flashmla"))
    except AssertionError as wrong:
        return {**row, "status": " ".join(str(wrong).split())}

    times = time_graphs(contenders, row["calls"], rounds=arguments.rounds)
    ours = times["ours"].median
    median = {name: timing.median for name, timing in times.items()}
    peak = hbm_peak_gbs(machine.gpu)
    gbs = key_bytes / ours / 1e3
    row.update(
        plan="/".join(map(str, (meta.plan.head_tile, meta.plan.splits, meta.plan.block_keys))),
        ours_us=ours,
        native_us=median.get("native"),
        flashmla_us=median.get("flashmla"),
        speedup=ratio(median.get("flashmla"), ours),
        ours_spread=(times["ours"].slowest - times["ours"].fastest) / ours,
        gbs=gbs,
        hbm_fraction=ratio(gbs, peak),
        tflops=shape.flops(record) / ours / 1e6,
        error_reference=errors.reference,
        error_flashmla=errors.peer,
        status="ok",
    )
    if baseline.applies_to(machine.gpu) and shape.heads <= 16:
        point = (arguments.record, shape.width, shape.tokens)
        row["floor_us"] = baseline.interpolated(*point, "floor_us")
        row["over_floor"] = ratio(ours, row["floor_us"])
        row["triton_us"] = baseline.measured(*point, "triton_us")
    return row


def results_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What a reader wants of the rows; columns that hold nothing are left out."""
    columns = [
        ("tok", lambda r: str(r["tokens"])),
        ("heads", lambda r: str(r["heads"])),
        ("width", lambda r: str(r["width"])),
        ("plan", lambda r: r["plan"] or r["status"][:40]),
        ("ours us", lambda r: shown(r["ours_us"], 2)),
        ("native us", lambda r: shown(r["native_us"], 2)),
        ("FlashMLA us", lambda r: shown(r["flashmla_us"], 2)),
        ("speed-up", lambda r: shown(r["speedup"], 2, "x")),
        ("GB/s", lambda r: shown(r["gbs"], 0)),
        ("HBM peak", lambda r: shown(r["hbm_fraction"] and 100 * r["hbm_fraction"], 1, " %")),
        ("over floor", lambda r: shown(r["over_floor"], 2, "x")),
        ("TFLOP/s", lambda r: shown(r["tflops"] if r["heads"] > 16 else None, 1)),
    ]
    filled = [(name, cell) for name, cell in columns if any(cell(row) != "–" for row in rows)]
    table = new_table(*(name for name, _ in filled), title="Sparse decode, median per call")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in filled))
    return table


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time over tokens, and speed-up below it, one column of axes per width."""
    rows = [row for row in rows if row["ours_us"] is not None]
    if not rows:
        return
    widths, heads = unique(r["width"] for r in rows), unique(r["heads"] for r in rows)
    plt = pyplot()
    figure, axes = plt.subplots(
        2,
        len(widths),
        figsize=(4.5 * len(widths) + 1, 7.5),
        squeeze=False,
        sharex=True,
        sharey="row",
    )
    for column, width in enumerate(widths):
        time, gain = axes[0, column], axes[1, column]
        time.set_title(f"{rows[0]['record'].upper()}, {width} keys")
        for color, h in zip(itertools.cycle(plt.get_cmap("tab10").colors), heads):
            mine = [r for r in rows if r["width"] == width and r["heads"] == h]
            _line(time, mine, "ours_us", color=color, marker="o", label=f"this library, {h} heads")
            _line(
                time,
                mine,
                "native_us",
                color=color,
                marker=".",
                linestyle=":",
                label=f"same, not padded, {h}",
            )
            _line(
                time,
                mine,
                "flashmla_us",
                color=color,
                marker="s",
                alpha=0.5,
                label=f"FlashMLA, {h} heads",
            )
            _line(gain, mine, "speedup", color=color, marker="o", label=f"{h} heads")
        first = [r for r in rows if r["width"] == width and r["heads"] == heads[0]]
        _line(
            time,
            first,
            "triton_us",
            color="gray",
            linestyle="--",
            label="Triton decoder (earlier run)",
        )
        _line(
            time,
            first,
            "floor_us",
            color="black",
            linestyle="--",
            label="gather floor (earlier run)",
        )
        gain.axhline(1.0, color="gray", linewidth=0.8)
        time.set_yscale("log", base=2)
        for axis in (time, gain):
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.grid(alpha=0.3)
        time.yaxis.set_major_formatter("{x:.0f}")
        gain.set_xlabel("tokens")
    axes[0, 0].set_ylabel("microseconds per call")
    axes[1, 0].set_ylabel("speed-up over FlashMLA")
    axes[0, 0].legend(fontsize=7)
    sign_figure(figure, Machine.of_row(rows[0]))
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    console.print(f"wrote {path}", markup=False)


def _line(axis: Any, rows: Sequence[dict[str, Any]], field: str, **style: Any) -> None:
    points = [(row["tokens"], row[field]) for row in rows if row[field] is not None]
    if points:
        axis.plot(*zip(*points), markersize=3, linewidth=1.2, **style)


if __name__ == "__main__":
    sys.exit(main())
