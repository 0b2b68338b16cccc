"""Registration of our services in the gRPC proxy of Ray Serve (`grpc_servicer_functions`).

The generated functions register them, too. With these, a client gets the statuses of `tts.serve`:
what Serve itself reports (a lost replica, no replica, a full queue) has our codes and details
instead of its text, and the empty response that carries a failure is left out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc

from tts.errors import EngineLostError, ServerBusyError, TTSError, UnavailableError
from tts.server.status import DETAILS_KEY, RETRY_UNAVAILABLE_S, status_of
from tts.v1 import speech_pb2_grpc, text_pb2_grpc

Context: TypeAlias = grpc.aio.ServicerContext
Handlers: TypeAlias = Mapping[str, grpc.RpcMethodHandler]

ERRORS: Mapping[grpc.StatusCode, TTSError] = MappingProxyType(
    {
        # What replicas report themselves has details, also when it is INTERNAL.
        grpc.StatusCode.INTERNAL: EngineLostError("the replica was lost; try again"),
        grpc.StatusCode.UNAVAILABLE: UnavailableError("no replica is there; try again"),
        grpc.StatusCode.RESOURCE_EXHAUSTED: ServerBusyError(
            "too many calls wait for replicas; try again later",
            subject="server",
            retry_after_s=RETRY_UNAVAILABLE_S,
        ),
    }
)
"""Errors for the codes that Serve itself sets."""


def add_speech_service(servicer: object, server: grpc.aio.Server) -> None:
    """Register SpeechService."""
    speech_pb2_grpc.add_SpeechServiceServicer_to_server(servicer, _Registration(server))


def add_text_service(servicer: object, server: grpc.aio.Server) -> None:
    """Register TextService."""
    text_pb2_grpc.add_TextServiceServicer_to_server(servicer, _Registration(server))


class _Registration:
    """Server interface for generated code."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(tuple(map(_Service, handlers)))

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Do nothing: methods are found by name among the generic handlers."""


class _Service(grpc.GenericRpcHandler):
    """Handlers of a service. Serve replaces those in `_method_handlers` by calls of replicas."""

    def __init__(self, handlers: Any) -> None:
        self._handlers = handlers

    @property
    def _method_handlers(self) -> Handlers:
        return self._handlers._method_handlers

    @_method_handlers.setter
    def _method_handlers(self, handlers: Handlers) -> None:
        self._handlers._method_handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call; None for an unknown method."""
        handler = self._handlers.service(handler_call_details)
        return handler and handler._replace(
            unary_unary=_unary(handler.unary_unary),
            unary_stream=_streamed(handler.unary_stream),
            stream_stream=_streamed(handler.stream_stream),
        )


def _unary(method: Callable[..., Awaitable[bytes]]) -> Callable[..., Awaitable[bytes]]:
    async def call(request: object, context: Context) -> bytes:
        response = await method(request, context)
        _complete(context)
        return response

    return call


def _streamed(method: Callable[..., AsyncIterator[bytes]]) -> Callable[..., AsyncIterator[bytes]]:
    async def call(request: object, context: Context) -> AsyncIterator[bytes]:
        async with aclosing(method(request, context)) as responses:  # type: ignore[type-var]
            async for response in responses:
                if response:
                    yield response
        _complete(context)

    return call


def _complete(context: Context) -> None:
    """Replace a status that Serve has made itself by ours."""
    error, metadata = ERRORS.get(context.code()), tuple(context.trailing_metadata())
    if error is None or any(key == DETAILS_KEY for key, _ in metadata):
        return
    status = status_of(error)
    context.set_code(status.code)
    context.set_details(status.message)
    details = (DETAILS_KEY, status.to_proto().SerializeToString())
    context.set_trailing_metadata((*metadata, details))
