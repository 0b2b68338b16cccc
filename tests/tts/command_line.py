"""Helpers of the tests of the command line."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import wave
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deadlines import HANG_S

TEXT = "Oh yes. Not yet."  # short: random weights may not choose the end token
SENTENCES = ["One.", "Two is more.", "Three.", "The fourth.", "That was all."]
LONG_TEXT = (" " * 600).join(SENTENCES)  # too long for one request, and soon said
STORY = " ".join(f"This is sentence number {n} of a rather long story." for n in range(500))
RATE = 16_000

Say = Callable[..., int]
"""The command with more arguments; its exit status."""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tts.say", *map(str, arguments)]


def pipe_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Replace standard input by a real pipe with these bytes; they must fit into its buffer."""
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    monkeypatch.setattr(sys, "stdin", os.fdopen(reading, closefd=False))


def frames_of(path: Path) -> bytes:
    with wave.open(str(path), "rb") as file:
        assert file.getparams()[:3] == (1, 2, RATE)
        frames = file.readframes(file.getnframes())
    assert path.stat().st_size == 44 + len(frames)
    return frames


def error_line(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the only line of standard error."""
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("say: ")
    return lines[0]


def wait_for(holds: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def read_all(terminal: int) -> str:
    """Read all data of a terminal whose other end is closed."""
    data = b""
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 1 << 16):
            data += piece
    os.close(terminal)
    return data.decode()
