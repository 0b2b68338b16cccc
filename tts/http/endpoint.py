"""Endpoints: checks and accounting of every call around the handler of a route.

token, origin ─▶ CallTracker ─▶ calls of this client ─▶ body, in a slot ─▶ handler
                                                        a disconnect cancels it
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from types import MappingProxyType
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tts.config.server import ServerConfig
from tts.errors import ForbiddenError, TTSError
from tts.http.errors import Names
from tts.http.exchange import Exchange
from tts.server.access import AccessControl
from tts.server.call import REQUEST_ID_KEY, CallError
from tts.server.context import ServerContext

SERVICE = "http"
NO_NAMES: Names = MappingProxyType({})

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts of the server that all endpoints use."""

    host: ServerContext
    access: AccessControl

    def route(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        has_body: bool = False,
        is_admin: bool = False,
        names: Names = NO_NAMES,
    ) -> Route:
        """Return the route of a handler.

        `is_admin` calls need the admin token; `names` are the names in JSON of fields in errors.
        """
        endpoint = Endpoint(self, f"{method} {path}", handler, has_body, is_admin, names)
        return Route(path, endpoint, methods=[method])


@dataclass(frozen=True, slots=True)
class Endpoint:
    """ASGI application of one route."""

    shared: Shared
    method: str  # of the log and the metrics
    handler: Handler
    has_body: bool
    is_admin: bool
    names: Names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; errors become responses."""
        exchange = Exchange(self.shared.host, scope, receive, send)
        try:
            try:
                await self._serve(exchange)
            except CallError as error:
                await exchange.fail(error.status, self.names)
        except asyncio.CancelledError:  # the client has disconnected, or the server stops
            await exchange.break_off()

    async def _serve(self, exchange: Exchange) -> None:
        host, access, client = self.shared.host, self.shared.access, exchange.connection.peer
        headers = exchange.request.headers
        refusal: Exception | None = None
        try:
            access.check_token(headers.get("authorization", ""), is_admin_call=self.is_admin)
            if exchange.request.method not in ("GET", "HEAD"):
                check_origin(headers, self.shared.host.config)
        except TTSError as error:
            refusal = error
        async with host.calls.track(
            SERVICE, self.method, client, exchange.send, headers.items(), refusal
        ) as call:
            exchange.call = call
            call.adopt_id(headers.get(REQUEST_ID_KEY, ""))
            exchange.headers[REQUEST_ID_KEY] = call.request_id
            with access.counted(client):
                if self.has_body:
                    timeout_s = host.config.receive_timeout_s
                    async with access.slots.slot(client, timeout_s):
                        await exchange.receive_body(host.config.max_message_bytes)
                async with exchange.cancelled_by_disconnect():
                    await self.handler(exchange)


def check_origin(headers: Headers, config: ServerConfig) -> None:
    """Raise ForbiddenError for a web page of another origin: browsers ask no server before."""
    if not is_allowed_origin(headers, config):
        raise ForbiddenError("web pages of this origin may not call; see http_cors_origins")


def is_allowed_origin(headers: Mapping[str, str], config: ServerConfig) -> bool:
    """Return whether a request comes from no web page, from our own, or from an allowed origin.

    Any name can be made to lead to the loopback interface: a page of evil.example has the same host
    as its requests once the name's address is 127.0.0.1. There only loopback names are ours.
    """
    origin = headers.get("origin")
    if origin is None or {"*", origin} & set(config.http_cors_origins):
        return True
    try:
        page = urlsplit(origin)
    except ValueError:
        return False
    if page.netloc != headers.get("host"):
        return False
    is_private = config.tls_cert is None and _is_loopback(config.host)
    return not is_private or _is_loopback(page.hostname or "")


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
