"""The figures of a model card, from the output of `training.assess`.

    python -m training.card --evaluation runs/evaluation.json --card tts/embedded/MODEL_CARD.md

--evaluation also accepts the output of single commands of `training.evaluate`, one file each.
The section "Figures" of the card is replaced; without --card it is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEADING = "## Figures"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the reports in a file: of one command or of several."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, list) else [found]


def section(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a heading, the machine, and a table with a line for every figure."""
    machine = records[0]["machine"]
    lines = [
        HEADING,
        f"By `python -m training.evaluate` on {machine['cores']} cores of {machine['cpu']}. The "
        "word errors are pocketsphinx's; the teacher was judged in the same run.",
        "",
        "| command | what | median | range | bar |",
        "|---|---|---|---|---|",
    ]
    for record in records:
        command = f"`training.evaluate {record['benchmark']}`"
        for figure in record["figures"]:
            lines.append(f"| {command} | {' | '.join(_cells(figure))} |")
            command = ""
    return "\n".join((*lines, ""))


def _cells(figure: Mapping[str, Any]) -> tuple[str, ...]:
    """Return name, median, range, and the bar with its verdict."""
    values, bar = figure["values"], ""
    spread = f"{min(values):.3g} - {max(values):.3g}" if len(values) > 1 else ""
    if figure["bar"] is not None:
        verdict = "" if figure["reached"] else ", missed"
        bar = f"{'>=' if figure['at_least'] else '<='} {figure['bar']:.3g}{verdict}"
    return figure["name"], f"{figure['value']:.4g} {figure['unit']}".strip(), spread, bar


def with_figures(card: str, figures: str) -> str:
    """Return the card with its section replaced. Raises ValueError without the heading."""
    before, heading, after = card.partition(f"{HEADING}\n")
    if not heading:
        raise ValueError(f"the card has no heading '{HEADING}'")
    _, next_heading, rest = after.partition("\n## ")
    return before + figures + next_heading + rest


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evaluation", type=Path, nargs="+", required=True)
    parser.add_argument("--card", type=Path)
    args = parser.parse_args(argv)
    figures = section([record for path in args.evaluation for record in read(path)])
    if args.card is None:
        print(figures, end="")
        return 0
    try:
        changed = with_figures(args.card.read_text(encoding="utf-8"), figures)
    except ValueError as error:
        print(f"{args.card}: {error}", file=sys.stderr)
        return 1
    args.card.write_text(changed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
