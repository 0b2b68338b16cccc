"""The top of every RPC: counts it, logs it, gives it a request id, turns errors into statuses.

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
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network
from urllib.parse import unquote
from uuid import uuid4

import grpc

from tts import logs
from tts.errors import DrainingError, LoadingError, SlowReaderError
from tts.logs import Fields, with_fields
from tts.metrics import Metrics
from tts.proto_checks import REQUEST_ID
from tts.status import DETAILS_KEY, RpcStatus, status_of
from tts.tracing import CallSpan, NoTracer, Phases, Tracer

logger = logging.getLogger("tts.rpc")

REQUEST_ID_KEY = "x-request-id"
MAX_LOGGED_CHARACTERS = 1000
CLIENT_BITS = 64  # of an IPv6 address: what a provider gives to one customer at least


class ServerState(Enum):
    """What the server does with new calls."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(slots=True)
class CallFacts:
    """What a call's log line and the metrics will say about it."""

    characters: int = 0
    text: str = ""  # the beginning of what was asked for, where it may be logged
    sample_rate: int = 0  # Hz of the audio sent
    audio_s: float = 0.0
    first_audio_s: float | None = None
    phases: Phases = field(default_factory=Phases)
    prompt_tokens: int = 0
    output_tokens: int = 0
    warnings: int = 0


@dataclass(slots=True)
class Call:
    """One RPC under way."""

    context: grpc.aio.ServicerContext
    service: str
    method: str
    request_id: str
    write_timeout_s: float
    span: CallSpan
    logs_text: bool = False
    started: float = field(default_factory=time.monotonic)
    facts: CallFacts = field(default_factory=CallFacts)
    _heard: float | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the call arrived."""
        return time.monotonic() - self.started

    @property
    def heard_ago_s(self) -> float:
        """Seconds since the first input to answer: the call itself, or what `note_heard` noted."""
        return time.monotonic() - (self.started if self._heard is None else self._heard)

    def note_heard(self) -> None:
        """Count the time to the first audio from now: the call was open before there was text."""
        self._heard = time.monotonic()

    def note_text(self, text: str) -> None:
        """Count what the client asks to be said or written."""
        facts = self.facts
        facts.characters += len(text)
        if self.logs_text:
            facts.text = (facts.text + text)[:MAX_LOGGED_CHARACTERS]

    def note_timings(self, queue_s: float, prefill_s: float) -> None:
        """Seconds in the engine's queue and until the first token. A call that was open before
        there was text is not made of these phases.
        """
        if self._heard is None:
            self.facts.phases = replace(self.facts.phases, queue_s=queue_s, prefill_s=prefill_s)

    def adopt_id(self, request_id: str) -> None:
        """Use the client's id when it can stand in a log line and in metadata."""
        if REQUEST_ID.fullmatch(request_id):
            self.request_id = request_id
            logs.request_id.set(request_id)

    @property
    def client(self) -> str:
        """Whose call it is; see `client_at`."""
        return client_of(self.context)

    async def write(self, message: object) -> None:
        """Send one message; waits while the client does not read, but not for ever.

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


def client_of(context: grpc.aio.ServicerContext) -> str:
    """Whose call it is; see `client_at`."""
    return client_at(context.peer())


def client_at(peer: str) -> str:
    """The client at a peer as gRPC names it: an address of IPv4, the first 64 bits of one of IPv6.

    One machine has all the addresses that begin with those bits. Whoever comes over Unix sockets
    is one client.
    """
    kind, _, rest = peer.partition(":")
    return _client(kind, rest.rpartition(":")[0]) if kind in ("ipv4", "ipv6") else peer


@lru_cache(maxsize=4096)
def _client(kind: str, address: str) -> str:
    if kind == "ipv4":
        return f"{kind}:{address}"
    own = IPv6Address(unquote(address).strip("[]").partition("%")[0])  # behind % is an interface
    if own.ipv4_mapped is not None:
        return f"ipv4:{own.ipv4_mapped}"
    return f"{kind}:{IPv6Network((own, CLIENT_BITS), strict=False)}"


class Calls:
    """Opens and closes the calls of one server."""

    def __init__(
        self,
        metrics: Metrics,
        write_timeout_s: float,
        log_text: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        self.state = ServerState.LOADING
        self.metrics = metrics
        self.tracer: Tracer = tracer or NoTracer()
        self._write_timeout_s = write_timeout_s
        self._log_text = log_text
        self._idle = asyncio.Event()
        self.num_open = 0
        """Calls under way, those that wait in the queue included."""

    @asynccontextmanager
    async def serve(
        self, context: grpc.aio.ServicerContext, service: str, method: str
    ) -> AsyncIterator[Call]:
        """Run one RPC's body; what it raises becomes the call's status."""
        async with self._served(context, service, method) as call:
            self._check_state()
            yield call

    @asynccontextmanager
    async def _served(
        self, context: grpc.aio.ServicerContext, service: str, method: str
    ) -> AsyncIterator[Call]:
        request_id = uuid4().hex
        span = self.tracer.start(service, method, context.invocation_metadata() or ())
        call = Call(
            context, service, method, request_id, self._write_timeout_s, span, self._log_text
        )
        outer = logs.request_id.set(request_id)
        self.metrics.started.labels(service, method).inc()
        self.num_open += 1
        try:
            yield call
        except asyncio.CancelledError:
            self._ended(call, _cancel_code(context))
            raise
        except grpc.aio.InternalError:  # the transport went away before the cancellation came
            self._ended(call, grpc.StatusCode.CANCELLED.name)
            raise asyncio.CancelledError from None
        except Exception as error:  # the RPC top: everything else is a status
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
        """Wait until no call is under way; False when some still are after that time."""
        deadline = time.monotonic() + timeout_s
        while self.num_open:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), deadline - time.monotonic())
            except TimeoutError:
                return False
        return True

    async def refuse(
        self, context: grpc.aio.ServicerContext, full_method: str, error: Exception
    ) -> None:
        """End a call that must not reach its method ("/package.Service/Method")."""
        service, _, method = full_method.strip("/").rpartition("/")
        async with self._served(context, service, method):
            raise error

    def _check_state(self) -> None:
        if self.state is ServerState.LOADING:
            raise LoadingError("the model is still loading; try again in a moment")
        if self.state is ServerState.DRAINING:
            raise DrainingError("the server is shutting down; ask another one")

    def _ended(
        self, call: Call, code: str, reason: str = "", error: Exception | None = None
    ) -> None:
        metrics, facts = self.metrics, call.facts
        metrics.call_ended(call.service, call.method, code, call.age_s)
        if code != "OK":
            metrics.errors.labels(code, reason or code).inc()
        metrics.audio.inc(facts.audio_s)
        metrics.characters.inc(facts.characters)
        metrics.prompt_tokens.inc(facts.prompt_tokens)
        metrics.output_tokens.inc(facts.output_tokens)
        if facts.audio_s and code == "OK":
            metrics.real_time_factor.observe(call.age_s / facts.audio_s)
        fields = _fields(call, code, reason)
        logger.info("call ended", extra=with_fields(*fields))
        call.span.end(fields, facts.phases)
        if code == grpc.StatusCode.INTERNAL.name:
            logger.error("the call failed", exc_info=error)


def _cancel_code(context: grpc.aio.ServicerContext) -> str:
    remaining = context.time_remaining()
    expired = remaining is not None and remaining <= 0
    return (grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED).name


async def _abort(call: Call, status: RpcStatus) -> None:
    metadata = (
        (DETAILS_KEY, status.to_proto().SerializeToString()),
        (REQUEST_ID_KEY, call.request_id),
    )
    try:
        await call.context.abort(status.code, status.message, metadata)
    except grpc.aio.InternalError:  # nobody is there to be told
        raise asyncio.CancelledError from None


def _fields(call: Call, code: str, reason: str) -> Fields:
    """What there is to say about a call that ended, without what there is not."""
    facts = call.facts
    always = (
        ("request_id", call.request_id),
        ("method", call.method),
        ("code", code),
        ("duration_s", call.age_s),
    )
    known: Fields = (
        ("reason", reason),
        ("characters", facts.characters),
        ("text", facts.text),
        ("first_audio_s", facts.first_audio_s),
        ("audio_s", facts.audio_s),
        ("prompt_tokens", facts.prompt_tokens),
        ("output_tokens", facts.output_tokens),
        ("warnings", facts.warnings),
    )
    return (*always, *((name, value) for name, value in known if value))
