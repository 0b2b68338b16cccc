"""Players of 16-bit mono PCM on this machine.

Candidates, in order: the `sounddevice` package, then the programs ffplay, aplay, afplay, paplay.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

PLAYERS = ("sounddevice", "ffplay", "aplay", "afplay", "paplay")


class PlayerError(Exception):
    """A player that stopped before all audio was played, or did not start."""


class Player(Protocol):
    """A player of a stream. One thread uses it, another one may call `interrupt`."""

    name: str

    def write(self, pcm: bytes) -> None:
        """Queue whole s16le samples; blocks while the buffer is full. May raise PlayerError."""

    def finish(self) -> None:
        """Wait until the last sample is played. May raise PlayerError."""

    def abort(self) -> None:
        """Stop at once and release the device; instead of `finish`, or after a PlayerError."""

    def interrupt(self) -> None:
        """Make a blocked `write` or `finish` return soon, with a PlayerError perhaps."""


def open_player(sample_rate: int, recording: Path, names: Iterable[str] = PLAYERS) -> Player | None:
    """Open the first of the named players that this machine has; None if it has none of them.

    `recording` is a WAV file of the same audio, complete when `finish` is called: some players
    can only play a complete file.
    """
    for name in names:
        player = _open(name, sample_rate, recording)
        if player is not None:
            return player
    return None


def _open(name: str, sample_rate: int, recording: Path) -> Player | None:
    if name == "sounddevice":
        return _open_sounddevice(sample_rate)
    program = shutil.which(name)
    if program is None:
        return None
    if name == "afplay":
        return FilePlayer(name, program, recording)
    return PipePlayer(name, (program, *PIPE_ARGUMENTS[name](sample_rate)))


def _open_sounddevice(sample_rate: int) -> Player | None:
    try:
        import sounddevice
    except (ImportError, OSError):  # not installed; or installed, but PortAudio is not
        return None
    try:
        stream = sounddevice.RawOutputStream(samplerate=sample_rate, channels=1, dtype="int16")
        stream.start()
    except (sounddevice.PortAudioError, ValueError):  # no output device, or not at this rate
        return None
    return DevicePlayer(stream, sounddevice.PortAudioError)


class DevicePlayer:
    """A PortAudio stream."""

    name = "sounddevice"

    def __init__(self, stream: Any, error: type[Exception]) -> None:
        self._stream, self._error = stream, error

    def write(self, pcm: bytes) -> None:
        try:
            self._stream.write(pcm)
        except self._error as error:
            raise PlayerError(f"sounddevice: {error}") from error

    def finish(self) -> None:
        self._stream.stop()  # waits for what is queued
        self._stream.close()

    def abort(self) -> None:
        self._stream.abort()
        self._stream.close()

    def interrupt(self) -> None:
        """Do nothing: `write` blocks no longer than its audio lasts."""


PIPE_ARGUMENTS: Mapping[str, Callable[[int], tuple[str, ...]]] = MappingProxyType(
    {
        "ffplay": lambda rate: (
            *("-nodisp", "-autoexit", "-loglevel", "error"),
            *("-f", "s16le", "-sample_rate", str(rate), "-i", "pipe:0"),
        ),
        "aplay": lambda rate: ("-q", "-t", "raw", "-f", "S16_LE", "-c", "1", "-r", str(rate), "-"),
        "paplay": lambda rate: ("--raw", "--format=s16le", "--channels=1", f"--rate={rate}"),
    }
)


class PipePlayer:
    """A program that plays its standard input."""

    def __init__(self, name: str, command: tuple[str, ...]) -> None:
        self.name = name
        self._process = _start(command, stdin=subprocess.PIPE)

    def write(self, pcm: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(pcm)
            self._process.stdin.flush()
        except OSError as error:
            raise PlayerError(f"{self.name} stopped early") from error

    def finish(self) -> None:
        self._close_input()
        if (status := self._process.wait()) != 0:
            raise PlayerError(f"{self.name} failed with exit status {status}")

    def abort(self) -> None:
        self._process.kill()
        self._close_input()
        self._process.wait()

    def interrupt(self) -> None:
        self._process.kill()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


class FilePlayer:
    """A program that plays only files, started when the recording is complete."""

    def __init__(self, name: str, program: str, recording: Path) -> None:
        self.name = name
        self._command = (program, str(recording))
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, pcm: bytes) -> None:
        """Do nothing: the recording has the same samples."""

    def finish(self) -> None:
        self._process = _start(self._command, stdin=subprocess.DEVNULL)
        if (status := self._process.wait()) != 0:
            raise PlayerError(f"{self.name} failed with exit status {status}")

    def abort(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def interrupt(self) -> None:
        if self._process is not None:
            self._process.kill()


def _start(command: tuple[str, ...], stdin: int) -> subprocess.Popen[bytes]:
    """Start a player in its own process group, so that Ctrl-C does not reach it."""
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
