"""Bearer tokens: who may call, and who may change the voices."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from tts.errors import ForbiddenError, TTSError, UnauthenticatedError

EXEMPT_SERVICES = ("/grpc.health.v1.Health/",)
ADMIN_METHODS = frozenset(
    {"/tts.v1.SpeechService/CreateVoice", "/tts.v1.SpeechService/DeleteVoice"}
)
HANDLER_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

Refuse = Callable[[grpc.aio.ServicerContext, str, TTSError], Awaitable[None]]
"""Ends a call with an error: (context, full method name, error)."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens a server accepts. Without `admin`, the user token may do everything."""

    user: str = ""
    admin: str = ""

    def __bool__(self) -> bool:
        return bool(self.user or self.admin)

    def check(self, method: str, presented: str | None) -> None:
        """Raise unless the presented bearer token may call the method ("/package.Service/Name").

        Compares in constant time, always against both tokens.
        """
        is_user, is_admin = (_matches(presented, token) for token in (self.user, self.admin))
        if not (is_user or is_admin):
            raise UnauthenticatedError("send 'authorization: Bearer TOKEN' with a valid token")
        if method in ADMIN_METHODS and self.admin and not is_admin:
            raise ForbiddenError("changing voices needs the admin token")


def _matches(presented: str | None, token: str) -> bool:
    return bool(token) and hmac.compare_digest((presented or "").encode(), token.encode())


def bearer_token(details: grpc.HandlerCallDetails) -> str | None:
    """The bearer token in a call's metadata."""
    for key, value in details.invocation_metadata or ():
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            return token.strip() if scheme.lower() == "bearer" else None
    return None


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Checks every call but health before its first message is read."""

    def __init__(self, tokens: Tokens, refuse: Refuse) -> None:
        self._tokens = tokens
        self._refuse = refuse

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The method's own handler, or one of the same shape that refuses."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(EXEMPT_SERVICES):
            return handler
        try:
            self._tokens.check(method, bearer_token(handler_call_details))
        except TTSError as error:
            return self._refusal(handler, method, error)
        return handler

    def _refusal(
        self, handler: grpc.RpcMethodHandler, method: str, error: TTSError
    ) -> grpc.RpcMethodHandler:
        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            await self._refuse(context, method, error)

        make = HANDLER_MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)]
        return make(
            refuse,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
