"""`python -m benchmarks.results FOLDER`: the JSON of benchmarks as one page, on standard output.

Each file of the folder becomes a section, in the order of their names: command, machine, date and
table. `> benchmarks/RESULTS.md` creates that page; no figures are typed by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.report import HEADER, Figure, Machine, Report

TITLE = """# Results

Written by `python -m benchmarks.results FOLDER` from the JSON that the commands below printed. The
value of a row is the median of its runs, `range` their least and greatest; one run has no range.

Shapes are published sizes with random weights (`benchmarks/shapes.py`; llasa-1b is Llama 1B with a
vocabulary of 193,800). Served are, as a, Llasa 1B with XCodec2; as b, Orpheus 3B with SNAC."""


def read(path: Path) -> Report:
    """Read the report that a benchmark printed. Raises `ValueError` for another file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        figures = tuple(
            Figure(
                name=found["name"],
                values=tuple(found["values"]),
                unit=found["unit"],
                bar=found["bar"],
                at_least=found["at_least"],
                note=found["note"],
            )
            for found in record["figures"]
        )
        machine = Machine(**{**record["machine"], "gpus": tuple(record["machine"]["gpus"])})
        name, command, date = record["benchmark"], record["command"], record["date"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not what a benchmark printed: {error!r}") from error
    return Report(name, figures, machine, command, date)


def section(title: str, report: Report) -> Iterator[str]:
    """Iterate over the lines of one report."""
    yield f"## {title}"
    yield ""
    yield f"`{report.command}`, {report.date}, on {report.machine}."
    yield ""
    yield _row(HEADER)
    yield _row(("---",) * len(HEADER))
    yield from (_row(figure.cells()) for figure in report.figures)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(folder: Path) -> str:
    """Return the whole page. Raises `ValueError` for a folder without reports."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"{folder} has no *.json")
    sections = ("\n".join(section(path.stem, read(path))) for path in paths)
    return "\n\n".join((TITLE, *sections)) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The JSON of benchmarks as one page.")
    parser.add_argument("folder", type=Path, help="with the files, *.json")
    args = parser.parse_args(argv)
    try:
        print(page(args.folder), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
