"""A real server process and a small client of it, for tests and for benchmarks over gRPC."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import grpc

from tts.v1 import common_pb2, speech_pb2, speech_pb2_grpc

READY = re.compile(r"ready: (\S+)(?: http=(\S+))?(?: wyoming=(\S+))?")
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """A `python -m tts.serve` that is ready."""

    address: str
    pid: int
    http: str | None = None  # address for HTTP, if that is on
    wyoming: str | None = None  # and for Wyoming

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the server's processes: the supervisor and its children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return self.pid, *map(int, children)

    def resident_bytes(self) -> int:
        """Return the resident memory of all processes in bytes; shared pages count in each."""
        return sum(map(_resident_bytes, self.pids))


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the server has gone")


@contextmanager
def serving(
    model: str = "", flags: Sequence[str] = (), log: IO[bytes] | None = None
) -> Iterator[Server]:
    """Run a server on a free port while the block lasts; `log`: its standard error."""
    command = [sys.executable, "-m", "tts.serve", "--port", "0", "--log-level", "warning", *flags]
    if model:
        command += ["--model.model-path", model]
    with started(command, log) as server:
        yield server


@contextmanager
def started(command: Sequence[str], log: IO[bytes] | None = None) -> Iterator[Server]:
    """Run a program that prints its address when it is ready; `log`: its standard error."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            assert process.stdout is not None
            ready = READY.match(process.stdout.readline())
            if ready is None:
                raise RuntimeError(f"the server did not start (exit status {process.wait()})")
            yield Server(ready[1], process.pid, ready[2], ready[3])
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass(frozen=True, slots=True)
class Speech:
    """One response: s16le samples, and the seconds until the first of them."""

    pcm: bytes
    sample_rate: int
    first_audio_s: float

    @property
    def seconds(self) -> float:
        return len(self.pcm) / 2 / self.sample_rate


class SpeechClient:
    """Client of SpeechService, one request at a time."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = speech_pb2_grpc.SpeechServiceStub(self._channel)

    def __enter__(self) -> SpeechClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def voices(self) -> tuple[str, ...]:
        """Return the names of the voices."""
        found = self._stub.ListVoices(speech_pb2.ListVoicesRequest()).voices
        return tuple(voice.name for voice in found)

    def synthesize(self, text: str, *, voice: str = "", seed: int = 0) -> Speech:
        """Synthesize a text as a stream; times count from just before the call."""
        config = speech_pb2.SynthesisConfig(sampling=common_pb2.SamplingParams(seed=seed))
        if voice:
            config.voice.name = voice
        request = speech_pb2.SynthesizeStreamRequest(
            config=config, input=speech_pb2.SynthesisInput(text=text)
        )
        started = time.perf_counter()
        return self._read(self._stub.SynthesizeStream(request), lambda: started)

    def synthesize_words(
        self, words: Sequence[str], *, pause_s: float, timed_word: int, eager: int, seed: int = 0
    ) -> Speech:
        """Synthesize words that come one after another, `pause_s` apart.

        Times count from just before the word number `timed_word` is sent.
        """
        synthesis = speech_pb2.SynthesisConfig(sampling=common_pb2.SamplingParams(seed=seed))
        config = speech_pb2.StreamingSynthesizeConfig(synthesis=synthesis, eager=eager)
        sent_s = [0.0] * len(words)

        def messages() -> Iterator[speech_pb2.StreamingSynthesizeRequest]:
            yield speech_pb2.StreamingSynthesizeRequest(config=config)
            for index, word in enumerate(words):
                sent_s[index] = time.perf_counter()
                yield speech_pb2.StreamingSynthesizeRequest(text=f"{word} ")
                time.sleep(pause_s)

        events = self._stub.StreamingSynthesize(messages())
        return self._read(events, lambda: sent_s[timed_word - 1])

    @staticmethod
    def _read(events: Iterable[Any], start_s: Callable[[], float]) -> Speech:
        """Read a call to its end; `start_s` returns the time from which the others count."""
        data: list[bytes] = []
        first_audio_s, rate = 0.0, 0
        for event in events:
            match event.WhichOneof("event"):
                case "started":
                    rate = event.started.audio_format.sample_rate_hertz
                case "audio":
                    first_audio_s = first_audio_s or time.perf_counter() - start_s()
                    data.append(event.audio.data)
        return Speech(b"".join(data), rate, first_audio_s)
