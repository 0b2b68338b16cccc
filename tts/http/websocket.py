"""WebSocket connections with bounds on what a client can make the server hold.

uvicorn parses whatever has arrived. Here bytes wait unparsed, and the socket unread, until the
application asks for a message:

    bytes ─▶ up to one read (256 KiB) waits ─▶ SLICE_BYTES at once ─▶ messages for `receive`
             the socket is not read           while one is asked for

one message          `max_message_bytes` with its headers and fragments; MAX_FRAGMENTS
a first large one    SMALL_BYTES of it, until `allow_large`
pings                answered while the client reads
a client that is gone    PING_S + PING_TIMEOUT_S
the closing handshake    CLOSING_S; LINGER_S after a fault of the client
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn._types import ASGIReceiveEvent
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame

if TYPE_CHECKING:
    from tts.http.connection import Connection

PING_S = PING_TIMEOUT_S = 20.0
CLOSING_S = 10.0  # to read the last audio
LINGER_S = 2.0
SLICE_BYTES = 8 * 1024  # at most 1,200 messages
SMALL_BYTES = 16 * 1024
MAX_FRAGMENTS = 1024


class WebSocketConnection(WebSocketsSansIOProtocol):
    """WebSocket connection; `scope["state"]["socket"]` of its session."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        super().__init__(config, server_state, {**app_state, "socket": self})
        self.close_timeout = CLOSING_S
        self._http: Connection = app_state["connection"]
        self._unread = bytearray()
        self._num_bytes = 0  # of the message that is arriving
        self._wants_message = False
        self._small_bytes = SMALL_BYTES
        self.max_message_bytes = config.ws_max_size
        """Most bytes of a message."""
        self.is_large = asyncio.Event()
        """Set when a message has more than SMALL_BYTES; its rest waits for `allow_large`."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End the session, and count the connection as closed."""
        self._http.release()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client; the first are the head of its request."""
        if not self.handshake_initiated:
            if not self.transport.is_closing():
                self._begin(data)
            return
        self._unread += data
        self._parse()

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next ASGI message; bytes of the client are parsed while this waits."""
        if self.queue.empty():
            self._wants_message = True
            self._parse()
        return await self.queue.get()

    def allow_large(self) -> None:
        """Parse messages of up to `max_message_bytes`."""
        self._small_bytes = self.max_message_bytes + SLICE_BYTES
        self.is_large.clear()
        self._parse()

    def close(self) -> None:
        """Close the connection without a closing handshake."""
        self.transport.close()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """End the connection after its session."""
        super().on_task_complete(task)
        self._parse()
        self.loop.call_later(CLOSING_S, self.transport.abort)

    def handle_cont(self, event: Frame) -> None:
        """Add a fragment to its message."""
        if len(self.frames) >= MAX_FRAGMENTS:
            self._fail(CloseCode.POLICY_VIOLATION, f"more than {MAX_FRAGMENTS} fragments")
        else:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """Hand a whole message to the session."""
        data = b"".join(self.frames)
        self.frames, self._num_bytes = [], 0
        if self.close_sent:
            return
        self._wants_message = False
        if self.curr_msg_data_type == "bytes":
            self.queue.put_nowait({"type": "websocket.receive", "bytes": data})
            return
        try:
            self.queue.put_nowait({"type": "websocket.receive", "text": data.decode()})
        except UnicodeDecodeError:
            self._fail(CloseCode.INVALID_DATA, "the text is not UTF-8")

    def handle_ping(self) -> None:
        """Answer a ping, unless the client reads nothing."""
        self._note_control_frame()
        if self.writable.is_set() and not self.transport.is_closing():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def handle_pong(self, event: Frame) -> None:
        """Take the answer to a ping."""
        self._note_control_frame()
        super().handle_pong(event)

    def handle_parser_exception(self) -> None:
        """Close after an error of the client, which may still send: it reads the reason first."""
        if self.close_sent:
            return
        closing = self.conn.close_sent
        assert closing is not None
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": closing.code, "reason": closing.reason}
        )
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def keepalive_timeout(self) -> None:
        """End the connection of a client that is gone."""
        if self._unread:  # its pong may be there, unparsed
            self.pong_timer = None
            self.schedule_ping()
        else:
            self.transport.abort()

    def _begin(self, head: bytes) -> None:
        super().data_received(head)
        if not self.handshake_initiated:  # the library has refused it, without a response
            self._http.refuse()

    def _parse(self) -> None:
        """Parse waiting bytes while a message is wanted; read the socket if none is left."""
        while self._unread and (self.close_sent or self._may_parse):
            part = bytes(self._unread[:SLICE_BYTES])
            del self._unread[:SLICE_BYTES]
            if self.transport.is_closing():
                continue
            self._num_bytes += len(part)
            super().data_received(part)
            if self._num_bytes > self.max_message_bytes + SLICE_BYTES:
                self._fail(CloseCode.MESSAGE_TOO_BIG, f"more than {self.max_message_bytes} bytes")
            elif self._num_bytes > self._small_bytes:
                self.is_large.set()
        if self.transport.is_closing():
            return
        if self._unread:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    @property
    def _may_parse(self) -> bool:
        return self._wants_message and not self.is_large.is_set()

    def _note_control_frame(self) -> None:
        if not self.frames:
            self._num_bytes = 0

    def _fail(self, code: CloseCode, reason: str) -> None:
        if self.conn.close_sent is None:
            self.conn.fail(code, reason)
            self.handle_parser_exception()
