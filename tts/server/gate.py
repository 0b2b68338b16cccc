"""Access checks and intake of request messages, before an RPC's method runs.

The messages of a call that is refused here are never read:

    headers ─▶ token ─▶ calls of this client ─▶ the message's bytes ─▶ the message ─▶ method

gRPC reads and parses the request of a unary method before it calls any handler. All methods are
therefore registered as request-streaming without a parser, and their messages are read here: in
a slot of the intake, with a timeout and a size limit.

gRPC's core buffers the beginning of a message until the rest has arrived, however slowly. Once the
message is requested, a client may send more than HTTP/2's initial window of 64 KiB. A message is
therefore requested only in one of a few slots, which bounds the memory of partial messages:

    slot ─▶ one is free ─▶ receive ─▶ release: to the waiting client that holds the fewest
                │                     slots; among equals, the one served least recently
                │ no, and none becomes free in time
                ▼
            the message of the client that holds the most slots is aborted, if it is late
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tts.config.server import ServerConfig
from tts.errors import (
    ForbiddenError,
    IdleTimeoutError,
    InvalidRequestError,
    StreamLimitError,
    TTSError,
    UnauthenticatedError,
)
from tts.server.call import CallTracker, client_of

RECEIVING_BYTES = 128 * 2**20  # memory for messages in flight
SMALL_BYTES = 64 * 1024  # largest request of a method that carries neither audio nor long text
RETRY_S = 1.0
CARRIES_MUCH = frozenset(
    {
        "/tts.v1.SpeechService/Synthesize",
        "/tts.v1.SpeechService/SynthesizeStream",
        "/tts.v1.SpeechService/StreamingSynthesize",
        "/tts.v1.SpeechService/CreateVoice",
        "/tts.v1.TextService/Generate",
        "/tts.v1.TextService/GenerateStream",
        "/tts.v1.TextService/Embed",
    }
)
HEALTH = "/grpc.health.v1.Health/"
UNCOUNTED = HEALTH + "Check"  # health checks of a load balancer are not limited

ADMIN_METHODS = frozenset(
    {"/tts.v1.SpeechService/CreateVoice", "/tts.v1.SpeechService/DeleteVoice"}
)
PATIENCE_S = 1.0  # a message that takes no longer is never aborted
OWN_PATIENCE_S = 5.0  # the same, in favour of a client that holds as many slots

Requests = AsyncIterator[bytes]


class Gate(grpc.aio.ServerInterceptor):
    """Interceptor that checks every call; shared by all servers of a process, on one event loop."""

    def __init__(self, config: ServerConfig, calls: CallTracker) -> None:
        self._user_token, self._admin_token = config.auth_token, config.admin_token
        self._has_tokens = not (self._user_token is None and self._admin_token is None)
        self._calls = calls
        self._most_calls = config.max_streams_per_client
        self._open: Counter[str] = Counter()
        self._intake = Intake(max(1, RECEIVING_BYTES // config.max_message_bytes))
        self._timeout_s, self._idle_s = config.receive_timeout_s, config.idle_timeout_s

    def __repr__(self) -> str:
        return f"Gate(calls={self._open.total()}, {self._intake!r})"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Return the method's handler wrapped in the checks; None for an unknown method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        served = partial(self._pass, handler, handler_call_details.method)
        return make(served, response_serializer=handler.response_serializer)

    async def _pass(
        self,
        handler: grpc.RpcMethodHandler,
        method: str,  # "/package.Service/Name"
        requests: Requests,
        context: grpc.aio.ServicerContext,
    ) -> object:
        """Serve one call; return the response of a method with a single response."""
        client = client_of(context.peer())
        try:
            if self._has_tokens and not method.startswith(HEALTH):
                self._check_token(method, context)
            with self._counted(method, client):
                if handler.request_streaming:
                    async with aclosing(self._messages(handler, method, requests, client)) as read:
                        return await _answer(handler.stream_stream, read, context)
                async with self._intake.slot(client, self._timeout_s):
                    request = await _next(handler, method, requests)
                if request is None:
                    raise InvalidRequestError.of("", "the call has no request message; send one")
                serve = handler.unary_stream if handler.response_streaming else handler.unary_unary
                return await _answer(serve, request, context)
        except TTSError as error:  # errors of the method itself are already statuses
            service, _, name = method.strip("/").rpartition("/")
            async with self._calls.serve(context, service, name, refusal=error):
                return None

    async def _messages(
        self, handler: grpc.RpcMethodHandler, method: str, requests: Requests, client: str
    ) -> AsyncGenerator[object, None]:
        """Yield parsed messages.

        The first is received in a slot and with a timeout. A method for large requests waits for
        the later ones without either, because its call was admitted by then.
        """
        is_first = True
        while True:
            if is_first or method not in CARRIES_MUCH:
                async with self._intake.slot(client, self._idle_s):
                    message = await _next(handler, method, requests)
            else:
                message = await _next(handler, method, requests)
            if message is None:
                return
            yield message
            is_first = False

    def _check_token(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Raise unless the call's bearer token may call the method.

        Compares in constant time, always with both tokens. Without an admin token the user token
        allows every method.
        """
        presented = bearer_token(context.invocation_metadata() or ())
        is_user, is_admin = (
            token is not None and hmac.compare_digest(presented.encode(), token.encode())
            for token in (self._user_token, self._admin_token)
        )
        if not (is_user or is_admin):
            raise UnauthenticatedError("send 'authorization: Bearer TOKEN' with a valid token")
        if method in ADMIN_METHODS and self._admin_token and not is_admin:
            raise ForbiddenError("changing voices needs the admin token")

    @contextmanager
    def _counted(self, method: str, client: str) -> Iterator[None]:
        """Count an open call of a client. Raises StreamLimitError when it has too many."""
        if method == UNCOUNTED:
            yield
            return
        if self._open[client] >= self._most_calls:
            raise StreamLimitError(
                f"this client has {self._most_calls} calls open, which is the limit; "
                "close one first",
                subject="client",
                retry_after_s=RETRY_S,
            )
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]


async def _next(handler: grpc.RpcMethodHandler, method: str, requests: Requests) -> object | None:
    """Return the next message; None after the client has closed its side.

    Raises InvalidRequestError for a message that is malformed or too large.
    """
    data = await anext(requests, None)
    if data is None:
        return None
    if method not in CARRIES_MUCH and len(data) > SMALL_BYTES:
        raise InvalidRequestError.of(
            "", f"the message has {len(data)} bytes; this method takes at most {SMALL_BYTES}"
        )
    try:
        message: object = handler.request_deserializer(data)
    except DecodeError:
        raise InvalidRequestError.of(
            "", "the message is not of this method's type; compare the versions of the proto files"
        ) from None
    return message


async def _answer(
    method: Callable[..., Any], request: object, context: grpc.aio.ServicerContext
) -> object:
    """Run a method: a coroutine, a generator, or one that writes its responses."""
    answer = method(request, context)
    if not inspect.isasyncgen(answer):
        return await answer
    async with aclosing(answer):
        async for response in answer:
            await context.write(response)
    return None


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the bearer token in a call's metadata; "" when there is none."""
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            return token.strip() if scheme.lower() == "bearer" else ""
    return ""


@dataclass(eq=False, slots=True)
class _Slot:
    """Slot of one message, taken or waited for."""

    client: str
    limit: asyncio.Timeout
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    since_s: float = 0.0


class Intake:
    """Fair scheduler of slots among clients. One event loop."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: list[_Slot] = []
        self._taken: list[_Slot] = []  # oldest first
        self._turns: dict[str, float] = {}  # time of the last slot of each present client

    def __repr__(self) -> str:
        return f"Intake(taken={len(self._taken)}, waiting={len(self._waiting)})"

    @asynccontextmanager
    async def slot(self, client: str, timeout_s: float) -> AsyncIterator[None]:
        """Hold a slot while the body receives a message; wait for a free slot first.

        Raises IdleTimeoutError when waiting and receiving take longer than the timeout, or when
        the message is late and other clients wait for the slot.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                slot = _Slot(client, limit)
                try:
                    await self._take(slot)
                    yield
                finally:
                    self._leave(slot)
        except TimeoutError:
            raise IdleTimeoutError(
                f"the message was not there within {timeout_s:g} s, or took too long while "
                "others waited; send it at once"
            ) from None

    def check_integrity(self) -> None:
        """Raise AssertionError if slots were lost, or one is free while a message waits."""
        assert self._num_free >= 0, self
        assert not (self._num_free and self._waiting), self
        clients = {slot.client for slot in (*self._waiting, *self._taken)}
        assert self._turns.keys() <= clients, self

    async def _take(self, slot: _Slot) -> None:
        self._waiting.append(slot)
        self._hand_out()
        while not slot.taken.is_set():
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await slot.taken.wait()
            except TimeoutError:
                self._give_up_for(slot)

    def _leave(self, slot: _Slot) -> None:
        if slot in self._waiting:
            self._waiting.remove(slot)
        elif slot in self._taken:
            self._taken.remove(slot)
            self._num_free += 1
            self._hand_out()
        if all(slot.client != other.client for other in (*self._waiting, *self._taken)):
            self._turns.pop(slot.client, None)

    def _hand_out(self) -> None:
        while self._num_free and self._waiting:
            held = Counter(slot.client for slot in self._taken)
            turns = self._turns
            slot = min(self._waiting, key=lambda p: (held[p.client], turns.get(p.client, 0.0)))
            self._waiting.remove(slot)
            self._taken.append(slot)
            self._num_free -= 1
            slot.since_s = turns[slot.client] = time.monotonic()
            slot.taken.set()

    def _give_up_for(self, waiting: _Slot) -> None:
        """Abort a late message, so that a waiting one can be received."""
        held, now_s = Counter(slot.client for slot in self._taken), time.monotonic()
        own = held[waiting.client]

        def is_late(slot: _Slot) -> bool:
            patience_s = PATIENCE_S if held[slot.client] > own else OWN_PATIENCE_S
            return now_s - slot.since_s > patience_s and not slot.limit.expired()

        late = [slot for slot in self._taken if is_late(slot)]
        if late:
            largest = max(late, key=lambda slot: held[slot.client])
            largest.limit.reschedule(asyncio.get_running_loop().time())
