"""Audio sinks of `tts.say`: a file, standard output, or a player.

    open(sample_rate) ─▶ write(bytes, samples)* ─┬─▶ close() -> place of the audio
                                                 └─▶ abort()    keeps a valid file

One thread opens, writes and closes; another one calls `interrupt` when the user cancels.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import shutil
import wave
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from decoder import finalize_header
from tts.cli.player import PLAYERS, Player, PlayerError, open_player
from tts.leftovers import temporary_folder

FALLBACK_FILE = Path("out.wav")
MAX_QUEUED = 64  # about a minute of audio
POLL_S = 0.1  # after which a blocked write checks for an interrupt

Result = TypeVar("Result")


class Sink(Protocol):
    """Destination of one synthesis; it is created by `open`."""

    def open(self, sample_rate: int) -> None:
        """Prepare for audio of this sample rate in Hz."""

    def write(self, data: bytes, num_samples: int) -> None:
        """Append encoded bytes of this many samples; may block while a player's buffer is full."""

    def close(self) -> str:
        """Finish, wait for a player, and return a description of the place of the audio."""

    def abort(self) -> None:
        """Finish early and leave a valid file. Does nothing before `open`."""

    def interrupt(self) -> None:
        """Make a blocked `write` or `close` return."""


class FileSink:
    """A file that is written as the audio comes; its header is completed at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._num_samples = 0

    def open(self, sample_rate: int) -> None:
        self._file = open_exclusively(self._path)

    def write(self, data: bytes, num_samples: int) -> None:
        assert self._file is not None
        self._file.write(data)
        self._num_samples += num_samples

    def close(self) -> str:
        self.abort()
        return str(self._path)

    def abort(self) -> None:
        if self._file is not None:
            with self._file:
                finalize_header(self._file, self._num_samples)
            self._file = None

    def interrupt(self) -> None:
        """Do nothing: files do not block."""


def open_exclusively(path: Path) -> BinaryIO:
    """Open a file to write and read, and empty it. OSError while another program has it locked."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "w+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise OSError(errno.EBUSY, "another program is writing it", str(path)) from None
    except OSError:
        pass  # a file system without locks
    file.truncate(0)
    return file


class StreamSink:
    """A file descriptor that another program reads: every chunk is written at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_interrupted = False

    def open(self, sample_rate: int) -> None:
        """Do nothing: raw audio has no header, and containers hold the sample rate."""

    def write(self, data: bytes, num_samples: int) -> None:
        rest = memoryview(data)
        while rest and self._waits_for_room():
            rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]

    def _waits_for_room(self) -> bool:
        """Wait until PIPE_BUF bytes can be written without blocking; False if interrupted."""
        while not self._is_interrupted:
            if select.select((), (self._descriptor,), (), POLL_S)[1]:
                return True
        return False

    def close(self) -> str:
        return "standard output"

    def abort(self) -> None:
        """Do nothing: every chunk is written already."""

    def interrupt(self) -> None:
        self._is_interrupted = True


class PipeSink(StreamSink):
    """A path that is not a regular file: a FIFO or a device, which cannot seek to a header."""

    def __init__(self, path: Path) -> None:
        super().__init__(-1)
        self._path = path

    def open(self, sample_rate: int) -> None:
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            raise OSError(error.errno, "no program reads it", str(self._path)) from None
        os.set_blocking(self._descriptor, True)

    def close(self) -> str:
        self.abort()
        return str(self._path)

    def abort(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class PlayerSink:
    """The first player that is found; without one, or when it fails, a file.

    The audio is recorded as well, so that none is lost when a player fails.
    """

    def __init__(self, names: Iterable[str] = PLAYERS, fallback: Path = FALLBACK_FILE) -> None:
        self._names = tuple(names)
        self._fallback = fallback
        self._recording: Recording | None = None
        self._player: Player | None = None
        self._problem = "no audio player found"
        self._is_interrupted = False

    def open(self, sample_rate: int) -> None:
        self._recording = Recording(sample_rate)
        self._player = open_player(sample_rate, self._recording.path, self._names)

    def write(self, data: bytes, num_samples: int) -> None:
        assert self._recording is not None
        self._recording.write(data)
        if self._player is not None and not self._is_interrupted:
            with self._surviving_failure(self._player):
                self._player.write(data)

    def close(self) -> str:
        assert self._recording is not None
        self._recording.close()
        if self._player is not None:
            with self._surviving_failure(self._player):
                self._player.finish()
        if self._player is not None:
            self._recording.discard()
            return f"played with {self._player.name}"
        self._recording.move_to(self._fallback)
        return f"{self._fallback} ({self._problem})"

    def abort(self) -> None:
        if self._recording is None:
            return
        self._recording.close()
        if self._player is not None:
            self._player.abort()
            self._recording.discard()
        else:
            self._recording.move_to(self._fallback)

    def interrupt(self) -> None:
        self._is_interrupted = True
        if self._player is not None:
            self._player.interrupt()

    @contextlib.contextmanager
    def _surviving_failure(self, player: Player) -> Iterator[None]:
        """Stop using a player that fails; an interrupt is not a failure."""
        try:
            yield
        except PlayerError as error:
            if not self._is_interrupted:
                player.abort()
                self._player, self._problem = None, str(error)


class Recording:
    """16-bit mono WAV in a temporary folder, until it is moved or discarded."""

    def __init__(self, sample_rate: int) -> None:
        self._folder = contextlib.ExitStack()
        self.path = self._folder.enter_context(temporary_folder("speech")) / "speech.wav"
        self._wave = wave.Wave_write(str(self.path))
        self._wave.setparams((1, 2, sample_rate, 0, "NONE", ""))

    def write(self, pcm: bytes) -> None:
        """Append s16le samples."""
        self._wave.writeframesraw(pcm)

    def close(self) -> None:
        """Complete the file."""
        self._wave.close()

    def move_to(self, path: Path) -> None:
        """Copy the completed file to a path and remove the folder."""
        with self._folder, open_exclusively(path) as target, self.path.open("rb") as source:
            shutil.copyfileobj(source, target)

    def discard(self) -> None:
        """Remove the folder."""
        self._folder.close()


class SinkThread:
    """Calls a sink on a thread of its own, so that it does not block the event loop.

    Writes are queued, up to `MAX_QUEUED` chunks, so that a player does not delay the synthesis.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sink")
        self._writes: deque[asyncio.Future[None]] = deque()

    async def open(self, sample_rate: int) -> None:
        """Call `Sink.open`."""
        await self._call(self._sink.open, sample_rate)

    async def write(self, data: bytes, num_samples: int) -> None:
        """Queue a chunk. Raises the error of an earlier write."""
        self._writes.append(self._call(self._sink.write, data, num_samples))
        while self._writes and (len(self._writes) > MAX_QUEUED or self._writes[0].done()):
            await self._writes.popleft()

    async def close(self) -> str:
        """Wait for the queued writes, then call `Sink.close`."""
        while self._writes:
            await self._writes.popleft()
        where = await self._call(self._sink.close)
        self._thread.shutdown()
        return where

    async def abort(self) -> None:
        """Cancel queued writes, interrupt a blocked one, then call `Sink.abort`."""
        for write in self._writes:
            write.cancel()
        self._sink.interrupt()
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._call(self._sink.abort)
        self._thread.shutdown()

    def _call(self, function: Callable[..., Result], *arguments: Any) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
