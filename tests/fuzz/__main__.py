"""`python -m tests.fuzz --minutes 10`: random input for every target; status 1 when a bug was
found.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence

from tests.fuzz.clips import CLIPS
from tests.fuzz.files import FILES
from tests.fuzz.frames import FRAMES
from tests.fuzz.http import HTTP, HTTP_CONNECTIONS
from tests.fuzz.markup import MARKUP
from tests.fuzz.rpcs import RPCS
from tests.fuzz.run import run_all
from tests.fuzz.schemas import SCHEMAS
from tests.fuzz.texts import TEXTS

ALL = (TEXTS, MARKUP, FILES, SCHEMAS, CLIPS, RPCS, FRAMES, HTTP, HTTP_CONNECTIONS)
TARGETS = {target.name: target for target in ALL}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=None, help="(default: a random one)")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--first", type=int, default=0, help="index of the first input")
    parser.add_argument("--count", type=int, default=None, help="how many inputs, at most")
    args = parser.parse_args(arguments)
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    targets = [TARGETS[name] for name in args.only]
    all_counts = run_all(targets, seed, args.minutes, args.first, args.count)
    finds = [found for counts in all_counts.values() for found in counts.finds.values()]
    for found in finds:
        print(f"{found.place}\n  {found.command}")
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
