"""Results of a benchmark: the machine, one row per figure, as a table and as JSON.

The JSON goes to standard output and the table to standard error, so that `python -m
benchmarks.speed > speed.json` still shows the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TextIO

HEADER = ("figure", "median", "range", "bar", "verdict", "note")
"""Headers of the columns of `Figure.cells`."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and software of a measurement."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    torch: str
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        gpus = "".join(f"{gpu}, " for gpu in self.gpus)
        return (
            f"{gpus}{self.cores} cores of {self.cpu}, {self.memory_gib:g} GiB, {self.system}, "
            f"Python {self.python}, torch {self.torch}"
        )


def this_machine() -> Machine:
    """Return facts of this machine; cores are those that this process may use."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_gib=round(pages * page_bytes / 2**30, 1),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=metadata.version("torch"),
        gpus=_gpu_names(),
    )


@cache
def _gpu_names() -> tuple[str, ...]:
    """Return the driver's names of the GPUs; torch would allocate memory on each."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return tuple(found.stdout.splitlines()) if found.returncode == 0 else ()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number: the median of `values` when there are several.

    `bar` is the target, a minimum or maximum by `at_least`; None without one.
    """

    name: str
    values: tuple[float, ...]
    unit: str
    bar: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def reached(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def cells(self) -> tuple[str, ...]:
        """Return the table's row: name, value, spread, bar, verdict, note."""
        least, most = _four_digits(min(self.values)), _four_digits(max(self.values))
        spread = f"{least} - {most}" if len(self.values) > 1 else ""
        side = ">=" if self.at_least else "<="
        bar = "" if self.bar is None else f"{side} {_four_digits(self.bar)}"
        verdict = {True: "reached", False: "MISSED", None: ""}[self.reached]
        value = f"{_four_digits(self.value)} {self.unit}".strip()
        return self.name, value, spread, bar, verdict, self.note


def _four_digits(value: float) -> str:
    """Format a number with four digits; large ones in groups of three, never with an exponent."""
    rounded = f"{value:.4g}"
    return f"{float(rounded):,.0f}" if abs(value) >= 10_000 else rounded


def _this_command() -> str:
    """Return the command line to type again; "" for a program that is not a benchmark."""
    program = Path(sys.argv[0])
    if program.parent.name != __package__:
        return ""
    return shlex.join(["python", "-m", f"{__package__}.{program.stem}", *sys.argv[1:]])


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


@dataclass(frozen=True, slots=True)
class Report:
    """All results of one command."""

    benchmark: str
    figures: tuple[Figure, ...]
    machine: Machine = field(default_factory=this_machine)
    command: str = field(default_factory=_this_command)
    date: str = field(default_factory=_today)  # ISO 8601, UTC

    @property
    def reached(self) -> bool:
        """Whether no figure missed its bar."""
        return all(figure.reached is not False for figure in self.figures)

    def to_json(self) -> str:
        """Return the report as one JSON object, figures with their medians."""
        figures = [
            asdict(figure) | {"value": figure.value, "reached": figure.reached}
            for figure in self.figures
        ]
        record = {
            "benchmark": self.benchmark,
            "command": self.command,
            "date": self.date,
            "machine": asdict(self.machine),
            "figures": figures,
            "reached": self.reached,
        }
        return json.dumps(record, indent=2)

    def to_table(self) -> str:
        """Return the report as aligned columns under a line with the machine."""
        rows = [HEADER, *(figure.cells() for figure in self.figures)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        return "\n".join((f"{self.benchmark}: {self.machine}", *lines))


def publish(report: Report, out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Print table and JSON; the exit status is 1 when a figure missed its bar."""
    print(report.to_table(), file=err or sys.stderr)
    print(report.to_json(), file=out or sys.stdout)
    return 0 if report.reached else 1


def until_interrupted(figures: Iterable[Figure]) -> Iterator[Figure]:
    """Iterate over figures and print each as it is measured; an interruption ends the iteration."""
    try:
        for figure in figures:
            print(*filter(None, figure.cells()), sep="  ", file=sys.stderr, flush=True)
            yield figure
    except KeyboardInterrupt:
        print("interrupted; the figures measured so far follow", file=sys.stderr)


def arguments(description: str, *, repeat: int, has_model: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the common options; `has_model`: with an option for a checkpoint."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    if has_model:
        text = "checkpoint folder (default: built-in voice)"
        parser.add_argument("--model", default="", help=text)
    parser.add_argument("--repeat", type=_positive, default=repeat, help="repetitions")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def lines_of(path: Path, count: int | None = None) -> Sequence[str]:
    """Return the non-empty lines of a text file, the first `count` of them."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line][:count]
