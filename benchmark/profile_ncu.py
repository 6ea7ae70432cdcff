"""One call under Nsight Compute, reduced to the few figures that say what bounds it.

Runs `ncu` on this same script, which makes one call between `cudaProfilerStart` and `Stop`. ncu
empties the caches before each of its passes, so keys are cold. Clocks are left as they are.
Writes `benchmark/results/ncu_NAME.txt`.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Sequence

import torch

import peer as flashmla
from common import RESULTS, Machine, console, progress, require_sm90

SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats")
EXTRA_METRICS = (
    "dram__bytes_read.sum",
    "sm__inst_executed.sum",
    "sm__inst_issued.avg.pct_of_peak_sustained_active",
)

# What is printed of a kernel: label, metric. A metric that this ncu does not have prints a dash.
METRICS = (
    ("duration", "gpu__time_duration.sum"),
    ("DRAM bytes read", "dram__bytes_read.sum"),
    ("issue slots busy, %", "sm__inst_issued.avg.pct_of_peak_sustained_active"),
    ("warp instructions", "sm__inst_executed.sum"),
    ("grid", "launch__grid_size"),
    ("block", "launch__block_size"),
    ("registers a thread", "launch__registers_per_thread"),
    ("dynamic shared memory a block", "launch__shared_mem_per_block_dynamic"),
    ("achieved occupancy, %", "sm__warps_active.avg.pct_of_peak_sustained_active"),
)
_STALL = re.compile(r"average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio$")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    require_sm90()
    if arguments.child:
        profiled_call(arguments)
        return 0
    machine = Machine.here()
    reports = [str(machine)]
    with progress() as bar:
        for config in bar.track(arguments.configs, description="profiling"):
            reports.append(
                f"== {config}, {arguments.record}, {arguments.api}, plan {arguments.plan or 'chosen'}"
            )
            reports += [
                kernel_report(*kernel) for kernel in parse_raw_csv(run_ncu(arguments, config))
            ]
    text = "\n".join(reports) + "\n"
    path = arguments.out / f"ncu_{arguments.name or arguments.record + '_' + arguments.api}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text)
    console.print(f"wrote {path}", markup=False)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "configs",
        nargs="+",
        metavar="TxWxH",
        help="tokens x width x heads, such as 1x128x8 128x640x8",
    )
    parser.add_argument("--record", choices=("v4", "v32"), default="v4")
    parser.add_argument(
        "--pad-to", type=int, default=None, metavar="ROWS", help="zero rows up to ROWS"
    )
    parser.add_argument(
        "--plan", default=None, metavar="TILE,SPLITS,KEYS", help="force a plan, such as 8,10,32"
    )
    parser.add_argument("--api", choices=("ours", "flashmla"), default="ours")
    parser.add_argument("--peer", default=None, metavar="FILE", help=f"FlashMLA's {flashmla.FILE}")
    parser.add_argument("--ncu", default="ncu", help="the profiler's program")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default=None, help="the text file is ncu_NAME.txt")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# ---- The call, in the process that ncu watches -------------------------------------------------


def profiled_call(arguments: argparse.Namespace) -> None:
    """Make the one configured call, after a first one that is not profiled."""
    import flash_mla
    from workload import Shape, Workload

    tokens, width, heads = map(int, arguments.configs[0].split("x"))
    shape = Shape.of_width(tokens, heads, width)
    if arguments.record == "v32":
        shape = Shape(tokens, heads, width, s_q=tokens)
    api, rows = flash_mla, arguments.pad_to or heads
    if arguments.api == "flashmla":
        api, rows = flashmla.load(arguments.peer), flashmla.head_rows(rows)
        if api is None:
            sys.exit(f"FlashMLA's {flashmla.FILE} is not here; name it with --peer.")
    meta, _ = api.get_mla_metadata()
    if arguments.plan:
        head_tile, splits, block_keys = map(int, arguments.plan.split(","))
        meta.force_plan(head_tile=head_tile, splits=splits, block_keys=block_keys)
    call = Workload(arguments.record).call(api, shape, rows, meta)
    call(0)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call(1)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


# ---- ncu and its output ------------------------------------------------------------------------


def run_ncu(arguments: argparse.Namespace, config: str) -> str:
    """ncu's raw page as CSV text. Exits with ncu's own words if it fails."""
    child = [
        sys.executable,
        __file__,
        config,
        "--child",
        "--record",
        arguments.record,
        "--api",
        arguments.api,
    ]
    for option in ("pad_to", "plan", "peer"):
        value = getattr(arguments, option)
        child += [f"--{option.replace('_', '-')}", str(value)] if value is not None else []
    command = [
        arguments.ncu,
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--csv",
        "--page",
        "raw",
    ]
    command += [word for section in SECTIONS for word in ("--section", section)]
    command += ["--metrics", ",".join(EXTRA_METRICS), *child]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit(
            f"{arguments.ncu} is not installed; it comes with the CUDA toolkit (Nsight Compute)."
        )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def parse_raw_csv(text: str) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """ncu's `--page raw --csv` -> (kernel name, metric -> (value, unit)) for each kernel."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        sys.exit(f"ncu profiled no kernel:\n{text}")
    names, units, *kernels = csv.reader(io.StringIO("\n".join(lines[start:])))
    return [
        (values[names.index("Kernel Name")], dict(zip(names, zip(values, units))))
        for values in kernels
        if len(values) == len(names)
    ]


def kernel_report(name: str, metrics: dict[str, tuple[str, str]]) -> str:
    """The lines printed for one kernel."""
    lines = [name]
    for label, metric in METRICS:
        value, unit = metrics.get(metric, ("–", ""))
        lines.append(f"  {label:32} {value} {'' if unit == '%' else unit}".rstrip())
    stalls = top_stalls(metrics)
    total = sum(share for _, share in stalls)
    lines += [
        f"  stall: {reason:25} {100 * share / total:.0f} %" for reason, share in stalls[:5] if total
    ]
    return "\n".join(lines)


def top_stalls(metrics: dict[str, tuple[str, str]]) -> list[tuple[str, float]]:
    """Why warps waited, largest first: (reason, warps waiting per issue)."""
    found = ((_STALL.search(metric), value) for metric, (value, _) in metrics.items())
    stalls = [
        (match[1], float(value.replace(",", "")))
        for match, value in found
        if match and not match[1].endswith("_not_issued") and match[1] != "selected"
    ]
    return sorted(stalls, key=lambda stall: -stall[1])


if __name__ == "__main__":
    sys.exit(main())
