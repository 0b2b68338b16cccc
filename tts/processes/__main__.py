"""`python -m tts.processes MODULE`: a child process of the supervisor, which runs `MODULE.run`."""

from __future__ import annotations

import gc
import sys
from importlib import import_module

from tts.cli.program import run_program


def main() -> int:
    """Import the module and run its work; return the exit status."""
    from tts.processes.child import run_child  # here: now collections of garbage are rare

    work = import_module(sys.argv[1]).run
    gc.freeze()  # modules stay: no collection has to visit their objects
    return run_child(work)


if __name__ == "__main__":
    run_program(main)
