"""A command's standard streams, as the caller left them: closed, full, or not UTF-8."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

STDERR = 2


def prepare_streams() -> None:
    """Make closed streams harmless, before any file is opened.

    Closed descriptors are occupied, so that no file gets the number of a standard stream. A closed
    standard error swallows what it is told; a closed standard output stays None.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = os.fdopen(STDERR, "w")


def tell(line: str) -> None:
    """Print a line to standard error, as far as that can be written."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def show(line: str) -> None:
    """Print a line to standard output at once. Raises OSError."""
    encoding = sys.stdout.encoding
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError:
        discard(sys.stdout)
        raise


def discard(stream: TextIO) -> None:
    """Send what a stream still holds nowhere: the interpreter would try again when it ends."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
