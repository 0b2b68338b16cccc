"""gRPC interceptor: access checks and receipt of request messages, before an RPC's method runs.

The messages of a call that is refused here are never read:

    headers ─▶ token ─▶ calls of this client ─▶ the message's bytes ─▶ the message ─▶ method

gRPC reads and parses the request of a unary method before it calls any handler. All methods are
therefore registered as request-streaming without a parser, and their messages are read here: in
a slot, with a timeout and a size limit. Once a message is requested, a client may send more than
HTTP/2's initial window of 64 KiB.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tts.config.server import ServerConfig
from tts.errors import InvalidRequestError, TTSError
from tts.server.access import AccessControl
from tts.server.call import CallTracker, client_of

SMALL_BYTES = 64 * 1024  # largest request of a method that carries neither audio nor long text
CARRIES_MUCH = frozenset(
    {
        "/tts.v1.SpeechService/Synthesize",
        "/tts.v1.SpeechService/SynthesizeStream",
        "/tts.v1.SpeechService/StreamingSynthesize",
        "/tts.v1.SpeechService/CreateVoice",
        "/tts.v1.TextService/Generate",
        "/tts.v1.TextService/GenerateStream",
        "/tts.v1.TextService/GenerateSpeech",
        "/tts.v1.TextService/Embed",
        "/nvidia.riva.tts.RivaSpeechSynthesis/Synthesize",
        "/nvidia.riva.tts.RivaSpeechSynthesis/SynthesizeOnline",
    }
)
HEALTH = "/grpc.health.v1.Health/"
UNCOUNTED = HEALTH + "Check"  # health checks of a load balancer are not limited

ADMIN_METHODS = frozenset(
    {"/tts.v1.SpeechService/CreateVoice", "/tts.v1.SpeechService/DeleteVoice"}
)

Requests = AsyncIterator[bytes]


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that checks every call; shared by all servers of a process, on one event loop."""

    def __init__(self, config: ServerConfig, access: AccessControl, calls: CallTracker) -> None:
        self._access, self._calls = access, calls
        self._timeout_s, self._idle_s = config.receive_timeout_s, config.idle_timeout_s

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
            with admitted(self._access, method, context):
                if handler.request_streaming:
                    async with aclosing(self._messages(handler, method, requests, client)) as read:
                        return await _answer(handler.stream_stream, read, context)
                async with self._access.slots.slot(client, self._timeout_s):
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
                async with self._access.slots.slot(client, self._idle_s):
                    message = await _next(handler, method, requests)
            else:
                message = await _next(handler, method, requests)
            if message is None:
                return
            yield message
            is_first = False


@contextmanager
def admitted(
    access: AccessControl, method: str, context: grpc.aio.ServicerContext
) -> Iterator[None]:
    """Count an open call of "/package.Service/Name" among those of its client.

    Raises UnauthenticatedError, ForbiddenError or StreamLimitError for one that is refused.
    """
    if access.needs_token and not method.startswith(HEALTH):
        authorization = _authorization(context.invocation_metadata() or ())
        access.check_token(authorization, is_admin_call=method in ADMIN_METHODS)
    client = client_of(context.peer())
    with nullcontext() if method == UNCOUNTED else access.counted(client):
        yield


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


def _authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the call's `authorization` metadata; "" when there is none."""
    return next((str(value) for key, value in metadata if key == "authorization"), "")
