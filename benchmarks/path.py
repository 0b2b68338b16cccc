"""How many of our own functions, files and value types a request passes before its first answer.

A server and a client run in this process. A profiler in every thread records what runs between the
call and the moment at which the server serializes the first audio (or the first text).

functions    Python functions of `tts`, `llm` and `decoder` that are called, each once, properties
             and generators included; a comprehension or a lambda belongs to its function
files        the files that hold them
value types  dataclasses, named tuples, message structs and protocol messages of these packages of
             which the serving path makes an instance, each type once

Not counted: what the first request makes once for the process, what also runs while there is no
request (the server's loops in the background), what the client of this process makes, generated
code, and types and functions of other packages, protobuf's well-known types included. The counts
are of code, not of time, so a slow machine gives the same.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import grpc

from benchmarks.report import Figure, Report, publish
from tts.config.defaults import default_values
from tts.config.pipeline import AudioGenerationConfig
from tts.config.server import ServerConfig
from tts.factory import create_service
from tts.server.server import SpeechServer
from tts.v1 import common_pb2, speech_pb2, text_pb2
from tts.v1.speech_pb2_grpc import SpeechServiceStub
from tts.v1.text_pb2_grpc import TextServiceStub

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("tts", "llm", "decoder"))
GENERATED = f"{ROOT / 'tts' / 'v1'}/"
INLINED = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>", "<module>"})
SAMPLING = common_pb2.SamplingParams(seed=1, max_tokens=40)
SPEECH = speech_pb2.SynthesizeStreamRequest(
    input=speech_pb2.SynthesisInput(text="The quick brown fox jumps over the lazy dog."),
    config=speech_pb2.SynthesisConfig(sampling=SAMPLING),
)
TEXT = text_pb2.GenerateStreamRequest(
    input=text_pb2.GenerationInput(prompt="The quick brown fox"),
    config=text_pb2.GenerationConfig(sampling=SAMPLING),
)
SPEECH_BARS = (400.0, 65.0, 22.0)  # the 22 is of a counter that found 31 where this one finds 61
TEXT_BARS = (212.0, 49.0, 18.0)  # two thirds of the first counts: 318, 74, 28
FIRST_ANSWERS = ("audio", "delta")  # events that end a recording
IDLE_S = 1.2  # in which what runs without a request is recorded: more than STATUS_PERIOD_S twice


class Recorder:
    """Notes code that runs and values that are made while it is on, in all threads."""

    def __init__(self) -> None:
        self.is_on = False
        self.code: set[CodeType] = set()
        self.values: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Profile one event (see `sys.setprofile`)."""
        if not self.is_on or event != "call":
            return
        code = frame.f_code
        if is_ours(code):
            self.code.add(code)
        elif code.co_name in ("__init__", "__new__", "<lambda>") and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            self._note_value(first if isinstance(first, type) else type(first))

    def _note_value(self, kind: type) -> None:
        """Note the dataclass, named tuple or struct of which a generated function is called."""
        is_value = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
        if is_value and kind.__module__.split(".")[0] in ("tts", "llm", "decoder"):
            self.values.add(f"{kind.__module__}.{kind.__qualname__}")

    def note_message(self, kind: type) -> None:
        """Note a protocol message that our code makes."""
        if self.is_on:
            self.values.add(f"{kind.__module__}.{kind.__qualname__}")

    def start(self) -> None:
        """Record from now on, afresh."""
        self.code, self.values, self.is_on = set(), set(), True


def is_ours(code: CodeType) -> bool:
    """Whether it is a function that we wrote; comprehensions belong to theirs."""
    name = code.co_filename
    is_source = name.startswith(PACKAGES) and not name.startswith(GENERATED)
    return is_source and code.co_name not in INLINED


@contextmanager
def counted_messages(recorder: Recorder, *modules: ModuleType) -> Iterator[None]:
    """Note which protocol messages our code makes: their classes are wrapped in the modules."""
    originals = [
        (module, name, kind)
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and hasattr(kind, "DESCRIPTOR")
    ]
    for module, name, kind in originals:
        setattr(module, name, _counting(recorder, kind))
    try:
        yield
    finally:
        for module, name, kind in originals:
            setattr(module, name, kind)


def _counting(recorder: Recorder, kind: Any) -> Any:
    class Meta(type):
        def __call__(cls, *args: Any, **values: Any) -> Any:
            recorder.note_message(kind)
            return kind(*args, **values)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, kind)

        def __getattr__(cls, name: str) -> Any:
            return getattr(kind, name)

    def serialize(message: Any) -> bytes:
        """Serialize a message; the first answer ends the recording."""
        is_response = "event" in message.DESCRIPTOR.oneofs_by_name
        if is_response and message.WhichOneof("event") in FIRST_ANSWERS:
            recorder.is_on = False
        data: bytes = message.SerializeToString()
        return data

    return Meta(kind.__name__, (), {"SerializeToString": staticmethod(serialize)})


@dataclasses.dataclass(frozen=True, slots=True)
class Passed:
    """What one request passed."""

    functions: int
    files: int
    values: tuple[str, ...]
    rooms: tuple[tuple[str, int], ...]  # functions of each


async def traced(recorder: Recorder, ask: Callable[[], Awaitable[None]]) -> Passed:
    """Warm up with one request, record what runs without one, then record one."""
    await ask()
    await asyncio.sleep(IDLE_S)  # the engine's thread ends its turn after the answer
    recorder.start()
    await asyncio.sleep(IDLE_S)
    idle, idle_values = recorder.code, recorder.values
    recorder.start()
    await ask()
    assert not recorder.is_on, "the request had no answer"
    code = recorder.code - idle
    files = {path.co_filename for path in code}
    rooms = Counter(
        "/".join(Path(path.co_filename).relative_to(ROOT).with_suffix("").parts[:2])
        for path in code
    )
    return Passed(
        len(code),
        len(files),
        tuple(sorted(recorder.values - idle_values)),
        tuple(rooms.most_common()),
    )


async def speak(channel: grpc.aio.Channel) -> None:
    """Ask for a sentence, and read it to its end."""
    async for _ in SpeechServiceStub(channel).SynthesizeStream(SPEECH):
        pass


async def write(channel: grpc.aio.Channel) -> None:
    """Ask for a few tokens, and read them to their end."""
    async for _ in TextServiceStub(channel).GenerateStream(TEXT):
        pass


async def measure() -> tuple[Passed, Passed]:
    """The paths of a sentence and of a text request through one server in this process."""
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        with counted_messages(recorder, common_pb2, speech_pb2, text_pb2):
            service = create_service(AudioGenerationConfig(**default_values()))
            server = SpeechServer(ServerConfig(port=0))
            await server.start()
            await server.serve(service)
            async with grpc.aio.insecure_channel(server.address) as channel:
                spoken = await traced(recorder, lambda: speak(channel))
                written = await traced(recorder, lambda: write(channel))
            await server.drain(0, 5)
            await server.stop()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return spoken, written


def figures(title: str, path: Passed, bars: Sequence[float]) -> Iterator[Figure]:
    """A row for each count."""
    counts = (
        ("functions", path.functions),
        ("files", path.files),
        ("value types", len(path.values)),
    )
    for (name, count), bar in zip(counts, bars, strict=True):
        yield Figure(f"{title}: {name}", (float(count),), "", bar=bar)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--list", action="store_true", help="also the functions of each room")
    args = parser.parse_args(argv)
    spoken, written = asyncio.run(measure())
    if args.list:
        for title, path in (("speech", spoken), ("text", written)):
            print(
                title,
                *(f"{room} {count}" for room, count in path.rooms),
                sep="\n  ",
                file=sys.stderr,
            )
            print("  values:", ", ".join(path.values), file=sys.stderr)
    rows = (
        *figures("a sentence, to its first audio", spoken, SPEECH_BARS),
        *figures("a text request, to its first token", written, TEXT_BARS),
    )
    return publish(Report("path", rows))


if __name__ == "__main__":
    raise SystemExit(main())
