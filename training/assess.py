"""Complete evaluation of a voice: all commands, with their results in one file.

    python -m training.assess --model runs/voice --lines runs/corpus_held_out.txt \
        --words runs/words_held_out.tsv --out runs/evaluation.json

The recipe's section `[evaluation]` selects the commands of `training.evaluate` and their sizes.
`training.card` converts the file to the table of a model card.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from training.evaluate import COMMANDS
from training.recipe import parse


def assess(args: argparse.Namespace) -> None:
    """Run the commands; the file is rewritten after each."""
    records = []
    for name in args.commands:
        report = COMMANDS[name](args)
        print(report.to_table(), file=sys.stderr, flush=True)
        records.append(json.loads(report.to_json()))
        args.out.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--lines", type=Path, required=True, help="held-out lines of all lengths")
    parser.add_argument("--words", type=Path, required=True, help="held-out words")
    parser.add_argument("--out", type=Path, required=True)
    args, _ = parse(parser, "evaluation", argv)
    unknown = [name for name in args.commands if name not in COMMANDS]
    if unknown:
        parser.error(f"no command of training.evaluate: {', '.join(unknown)}")
    args.codec, args.voices = args.model / "codec/model.safetensors", None
    args.sentences = args.sentences or None
    torch.set_num_threads(1)
    assess(args)


if __name__ == "__main__":
    main()
