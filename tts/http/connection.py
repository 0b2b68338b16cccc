"""HTTP/1.1 connections with bounds on their number and on the time that a client may take.

request head    receive_timeout_s from its first byte, or from the start of the connection
request body    the endpoint receives it in a slot, with the same timeout
rest of a body that was not read    LINGER_S after the response
response        a client that leaves it unread: UNREAD_FACTOR times slow_reader_timeout_s
idle            KEEP_ALIVE_S
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from enum import Enum, auto
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from tts.config.server import ServerConfig
from tts.http.errors import http_error, raw_response, retry_headers
from tts.server.call import client_of

MAX_HEAD_BYTES = 16 * 1024
KEEP_ALIVE_S = 75
LINGER_S = 2.0  # a client that sends a refused body can read the response meanwhile
MAX_CONNECTIONS = 4096
CONNECTIONS_PER_CALL = 4  # of one client, for each call that it may have open
CLOSE_S = 1.0  # to deliver the last bytes of a connection that closes
UNREAD_FACTOR = 2  # a call notices a slow reader first, and may send an error
MAX_CHUNKS = 16_384  # of one body: parsing a chunk takes six microseconds, however small it is

_BAD_REQUEST = raw_response(http_error(400, "this is not an HTTP/1.1 request"))
_TOO_LATE = raw_response(http_error(408, "the request was not there in time; send it at once"))
_TOO_MANY = raw_response(
    http_error(
        429,
        "too many connections; close some, or use one for several requests",
        kind="rate_limit_error",
        code="connection_limit",
        headers=retry_headers(1.0),
    )
)


class ConnectionLimits:
    """Numbers of open connections of one server, in all and for each client."""

    def __init__(self, config: ServerConfig) -> None:
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(MAX_CONNECTIONS, num_files // 2)
        self._most_per_client = CONNECTIONS_PER_CALL * config.max_streams_per_client
        self._open: Counter[str] = Counter()
        self.receive_timeout_s = config.receive_timeout_s
        self.unread_timeout_s = UNREAD_FACTOR * config.slow_reader_timeout_s

    def __repr__(self) -> str:
        return f"ConnectionLimits(open={self._open.total()})"

    @property
    def num_open(self) -> int:
        """Number of connections that count."""
        return self._open.total()

    def take(self, client: str) -> bool:
        """Count a connection; return False, without counting it, if there are too many."""
        if self.num_open >= self._most or self._open[client] >= self._most_per_client:
            return False
        self._open[client] += 1
        return True

    def release(self, client: str) -> None:
        """Count a connection as closed."""
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]


class _Parser(h11.Connection):
    """Parser of a client's requests, with a bound on the chunks of a body."""

    _num_chunks = 0

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            if self._num_chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError(f"more than {MAX_CHUNKS} chunks")
        return event


class _Phase(Enum):
    """Phase of a connection: what its client sends."""

    HEAD = auto()  # sends the head of a request, or nothing
    BUSY = auto()  # its request is being served
    REST = auto()  # sends the rest of a body after its response


class Connection(H11Protocol):
    """HTTP/1.1 connection; `scope["state"]["connection"]` of its requests."""

    def __init__(self, config: Config, state: ServerState, limits: ConnectionLimits) -> None:
        super().__init__(config, state, {"connection": self})
        self.conn = _Parser(h11.SERVER, MAX_HEAD_BYTES)
        self._limits = limits
        self._is_counted = False
        self._is_upgraded = False
        self._phase = _Phase.HEAD
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self.peer = ""
        """Client as `client_of` names it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or refuse it beyond the limits."""
        super().connection_made(transport)
        self.peer = client_of(_peer(self.client))
        self._is_counted = self._limits.take(self.peer)
        if self._is_counted:
            self._set_timer(self._limits.receive_timeout_s, _TOO_LATE)
        else:
            self.close(_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that is being served."""
        self._clear_timer()
        self._clear_unread_timer()
        self._unset_keepalive_if_required()
        self.release()
        super().connection_lost(exc)

    def release(self) -> None:
        """Count the connection as closed."""
        if self._is_counted:
            self._is_counted = False
            self._limits.release(self.peer)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to a `WebSocketConnection`, which releases it."""
        if self.flow.write_paused:  # the session would not be notified
            self.close()
            return
        self._clear_timer()
        self._is_upgraded = True
        super().handle_websocket_upgrade(event)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client; the head of a request must be complete in time."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._follow()

    def eof_received(self) -> None:
        """Close the connection of a client that has closed its side."""
        self.close()

    def pause_writing(self) -> None:
        """Give the client some time to read what waits for it."""
        super().pause_writing()
        if self._unread_timer is None:
            timeout_s = self._limits.unread_timeout_s
            self._unread_timer = self.loop.call_later(timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Write again after the client has read."""
        self._clear_unread_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of this one; or deliver a last response."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._follow()
        elif self._timer is None:
            self._abort_after(self._limits.unread_timeout_s)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        self.close()

    def send_400_response(self, msg: str) -> None:
        """Close the connection after bytes that are not HTTP."""
        self.refuse()

    def refuse(self) -> None:
        """Close the connection with status 400; without it while a response is being sent."""
        is_idle = self.cycle is None or self.cycle.response_complete
        self.close(_BAD_REQUEST if is_idle else b"")

    def close(self, last: bytes = b"") -> None:
        """Close the connection after its last bytes; the client has CLOSE_S to read them."""
        if last:
            self.transport.write(last)
        self.transport.close()
        self._abort_after(CLOSE_S)

    def _abort_after(self, seconds: float) -> None:
        self._clear_timer()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _follow(self) -> None:
        """Set the timer of the phase that the connection is in."""
        if self._is_upgraded or self.transport.is_closing():
            return
        phase = self._current_phase()
        if phase is not self._phase:
            self._phase = phase
            self._clear_timer()
            if phase is _Phase.REST:
                self._set_timer(LINGER_S)
        is_idle = self.timeout_keep_alive_task is not None and not self.conn.trailing_data[0]
        if phase is _Phase.HEAD and self._timer is None and not is_idle:
            self._set_timer(self._limits.receive_timeout_s, _TOO_LATE)

    def _current_phase(self) -> _Phase:
        if self.cycle is not None and not self.cycle.response_complete:
            return _Phase.BUSY
        return _Phase.HEAD if self.conn.their_state is h11.IDLE else _Phase.REST

    def _set_timer(self, seconds: float, last: bytes = b"") -> None:
        self._timer = self.loop.call_later(seconds, self.close, last)

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _clear_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def _peer(address: tuple[str, int] | None) -> str:
    """Return an address in gRPC's notation."""
    if address is None:
        return "unix:"
    host, port = address
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
