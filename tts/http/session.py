"""Calls over a WebSocket: checks and accounting around a handler, messages in and out.

token, origin ─▶ CallTracker ─▶ calls of this client ─▶ accept ─▶ first message ─▶ handler
                     a refusal is an HTTP response                 a disconnect cancels it
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.routing import WebSocketRoute
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from tts.errors import IdleTimeoutError, InvalidRequestError, TTSError
from tts.http.endpoint import SERVICE, Shared, check_origin
from tts.http.errors import HttpError, Names, error_of
from tts.server.access import AccessControl
from tts.server.call import REQUEST_ID_KEY, Call, CallError
from tts.server.context import ServerContext
from tts.server.status import RpcStatus

if TYPE_CHECKING:
    from tts.http.websocket import WebSocketConnection

SUBPROTOCOL = "sonant"
KEY_PREFIX = "openai-insecure-api-key."
"""Beginning of the subprotocol that has a token: browsers cannot set a header."""

INBOX_BYTES = 256 * 1024  # of messages that wait for the handler
MESSAGE_BYTES = 256  # that a message takes besides its text
FRAME_BYTES = 4096  # of a text message besides its text
BYTES_PER_CHARACTER = 12  # a character outside the BMP, escaped in JSON

CLOSE_CODES: Mapping[int, int] = {413: 1009, 429: 1013, 500: 1011, 503: 1013, 507: 1013}
"""Statuses of HTTP to closing codes of WebSockets; 1008 for all others."""

Handler = Callable[["Session"], Awaitable[None]]


def session_route(shared: Shared, path: str, handler: Handler, names: Names) -> WebSocketRoute:
    """Return the route of a handler; `names` are the names in JSON of fields in errors."""
    return WebSocketRoute(path, SessionEndpoint(shared, f"GET {path}", handler, names))


@dataclass(frozen=True, slots=True)
class SessionEndpoint:
    """ASGI application of one route."""

    shared: Shared
    method: str  # of the log and the metrics
    handler: Handler
    names: Names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one session; errors become responses, or events before the connection closes."""
        session = Session(self.shared.host, scope, receive, send)
        try:
            try:
                await self._serve(session)
            except CallError as error:
                await session.fail(error.status, self.names)
        except asyncio.CancelledError:  # the client has disconnected, or the server stops
            await session.break_off()

    async def _serve(self, session: Session) -> None:
        host, access, client = self.shared.host, self.shared.access, session.client
        refusal: Exception | None = None
        try:
            access.check_token(session.authorization, is_admin_call=False)
            check_origin(session.headers, host.config)
        except TTSError as error:
            refusal = error
        async with host.calls.track(
            SERVICE, self.method, client, session.send, session.headers.items(), refusal
        ) as call:
            session.call = call
            call.adopt_id(session.headers.get(REQUEST_ID_KEY, ""))
            with access.counted(client):
                await session.accept()
                await session.receive_first(access)
                async with session.cancelled_by_disconnect():
                    await self.handler(session)
                    await session.finish()


class Session:
    """One call over a WebSocket."""

    def __init__(self, host: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
        self.host = host
        self.headers = Headers(scope=scope)
        self.call: Call
        """The call; set before the handler runs."""
        self.first = ""
        """The first message; set before the handler runs."""
        self._protocols: list[str] = scope["subprotocols"]
        self._socket: WebSocketConnection = scope["state"]["socket"]
        self.client: str = scope["state"]["connection"].peer
        """Client as `client_of` names it."""
        self._receive, self._send = receive, send
        self._inbox: asyncio.Queue[str | None] = asyncio.Queue()  # None: a binary message
        self._num_held = 0  # bytes in the inbox
        self._has_room = asyncio.Event()
        self._is_accepted = self._takes_no_more = self._is_complete = False

    @property
    def authorization(self) -> str:
        """Return the value of the `authorization` header, or the same from a subprotocol."""
        keys = [name for name in self._protocols if name.startswith(KEY_PREFIX)]
        stated = f"Bearer {keys[0].removeprefix(KEY_PREFIX)}" if keys else ""
        return self.headers.get("authorization", stated)

    async def send(self, message: Message) -> None:
        """Send one ASGI message. Raises CancelledError when the client has disconnected."""
        if self._is_accepted and self._socket.close_sent:
            raise asyncio.CancelledError
        try:
            await self._send(message)
        except ClientDisconnected:
            raise asyncio.CancelledError from None

    async def accept(self) -> None:
        """Complete the opening handshake."""
        await self._receive()  # websocket.connect
        await self.send(
            {
                "type": "websocket.accept",
                "subprotocol": SUBPROTOCOL if SUBPROTOCOL in self._protocols else None,
                "headers": [(REQUEST_ID_KEY.encode(), self.call.request_id.encode())],
            }
        )
        self._is_accepted = True

    async def receive_first(self, access: AccessControl) -> None:
        """Receive the first message, a large one in a slot. Raises IdleTimeoutError."""
        config, socket = self.host.config, self._socket
        receiving = asyncio.ensure_future(self._receive())
        growing = asyncio.ensure_future(socket.is_large.wait())
        try:
            await asyncio.wait(
                (receiving, growing), timeout=config.idle_timeout_s, return_when=_ANY
            )
            if growing.done():
                async with access.slots.slot(self.client, config.receive_timeout_s):
                    socket.allow_large()
                    await asyncio.wait((receiving,))
            if not receiving.done():
                raise IdleTimeoutError(f"no config arrived for {config.idle_timeout_s:g} s")
            message = receiving.result()
        finally:
            receiving.cancel()
            growing.cancel()
        if message["type"] == "websocket.disconnect":
            raise asyncio.CancelledError
        self.first = _text(message) or ""
        socket.max_message_bytes = (
            BYTES_PER_CHARACTER * config.max_fragment_characters + FRAME_BYTES
        )
        socket.allow_large()

    @asynccontextmanager
    async def cancelled_by_disconnect(self) -> AsyncIterator[None]:
        """Receive messages meanwhile, and cancel the block when the client disconnects."""
        task = asyncio.current_task()
        assert task is not None
        reading = asyncio.create_task(self._read(task))
        try:
            yield
        finally:
            reading.cancel()

    async def messages(self) -> AsyncGenerator[str, None]:
        """Yield the text of the messages after the first, without an end.

        Raises InvalidRequestError for a binary message. What arrives after this is closed is lost.
        """
        try:
            while True:
                text = await self._inbox.get()
                self._num_held -= _size(text)
                self._has_room.set()
                if text is None:
                    raise InvalidRequestError.of("", "must be a text message with JSON")
                yield text
        finally:
            self._takes_no_more = True
            self._has_room.set()

    async def write(self, value: Mapping[str, Any]) -> None:
        """Send a JSON object. Raises SlowReaderError when the client reads nothing for long."""
        await self.call.write({"type": "websocket.send", "text": json.dumps(value)})

    async def write_bytes(self, data: bytes) -> None:
        """Send a binary message; raises as `write` does."""
        await self.call.write({"type": "websocket.send", "bytes": data})

    async def finish(self) -> None:
        """Close a session that has ended well."""
        self._is_complete = True
        await self.call.write({"type": "websocket.close", "code": 1000})

    async def fail(self, status: RpcStatus, names: Names) -> None:
        """Send an error and close: an HTTP response before the handshake, an event after it."""
        error = error_of(status, names)
        try:
            async with asyncio.timeout(self.host.config.slow_reader_timeout_s):
                await (self._fail(error) if self._is_accepted else self._refuse(error))
        except TimeoutError:
            await self.break_off()

    async def break_off(self) -> None:
        """Close the connection."""
        self._socket.close()
        while not self._socket.handshake_complete:
            await self._receive()

    async def _read(self, task: asyncio.Task[Any]) -> None:
        while (message := await self._receive())["type"] != "websocket.disconnect":
            text = _text(message)
            while self._num_held > INBOX_BYTES and not self._takes_no_more:
                self._has_room.clear()
                await self._has_room.wait()
            if not self._takes_no_more:
                self._num_held += _size(text)
                self._inbox.put_nowait(text)
        if not self._is_complete and not task.cancelling():
            task.cancel()

    async def _fail(self, error: HttpError) -> None:
        event = json.dumps({"type": "error", **error.value})
        await self.send({"type": "websocket.send", "text": event})
        code, reason = CLOSE_CODES.get(error.status, 1008), error.value["error"]["code"]
        await self.send({"type": "websocket.close", "code": code, "reason": reason})

    async def _refuse(self, error: HttpError) -> None:
        headers = {**error.headers, "content-length": str(len(error.body))}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        kind = "websocket.http.response"
        await self.send({"type": f"{kind}.start", "status": error.status, "headers": encoded})
        await self.send({"type": f"{kind}.body", "body": error.body})


_ANY = asyncio.FIRST_COMPLETED


def _text(message: Message) -> str | None:
    """Return the text of a message; None for a binary one."""
    text: str | None = message.get("text")
    return text


def _size(text: str | None) -> int:
    return MESSAGE_BYTES + 4 * len(text or "")
