"""What every RPC passes before its method runs. A call that is refused here is never read.

    headers ─▶ token ─▶ calls of this client ─▶ the message's bytes ─▶ the message ─▶ method

gRPC reads and parses the request of a unary method before it calls anything. So all methods are
served as ones that stream requests in, without a parser, and what comes is read here: in a place
of the intake, within a time, up to a size.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tts.auth import Tokens, bearer_token
from tts.config import ServerConfig
from tts.errors import InvalidRequestError, StreamLimitError, TTSError
from tts.intake import Intake
from tts.rpc import Calls, client_of

RECEIVING_BYTES = 128 * 2**20  # memory for messages that are being received
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
UNCOUNTED = HEALTH + "Check"  # a balancer's question is answered however many calls it has open

Requests = AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class _Door:
    """One call at the gate."""

    handler: grpc.RpcMethodHandler
    method: str  # "/package.Service/Name"
    token: str | None = field(repr=False)


class Gate(grpc.aio.ServerInterceptor):
    """Checks every call; one for all servers of a process. One event loop."""

    def __init__(self, config: ServerConfig, calls: Calls) -> None:
        self._tokens = Tokens(config.auth_token, config.admin_token)
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
        """The method's handler behind the gate; None for a method that does not exist."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        door = _Door(handler, handler_call_details.method, bearer_token(handler_call_details))
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(partial(self._pass, door), response_serializer=handler.response_serializer)

    async def _pass(
        self, door: _Door, requests: Requests, context: grpc.aio.ServicerContext
    ) -> object:
        """Serve one call: the response of a method that has one."""
        try:
            if self._tokens and not door.method.startswith(HEALTH):
                self._tokens.check(door.method, door.token)
            with self._counted(door.method, client_of(context)):
                return await self._served(door, requests, context)
        except TTSError as error:  # a method's own errors are statuses by then
            await self._calls.refuse(context, door.method, error)
            return None

    async def _served(
        self, door: _Door, requests: Requests, context: grpc.aio.ServicerContext
    ) -> object:
        handler, client = door.handler, client_of(context)
        if handler.request_streaming:
            async with aclosing(self._messages(door, requests, client)) as messages:
                return await _answer(handler.stream_stream, messages, context)
        async with self._intake.place(client, self._timeout_s):
            request = await _next(door, requests)
        if request is None:
            raise InvalidRequestError.of("", "the call has no request message; send one")
        method = handler.unary_stream if handler.response_streaming else handler.unary_unary
        return await _answer(method, request, context)

    async def _messages(
        self, door: _Door, requests: Requests, client: str
    ) -> AsyncGenerator[object, None]:
        """Parsed messages. The first has a place and a time; a method that carries much waits for
        the others as it likes, as it holds a place among the calls that run.
        """
        is_first = True
        while True:
            if is_first or door.method not in CARRIES_MUCH:
                async with self._intake.place(client, self._idle_s):
                    message = await _next(door, requests)
            else:
                message = await _next(door, requests)
            if message is None:
                return
            yield message
            is_first = False

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


async def _next(door: _Door, requests: Requests) -> object | None:
    """The next message; None when the client has closed its side.

    Raises InvalidRequestError for bytes that are no message, or too many.
    """
    data = await anext(requests, None)
    if data is None:
        return None
    if door.method not in CARRIES_MUCH and len(data) > SMALL_BYTES:
        raise InvalidRequestError.of(
            "", f"the message has {len(data)} bytes; this method takes at most {SMALL_BYTES}"
        )
    try:
        message: object = door.handler.request_deserializer(data)
    except DecodeError:
        raise InvalidRequestError.of(
            "", "the message is not one of this method's type; compare the versions of the contract"
        ) from None
    return message


async def _answer(
    method: Callable[..., Any], request: object, context: grpc.aio.ServicerContext
) -> object:
    """Run a method, whichever of gRPC's ways to write responses it uses."""
    answer = method(request, context)
    if not inspect.isasyncgen(answer):
        return await answer
    async with aclosing(answer):
        async for response in answer:
            await context.write(response)
    return None
