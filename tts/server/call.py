"""The outermost context of every RPC: counts, logs, request ids, and statuses for errors.

    serve ─▶ gate (loading? draining?) ─▶ body ─▶ OK
                                           ├─ error ─▶ status table ─▶ abort with details
                                           └─ cancelled, deadline ─▶ passes through

Log lines hold ids, codes and numbers, and a user's text only where the configuration says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network
from typing import NoReturn
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

logger = logging.getLogger("tts.rpc")

REQUEST_ID_KEY = "x-request-id"
MAX_LOGGED_CHARACTERS = 1000
CLIENT_BITS = 64  # prefix of an IPv6 address: a provider assigns at least a /64 to a customer


class ServerState(Enum):
    """State of the server: whether it accepts new calls."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(slots=True)
class CallStats:
    """Statistics of one call for its log line, its trace and the metrics."""

    characters: int = 0
    text: str = ""  # beginning of the requested text, if text may be logged
    sample_rate: int = 0  # Hz of the audio sent
    audio_s: float = 0.0
    first_audio_s: float | None = None
    admission_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    warnings: int = 0


@dataclass(slots=True)
class RpcCall:
    """One running RPC."""

    context: grpc.aio.ServicerContext
    service: str
    method: str
    request_id: str
    write_timeout_s: float
    span: CallSpan | None
    logs_text: bool = False
    started: float = field(default_factory=time.monotonic)
    stats: CallStats = field(default_factory=CallStats)
    first_input: float | None = None
    """Time of the first text of a streaming call; its first-audio latency counts from here."""

    @property
    def age_s(self) -> float:
        """Return the seconds since the call arrived."""
        return time.monotonic() - self.started

    def note_text(self, text: str) -> None:
        """Count the characters of the text that the client requests."""
        stats = self.stats
        stats.characters += len(text)
        if self.logs_text:
            stats.text = (stats.text + text)[:MAX_LOGGED_CHARACTERS]

    def note_timings(self, queue_s: float | None, prefill_s: float | None) -> None:
        """Record the seconds in the engine's queue and until the first token.

        Calls that were open before their first text are skipped: these phases do not add up to
        their duration.
        """
        if self.first_input is None:
            self.stats.queue_s, self.stats.prefill_s = queue_s or 0.0, prefill_s or 0.0

    def adopt_id(self, request_id: str) -> None:
        """Use the client's request id if it is valid in log lines and metadata."""
        if REQUEST_ID.fullmatch(request_id):
            self.request_id = request_id
            logs.request_id.set(request_id)

    async def write(self, message: object) -> None:
        """Send one message; wait while the client does not read, up to the write timeout.

        Raises SlowReaderError when HTTP/2's windows stay full for the whole write timeout.
        """
        try:
            async with asyncio.timeout(self.write_timeout_s):
                await self.context.write(message)
        except TimeoutError:
            raise SlowReaderError(
                f"the client read nothing for {self.write_timeout_s:g} s; read faster or ask "
                "for less audio at once"
            ) from None


def client_of(peer: str) -> str:
    """Return the client at a peer as gRPC names it.

    A client is an address of IPv4 or the first 64 bits of one of IPv6: one machine has all the
    addresses that begin with them. All calls over Unix sockets are one client's.
    """
    kind, _, rest = peer.partition(":")
    return _client(kind, rest.rpartition(":")[0]) if kind in ("ipv4", "ipv6") else peer


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
    async def serve(
        self,
        context: grpc.aio.ServicerContext,
        service: str,
        method: str,
        refusal: Exception | None = None,
    ) -> AsyncIterator[RpcCall]:
        """Run one RPC's body; what it raises, or `refusal`, becomes the call's status."""
        request_id = uuid4().hex
        span = None
        if self.tracer is not None:
            span = self.tracer.start(service, method, context.invocation_metadata() or ())
        call = RpcCall(
            context, service, method, request_id, self._write_timeout_s, span, self._log_text
        )
        outer = logs.request_id.set(request_id)
        self.metrics.started.labels(service, method).inc()
        self.num_open += 1
        try:
            if refusal is not None:
                raise refusal
            if self.state is not ServerState.SERVING:
                self._refuse()
            yield call
        except asyncio.CancelledError:
            self._ended(call, _cancel_code(context))
            raise
        except grpc.aio.InternalError:  # the transport closed before the cancellation arrived
            self._ended(call, grpc.StatusCode.CANCELLED.name)
            raise asyncio.CancelledError from None
        except Exception as error:  # outermost handler: every other error becomes a status
            status = status_of(error, call.request_id)
            self._ended(call, status.code.name, status.reason, error)
            await _abort(call, status)
        else:
            context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
            self._ended(call, "OK")
        finally:
            logs.request_id.reset(outer)
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()

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
        self, call: RpcCall, code: str, reason: str = "", error: Exception | None = None
    ) -> None:
        metrics, stats = self.metrics, call.stats
        metrics.call_ended(call.service, call.method, code, call.age_s)
        if code != "OK":
            metrics.errors.labels(code, reason or code).inc()
        metrics.audio.inc(stats.audio_s)
        metrics.characters.inc(stats.characters)
        metrics.prompt_tokens.inc(stats.prompt_tokens)
        metrics.output_tokens.inc(stats.output_tokens)
        if stats.audio_s and code == "OK":
            metrics.real_time_factor.observe(call.age_s / stats.audio_s)
        fields = _fields(call, code, reason)
        logger.info("call ended", extra=with_fields(*fields))
        if call.span is not None:
            phases = Phases(stats.admission_s, stats.queue_s, stats.prefill_s)
            call.span.end(fields, phases)
        if code == grpc.StatusCode.INTERNAL.name:
            logger.error("the call failed", exc_info=error)


def _cancel_code(context: grpc.aio.ServicerContext) -> str:
    remaining = context.time_remaining()
    expired = remaining is not None and remaining <= 0
    return (grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED).name


async def _abort(call: RpcCall, status: RpcStatus) -> None:
    metadata = (
        (DETAILS_KEY, status.to_proto().SerializeToString()),
        (REQUEST_ID_KEY, call.request_id),
    )
    try:
        await call.context.abort(status.code, status.message, metadata)
    except grpc.aio.InternalError:  # the client has disconnected
        raise asyncio.CancelledError from None


def _fields(call: RpcCall, code: str, reason: str) -> Fields:
    """Return the log fields of a call that has ended."""
    stats = call.stats
    always = (
        ("request_id", call.request_id),
        ("method", call.method),
        ("code", code),
        ("duration_s", call.age_s),
    )
    known: Fields = (
        ("reason", reason),
        ("characters", stats.characters),
        ("text", stats.text),
        ("first_audio_s", stats.first_audio_s),
        ("audio_s", stats.audio_s),
        ("prompt_tokens", stats.prompt_tokens),
        ("output_tokens", stats.output_tokens),
        ("warnings", stats.warnings),
    )
    return (*always, *((name, value) for name, value in known if value))
