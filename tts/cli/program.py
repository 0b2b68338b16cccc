"""Start and end of a process that runs one program."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

YOUNG_OBJECTS = 50_000
"""New objects before a collection of garbage: more than a step of the engine creates. With Python's
700 the imports of libraries start hundreds of collections, which find almost nothing.
"""
LOST_OUTPUT = 120
"""Exit status when the end of standard output cannot be written, as Python's own."""


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a program and end this process with the status that `main` returns.

    Threads are waited for and exit handlers run, as by `sys.exit`; those that were registered
    before this call do not. Objects are not freed one by one, which takes 0.4 s after an import of
    torch: their memory goes back with the process.
    """
    statuses: list[int] = []
    atexit.register(lambda: statuses and end_process(statuses[0]))  # the first one runs last
    _, middle, old = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, middle, old)
    statuses.append(main())
    sys.exit(statuses[0])


def end_process(status: int) -> NoReturn:
    """End this process at once, without threads and exit handlers.

    A status of 0 becomes LOST_OUTPUT if the last output cannot be written.
    """
    try:
        if sys.stdout is not None:  # None if it was closed at the start
            sys.stdout.flush()
    except OSError:  # raised from a handler of a signal, it would not end the process
        status = status or LOST_OUTPUT
    with suppress(OSError, AttributeError):  # broken or, as above, None
        sys.stderr.flush()
    os._exit(status)
