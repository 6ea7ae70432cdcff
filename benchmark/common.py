"""What every benchmark shares: the machine it ran on, its results files, its console."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import rich.box
import rich.console
import rich.progress
import torch
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"

# `python benchmark/x.py` puts benchmark/ on the path, not the repository with an uninstalled package.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Datasheet bandwidth in GB/s, by a part of the name that PyTorch reports. The longest match wins.
_HBM_PEAK = {"H200": 4800.0, "H100": 3350.0, "H20": 4000.0}

# A log file has no width of its own, and 80 columns would fold the tables.
console = rich.console.Console(width=None if sys.stdout.isatty() else 132)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where and from which source a result comes; a column each in every CSV."""

    date: str
    gpu: str
    sms: int
    torch: str
    cuda: str
    commit: str

    @classmethod
    def here(cls) -> Machine:
        gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
        return cls(
            date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
            gpu=gpu.name if gpu else "none",
            sms=gpu.multi_processor_count if gpu else 0,
            torch=torch.__version__,
            cuda=torch.version.cuda or "none",
            commit=_commit(),
        )

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Machine:
        """The machine a CSV row was measured on."""
        return cls(**{field.name: row[field.name] for field in dataclasses.fields(cls)})

    def __str__(self) -> str:
        return (
            f"{self.gpu} ({self.sms} SMs), torch {self.torch}, CUDA {self.cuda}, "
            f"commit {self.commit}, {self.date}"
        )


def require_sm90() -> None:
    """Exit with a plain message where there is no Hopper GPU to measure."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("This needs an SM90 GPU (H100, H200, H20), and there is none here.")


def hbm_peak_gbs(gpu: str) -> float | None:
    """Datasheet bandwidth in GB/s of the GPU with this name; None for one we do not know."""
    known = sorted((key for key in _HBM_PEAK if key in gpu), key=len)
    return _HBM_PEAK[known[-1]] if known else None


def progress() -> rich.progress.Progress:
    """The progress bar of a long run: what is being measured, how far, how long still."""
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
    )


class ResultsCsv:
    """A CSV under results/, written row by row so that a run cut short leaves what it measured."""

    def __init__(self, path: Path, fields: Sequence[str], machine: Machine) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._machine = dataclasses.asdict(machine)
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, [*self._machine, *fields], lineterminator="\n")
        self._writer.writeheader()

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Write one row, whose keys are among the fields; None is an empty cell.

        Returns the row with the machine's columns, as `read_csv` would.
        """
        full = {**self._machine, **row}
        self._writer.writerow({key: _cell(value) for key, value in full.items()})
        self._file.flush()
        return full

    def __enter__(self) -> ResultsCsv:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_csv(path: Path) -> list[dict[str, Any]]:
    """The rows of a ResultsCsv, numbers as int or float, empty cells as None."""
    as_text = {field.name for field in dataclasses.fields(Machine) if field.name != "sms"}
    with path.open(newline="") as file:
        return [
            {key: text if key in as_text else _value(text) for key, text in row.items()}
            for row in csv.DictReader(file)
        ]


def add_from_csv(parser: argparse.ArgumentParser, what: str) -> None:
    """`--from-csv FILE`: `what` again of an earlier run."""
    parser.add_argument(
        "--from-csv",
        type=Path,
        default=None,
        metavar="FILE",
        help=f"measure nothing: {what}",
    )


def new_table(*header: str, title: str) -> Table:
    """A printed table without rules, because the logs of some machines keep few characters."""
    return Table(*header, title=title, box=rich.box.SIMPLE_HEAD, padding=0, pad_edge=False)


def shown(value: float | None, digits: int = 1, unit: str = "") -> str:
    """A cell of a printed table; a dash for what was not measured."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """numerator / denominator, None where either is missing."""
    return numerator / denominator if numerator is not None and denominator else None


def sign_figure(figure: Any, machine: Machine) -> None:
    """Put machine, date and commit at the foot of a matplotlib figure."""
    figure.text(0.005, 0.005, str(machine), fontsize=7, color="gray")


def pyplot() -> Any:
    """matplotlib.pyplot without a display; imported only by runs that draw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def numbers(text: str) -> list[int]:
    """`1-4,8` -> [1, 2, 3, 4, 8], for command lines."""
    parts = (part.partition("-") for part in text.split(","))
    return [n for low, _, high in parts for n in range(int(low), int(high or low) + 1)]


def unique(items: Iterable[Any]) -> list[Any]:
    """The items in order, each once."""
    return list(dict.fromkeys(items))


def _commit() -> str:
    # A copy of the tree on another machine has no .git; whoever copied it passes the commit along.
    given = os.environ.get("FLASH_MLA_COMMIT")
    if given:
        return given
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.check_output(
            [*git, "rev-parse", "--short=12", "HEAD"], text=True, stderr=subprocess.DEVNULL
        )
        dirty = subprocess.check_output(
            [*git, "status", "--porcelain", "-uno"], text=True, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + ("-dirty" if dirty.strip() else "")


def _cell(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _value(text: str | None) -> Any:
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
