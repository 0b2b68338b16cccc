"""A real server process under random calls, and its invariants."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.fakes import build_tiny_checkpoint
from tests.fuzz.base import InvariantError
from tests.speech_server import Server, started
from tts.v1 import speech_pb2 as pb
from tts.v1.speech_pb2_grpc import SpeechServiceStub

ROOT = Path(__file__).parents[2]
# the engine is another process, so that messages between processes are tested, too
FRONT_ENDS = "--front-ends=1"
GENEROUS_S = 240.0  # for a busy machine; only a hang takes so long
SPARE_DESCRIPTORS = 24  # of thread pools and libraries, opened at the first use
SPARE_BYTES = 1 << 30  # caches: voices, prefixes, grammars, allocators
LOST = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
MAX_LOST = 5
CHECK_EVERY = 100  # inputs between two syntheses
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)
HARMLESS = "listening again"  # a path that is not UTF-8 ends grpcio's server loop
_SAY = pb.SynthesizeRequest(input=pb.SynthesisInput(text="Hello there."))
_SAY.config.sampling.max_tokens = 8


class Served:
    """The server, a channel to it, and the checks."""

    def __init__(self, server: Server, log: Path) -> None:
        self.server, self._log, self._pids = server, log, server.pids
        self._read_bytes = self._num_checks = 0
        self.channel = grpc.insecure_channel(server.address, OPTIONS)
        self.ended: set[tuple[str, str]] = set()
        """Request ids and status codes of the `call ended` lines that were read last."""
        self.still_speaks()
        self.read_log()
        self._first_bytes, self._first_open = server.resident_bytes(), self._num_open()

    def check(self) -> None:
        """Raise unless the server is SERVING, its log is valid and, at times, synthesis works."""
        self._num_checks += 1
        health = HealthStub(self.channel).Check
        response = self._answer(health, health_pb2.HealthCheckRequest())
        if response.status != health_pb2.HealthCheckResponse.SERVING:
            raise InvariantError(f"health: {response}")
        if self._num_checks % CHECK_EVERY == 0:
            self.still_speaks()
            self._check_memory()
        if self.server.pids != self._pids:
            raise InvariantError("a process of the server has ended")
        self.read_log()

    def still_speaks(self) -> None:
        """Raise unless a short text is synthesized."""
        if not self._answer(SpeechServiceStub(self.channel).Synthesize, _SAY).audio:
            raise InvariantError("a short text has no sound")

    def _answer(self, method: Any, request: Any) -> Any:
        """Return the response to a call.

        A call that reaches grpcio's server loop just after its end is lost; it is repeated, as a
        client would do.
        """
        for _ in range(MAX_LOST):
            try:
                return method(request, timeout=GENEROUS_S, wait_for_ready=True)
            except grpc.RpcError as error:
                if error.code() not in LOST:
                    raise
        raise InvariantError(f"no answer to {MAX_LOST} calls")

    def check_at_end(self) -> None:
        """Raise unless synthesis works, and the server holds no more resources than after its
        start.
        """
        self.still_speaks()
        self.channel.close()
        give_up = time.monotonic() + GENEROUS_S
        while self._num_open() > self._first_open + SPARE_DESCRIPTORS:
            if time.monotonic() > give_up:
                raise InvariantError(f"{self._num_open()} descriptors, {self._first_open} at first")
            time.sleep(0.2)
        self._check_memory()
        self.read_log()

    def read_log(self) -> None:
        """Read the complete new lines. Raises InvariantError for one that indicates a bug."""
        with self._log.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(data)
        self.ended = set()
        for line in data.splitlines():
            values = _parsed(line)
            if values["message"] == "call ended":
                self.ended.add((values["request_id"], values["code"]))

    def _check_memory(self) -> None:
        now = self.server.resident_bytes()
        if now > self._first_bytes + SPARE_BYTES:
            raise InvariantError(
                f"{now >> 20} MiB in memory, {self._first_bytes >> 20} MiB at first"
            )

    def _num_open(self) -> int:
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.server.pids)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(line)
        keys = {"time", "level", "logger", "message"} - values.keys()
    except (ValueError, AttributeError):
        raise InvariantError(f"a line of the log is no JSON object: {line[:500]!r}") from None
    is_bug = "exception" in values or values.get("level") in ("error", "critical")
    if keys or (is_bug and HARMLESS not in values["message"]):
        raise InvariantError(f"logged: {line.decode()[-3000:]}")
    return values


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Start a server on a tiny checkpoint in a separate process, with its log in the folder."""
    checkpoint, log = build_tiny_checkpoint(folder / "tiny"), folder / "log"
    flags = (
        "--port=0",
        "--http-port=0",
        "--log-format=json",
        FRONT_ENDS,
        "--model.device-specs=cpu",
    )
    sizes = ("--max-batch-size=16", "--model.kv-cache.num-pages=512")
    model = ("--model", str(checkpoint), "--sampling.enable-structured-output", *sizes)
    command = (sys.executable, "-m", "tts.serve", *model, *flags)
    with log.open("wb") as errors, started(command, errors) as server:
        yield Served(server, log)
