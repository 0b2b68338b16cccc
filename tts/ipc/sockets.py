"""Non-blocking ZeroMQ sockets on an asyncio event loop.

A socket's descriptor only signals a change of state, so a reader reads until the socket is empty.
Sending sockets are not watched: a send to a full queue fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

MAX_MESSAGE_BYTES = 64 * 2**20
TURN = 256  # messages read in one turn of the event loop
KEEPALIVE_S = 10  # TCP only: idle time before keep-alive probes


def new_socket(context: zmq.Context, kind: int, bound: int) -> zmq.Socket:
    """Create a socket that queues at most `bound` messages per peer, and drops them when closed."""
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, bound)
    socket.set(zmq.RCVHWM, bound)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    return socket


def bound_socket(context: zmq.Context, kind: int, address: str, bound: int) -> zmq.Socket:
    """Bind a new socket. Raises zmq.ZMQError for an address that is in use or invalid."""
    socket = new_socket(context, kind, bound)
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


class Inlet:
    """Reader that passes each message of a socket to `take`, on the event loop, in order."""

    def __init__(self, socket: zmq.Socket, take: Callable[[list[bytes]], None]) -> None:
        self._socket, self._take = socket, take
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._is_open = True
        self._loop.add_reader(self._descriptor, self.read)
        self._loop.call_soon(self.read)  # messages that arrived before the reader was added

    def close(self) -> None:
        """Stop reading and close the socket."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._descriptor)
            self._socket.close()

    def read(self) -> None:
        """Pass on the messages that have arrived, at most TURN of them now."""
        for _ in range(TURN):
            if not self._is_open:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(frames)
            except BaseException:  # the remaining messages would wait for the next arrival
                self._loop.call_soon(self.read)
                raise
        self._loop.call_soon(self.read)


class ConnectionWatch:
    """Monitor that calls `on_lost` when a socket's connection breaks, such as by a peer's death.

    Close it before the socket.
    """

    def __init__(self, socket: zmq.Socket, on_lost: Callable[[], None]) -> None:
        self._socket, self._on_lost = socket, on_lost
        self._events = Inlet(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED), self._take)

    def close(self) -> None:
        """Stop monitoring. ZeroMQ's monitor is disabled first: it would block without a reader."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._events.close()

    def _take(self, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED:
            self._on_lost()
