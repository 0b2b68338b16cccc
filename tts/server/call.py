"""The outermost context of every call: counts, logs, request ids, and statuses for errors.

    track ─▶ loading? draining? ─▶ body ─▶ OK
                                    ├─ error ─▶ status table ─▶ CallError
                                    └─ cancelled, deadline ─▶ passes through

`CallTracker.serve` is `track` for gRPC: a CallError aborts the RPC with its status and details.

Log lines hold ids, codes and numbers, and a user's text only where the configuration says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network
from typing import Any, NoReturn
from urllib.parse import unquote
from uuid import uuid4

import grpc

from tts.errors import DrainingError, LoadingError, SlowReaderError
from tts.observe import logs
from tts.observe.logs import Fields, with_fields
from tts.observe.metrics import Metrics
from tts.observe.tracing import CallSpan, Phases, Tracer
from tts.server.status import DETAILS_KEY, RpcStatus, status_of
from tts.server.wire.common import REQUEST_ID
from tts.speech.types import (
    AudioChunk,
    Done,
    SessionEvent,
    SpeechEvent,
    Started,
    SynthesisResult,
)

logger = logging.getLogger("tts.rpc")

REQUEST_ID_KEY = "x-request-id"
MAX_LOGGED_CHARACTERS = 1000
CLIENT_BITS = 64  # prefix of an IPv6 address: a provider assigns at least a /64 to a customer


class ServerState(Enum):
    """State of the server: whether it accepts new calls."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


class CallError(Exception):
    """Status of a call that failed, for the protocol to report. Already counted and logged."""

    def __init__(self, status: RpcStatus) -> None:
        super().__init__(status.message)
        self.status = status


@dataclass(slots=True)
class Call:
    """One running call, of any protocol."""

    service: str
    method: str
    client: str  # see `client_of`
    send: Callable[[Any], Awaitable[object]]  # one message of the protocol to the client
    write_timeout_s: float
    span: CallSpan | None = None
    logs_text: bool = False
    request_id: str = field(default_factory=lambda: uuid4().hex)
    started: float = field(default_factory=time.monotonic)
    first_input: float | None = None
    """Time of the first text of a streaming call; its first-audio latency counts from here."""
    last_write: float = 0.0
    """Time when the last message was taken over by the transport."""
    # statistics for the log line, the trace and the metrics
    characters: int = 0
    text: str = ""  # beginning of the requested text, if text may be logged
    sample_rate: int = 0  # Hz of the audio sent
    audio_s: float = 0.0
    first_audio_s: float | None = None
    underrun_s: float = 0.0  # silence of a player that began with the first audio
    playback_end: float = 0.0  # time when such a player has played all audio
    last_segment: int = -1  # of the audio sent
    admission_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    warnings: int = 0
    checks: tuple[tuple[str, ...], ...] = ()  # results of the attempts of each checked segment

    @property
    def age_s(self) -> float:
        """Return the seconds since the call arrived."""
        return time.monotonic() - self.started

    def note_admission(self) -> None:
        """Note that the call holds a slot among the running ones."""
        self.admission_s = self.age_s

    def note_text(self, text: str) -> None:
        """Count the characters of the text that the client requests."""
        self.characters += len(text)
        if self.logs_text:
            self.text = (self.text + text)[:MAX_LOGGED_CHARACTERS]

    def note_timings(self, queue_s: float | None, prefill_s: float | None) -> None:
        """Record the seconds in the engine's queue and until the first token.

        Calls that were open before their first text are skipped: these phases do not add up to
        their duration.
        """
        if self.first_input is None:
            self.queue_s, self.prefill_s = queue_s or 0.0, prefill_s or 0.0

    def adopt_id(self, request_id: str) -> None:
        """Use the client's request id if it is valid in log lines and metadata."""
        if REQUEST_ID.fullmatch(request_id):
            self.request_id = request_id
            logs.request_id.set(request_id)

    async def write(self, message: Any) -> None:
        """Send one message; wait while the client does not read, up to the write timeout.

        Raises SlowReaderError when the connection's buffers stay full for the whole write timeout.
        """
        try:
            async with asyncio.timeout(self.write_timeout_s):
                await self.send(message)
                self.last_write = time.monotonic()
        except TimeoutError:
            raise SlowReaderError(
                f"the client read nothing for {self.write_timeout_s:g} s; read faster or ask "
                "for less audio at once"
            ) from None


def note_input(call: Call, text: str) -> None:
    """Record streamed text in the call's statistics, and the time of the first message."""
    if call.first_input is None:
        call.first_input = time.monotonic()
    call.note_text(text)


def note_event(call: Call, metrics: Metrics, event: SessionEvent | SpeechEvent) -> None:
    """Record an event that is about to be sent in the call's statistics."""
    match event:
        case Started():
            call.sample_rate = event.audio_format.sample_rate
        case AudioChunk():
            duration_s = event.sample_count / call.sample_rate
            call.audio_s += duration_s
            call.underrun_s += _underrun_s(call, event, duration_s)
            if call.first_audio_s is None:
                call.first_audio_s = time.monotonic() - (call.first_input or call.started)
                metrics.first_audio.observe(call.first_audio_s)
        case Done(result):
            metrics.underrun.observe(call.underrun_s)
            note_result(call, result)


def note_result(call: Call, result: SynthesisResult) -> None:
    """Record the result of a synthesis in the call's statistics."""
    call.prompt_tokens = result.usage.prompt_tokens
    call.output_tokens = result.usage.output_tokens
    call.warnings = len(result.warnings)
    call.checks = tuple(tuple(r.value for r in results) for results in result.checks)
    call.note_timings(result.timings.queue_s, result.timings.prefill_s)


def _underrun_s(call: Call, chunk: AudioChunk, duration_s: float) -> float:
    """Return the seconds for which a player has nothing to play before this chunk is sent.

    The player begins with the first audio and never runs ahead of it. The time that the client
    took to read is not counted, nor a pause between segments of a text that is still being written.
    """
    now = time.monotonic()
    waits_for_text = call.first_input is not None and chunk.segment_index != call.last_segment
    is_counted = call.last_segment >= 0 and not waits_for_text
    late_s = max(0.0, now - max(call.playback_end, call.last_write)) if is_counted else 0.0
    call.last_segment = chunk.segment_index
    call.playback_end = max(call.playback_end, now) + duration_s
    return late_s


def client_of(peer: str) -> str:
    """Return the client at a peer as gRPC names it.

    A client is an address of IPv4 or the first 64 bits of one of IPv6: one machine has all the
    addresses that begin with them. All calls over Unix sockets are one client's.
    """
    kind, _, rest = peer.partition(":")
    return _client(kind, rest.rpartition(":")[0]) if kind in ("ipv4", "ipv6") else peer


def client_at(host: str) -> str:
    """Return the client at the IP address of a connection; see `client_of`."""
    return _client("ipv6" if ":" in host else "ipv4", host)


@lru_cache(maxsize=4096)
def _client(kind: str, address: str) -> str:
    if kind == "ipv4":
        return f"{kind}:{address}"
    own = IPv6Address(unquote(address).strip("[]").partition("%")[0])  # the zone index follows %
    if own.ipv4_mapped is not None:
        return f"ipv4:{own.ipv4_mapped}"
    return f"{kind}:{IPv6Network((own, CLIENT_BITS), strict=False)}"


class CallTracker:
    """Tracker of the open calls of one server."""

    def __init__(
        self,
        metrics: Metrics,
        write_timeout_s: float,
        log_text: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        self.state = ServerState.LOADING
        self.metrics = metrics
        self.tracer = tracer
        self._write_timeout_s = write_timeout_s
        self._log_text = log_text
        self._idle = asyncio.Event()
        self.num_open = 0
        """Number of open calls, including those that wait in the queue."""

    @asynccontextmanager
    async def track(
        self,
        service: str,
        method: str,
        client: str,
        send: Callable[[Any], Awaitable[object]],
        metadata: Iterable[tuple[str, str | bytes]] = (),
        refusal: Exception | None = None,
        time_remaining: Callable[[], float | None] = lambda: None,
    ) -> AsyncIterator[Call]:
        """Run the body of one call.

        `metadata` are its headers, `time_remaining` the seconds until its deadline (None: without
        one). Raises CallError for what the body raises, and for a `refusal`.
        """
        span = self.tracer.start(service, method, metadata) if self.tracer is not None else None
        call = Call(service, method, client, send, self._write_timeout_s, span, self._log_text)
        outer = logs.request_id.set(call.request_id)
        self.metrics.started.labels(service, method).inc()
        self.num_open += 1
        try:
            if refusal is not None:
                raise refusal
            if self.state is not ServerState.SERVING:
                self._refuse()
            yield call
        except asyncio.CancelledError:
            remaining_s = time_remaining()
            has_expired = remaining_s is not None and remaining_s <= 0
            self._ended(call, "DEADLINE_EXCEEDED" if has_expired else "CANCELLED")
            raise
        except Exception as error:  # outermost handler: every other error becomes a status
            status = status_of(error, call.request_id)
            self._ended(call, status.code.name, status.reason, error)
            raise CallError(status) from error
        else:
            self._ended(call, "OK")
        finally:
            logs.request_id.reset(outer)
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()

    @asynccontextmanager
    async def serve(
        self,
        context: grpc.aio.ServicerContext,
        service: str,
        method: str,
        refusal: Exception | None = None,
    ) -> AsyncIterator[Call]:
        """Run the body of one RPC; what it raises, or `refusal`, becomes the RPC's status."""
        metadata = context.invocation_metadata() or ()
        client, remaining = client_of(context.peer()), context.time_remaining
        tracked = self.track(service, method, client, context.write, metadata, refusal, remaining)
        try:
            async with tracked as call:
                try:
                    yield call
                except grpc.aio.InternalError:  # the transport closed before the cancellation
                    raise asyncio.CancelledError from None
                context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
        except CallError as error:
            await _abort(context, error.status)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call is open; return False if some are still open after the timeout."""
        deadline = time.monotonic() + timeout_s
        while self.num_open:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), deadline - time.monotonic())
            except TimeoutError:
                return False
        return True

    def _refuse(self) -> NoReturn:
        if self.state is ServerState.LOADING:
            raise LoadingError("the model is still loading; try again in a moment")
        raise DrainingError("the server is shutting down; use another one")

    def _ended(
        self, call: Call, code: str, reason: str = "", error: Exception | None = None
    ) -> None:
        metrics = self.metrics
        metrics.call_ended(call.service, call.method, code, call.age_s)
        if code != "OK":
            metrics.errors.labels(code, reason or code).inc()
        metrics.audio.inc(call.audio_s)
        metrics.characters.inc(call.characters)
        metrics.prompt_tokens.inc(call.prompt_tokens)
        metrics.output_tokens.inc(call.output_tokens)
        for results in call.checks:
            metrics.segment_checked(results)
        if call.audio_s and code == "OK":
            metrics.real_time_factor.observe(call.age_s / call.audio_s)
        fields = _fields(call, code, reason)
        logger.info("call ended", extra=with_fields(*fields))
        if call.span is not None:
            phases = Phases(call.admission_s, call.queue_s, call.prefill_s)
            call.span.end(fields, phases)
        if code == grpc.StatusCode.INTERNAL.name:
            logger.error("the call failed", exc_info=error)


async def _abort(context: grpc.aio.ServicerContext, status: RpcStatus) -> None:
    metadata = (
        (DETAILS_KEY, status.to_proto().SerializeToString()),
        (REQUEST_ID_KEY, status.request_id),
    )
    try:
        await context.abort(status.code, status.message, metadata)
    except grpc.aio.InternalError:  # the client has disconnected
        raise asyncio.CancelledError from None


def _fields(call: Call, code: str, reason: str) -> Fields:
    """Return the log fields of a call that has ended."""
    always = (
        ("request_id", call.request_id),
        ("method", call.method),
        ("code", code),
        ("duration_s", call.age_s),
    )
    known: Fields = (
        ("reason", reason),
        ("characters", call.characters),
        ("text", call.text),
        ("first_audio_s", call.first_audio_s),
        ("audio_s", call.audio_s),
        ("underrun_s", call.underrun_s),
        ("prompt_tokens", call.prompt_tokens),
        ("output_tokens", call.output_tokens),
        ("warnings", call.warnings),
    )
    return (*always, *((name, value) for name, value in known if value))
