"""Standard streams of a command, which may be closed, full, or not UTF-8."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import TextIO

STDERR = 2
BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit status when the reader of printed lines has ended, as `head` does; nothing is reported."""


def prepare_streams() -> None:
    """Open the null device for closed standard streams, before any file is opened.

    Otherwise a file would get the number of a standard stream. Lines to a closed standard error
    are discarded; `sys.stdout` stays None if standard output is closed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = os.fdopen(STDERR, "w")


def print_error(line: str) -> None:
    """Print a line to standard error; errors of writing are ignored."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def print_line(line: str) -> None:
    """Print a line to standard output and flush it. Raises OSError."""
    encoding = sys.stdout.encoding
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError:
        discard(sys.stdout)
        raise


def discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that the interpreter does not flush it at exit."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
