"""`Link`: one connection of a front end to the engine, from Hello to its loss.

    open ─▶ Hello, Hello … ─▶ Welcome ─▶ streams ─▶ lost: every stream fails at once

A link is used once: after a loss a new one is created with a new name, so that messages of the old
one cannot reach the new engine, or the reverse.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque

import msgspec
import zmq

from llm import ConfigError, QueueFullError
from tts.engine.client import EngineInfo
from tts.errors import EngineLostError
from tts.ipc.codec import decode_from_engine, encode, from_error_value
from tts.ipc.endpoints import Endpoints
from tts.ipc.engine_server import NOTICE_BOUND, REPLY_BOUND, REQUEST_BOUND
from tts.ipc.heartbeat import Heartbeat
from tts.ipc.messages import (
    Accepted,
    Answer,
    Beat,
    Cancel,
    Credit,
    EngineMessage,
    Failed,
    Farewell,
    Goodbye,
    Hello,
    Message,
    Refused,
    Room,
    SetHeld,
    Welcome,
    Work,
)
from tts.ipc.sockets import ConnectionWatch, Inlet, new_socket
from tts.observe.engine_status import EngineStatus

logger = logging.getLogger("tts.ipc")

HELLO_S = 0.05
STALL_S = 15.0  # without a heartbeat for so long, the engine counts as lost
QUIET_S = 4.0  # after so long as unresponsive; its streams continue
RECONNECT_MS, LONGEST_RECONNECT_MS = 20, 100
LAST_WORDS_MS = 200


class EngineUnloadedError(EngineLostError):
    """Error of a request whose engine has unloaded its model; it may be repeated."""


class Stream:
    """Answers to one request, in order, for a single reader."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_ended = False  # the engine has sent the last answer
        self._items: deque[Answer] = deque()
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, answer: Answer) -> None:
        """Append an answer."""
        if isinstance(answer, Failed):
            self.has_ended = True
            self.fail(from_error_value(answer.error))
            return
        self._items.append(answer)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Raise this error in the reader, at once."""
        self._error = self._error or error
        self._arrived.set()

    async def get(self) -> Answer:
        """Wait for the next answer and return it. Raises the engine's error, or EngineLostError."""
        while self._error is None and not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        if self._error is not None:
            raise self._error
        return self._items.popleft()


class Link:
    """Sockets of one connection, with its streams. One event loop."""

    def __init__(self, endpoints: Endpoints, name: str, context: zmq.Context) -> None:
        self.name = f"{name}-{secrets.token_hex(4)}"
        self.status: EngineStatus | None = None
        self.lost = asyncio.Event()
        self.is_unloaded = False
        """Whether the engine has announced that it unloads its model; `lost` is set then."""
        self._endpoints = endpoints
        self._welcomed: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count()
        self._waiting: set[int] = set()  # streams whose request the engine has not accepted yet
        self._taken: dict[int, int] = {}  # unsent credit, items by stream
        self._heartbeat = Heartbeat(STALL_S)
        self._work = self._connected(context, endpoints.request, REQUEST_BOUND)
        self._cancel = self._connected(context, endpoints.cancel, NOTICE_BOUND)
        self._control = self._connected(context, endpoints.control, NOTICE_BOUND)
        replies = new_socket(context, zmq.DEALER, REPLY_BOUND)
        replies.set(zmq.IDENTITY, self.name.encode())
        # Not IMMEDIATE: such a socket drops unread messages when its connection breaks.
        self._replies = Inlet(replies, self._received)
        self._watch = ConnectionWatch(replies, self._disconnected)
        _connect(replies, endpoints.response)

    def __repr__(self) -> str:
        state = "lost" if self.lost.is_set() else "up" if self.is_up else "new"
        return f"Link({self.name}, {state}, streams={len(self._streams)})"

    @property
    def is_up(self) -> bool:
        """Whether requests can be sent."""
        welcomed = self._welcomed
        return welcomed.done() and welcomed.exception() is None and not self.lost.is_set()

    @property
    def is_answering(self) -> bool:
        """Whether the engine is connected and sends heartbeats."""
        return self.is_up and self._heartbeat.silence_s < QUIET_S

    @property
    def _can_send(self) -> bool:
        """Whether all sockets that send are connected: each connects by itself."""
        return all(
            socket.poll(0, zmq.POLLOUT) for socket in (self._work, self._cancel, self._control)
        )

    async def welcome(self) -> EngineInfo:
        """Send Hello until the engine answers, without a time limit. Requests can be sent then.

        Raises EngineLostError when the connection is lost meanwhile, and ConfigError for the
        engine of another server.
        """
        while not self._welcomed.done():
            if self.lost.is_set():
                raise EngineLostError("the engine exited before it answered")
            if self._can_send:
                self._post(self._control, Hello(self.name, self._endpoints.server_id))
            await asyncio.wait((self._welcomed,), timeout=HELLO_S)
        return self._welcomed.result()

    async def wait_lost(self) -> None:
        """Wait until the engine has disconnected, or its heartbeats have stopped."""
        waits = [asyncio.ensure_future(w) for w in (self.lost.wait(), self._heartbeat.stopped())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._break()

    def new_number(self) -> int:
        """Return the number of a new stream; numbers are used in order."""
        return next(self._numbers)

    def open(self, work: Work) -> Stream:
        """Send a request. Raises EngineLostError, or QueueFullError when too many are queued."""
        if not self.is_up:
            raise EngineLostError("the engine is not connected; it is being restarted, try again")
        if len(self._waiting) >= REQUEST_BOUND:
            raise QueueFullError(f"{REQUEST_BOUND} requests are queued already; try again later")
        if not self._post(self._work, work):
            raise EngineLostError("the engine cannot be reached; try again")
        stream = Stream(work.stream)
        self._waiting.add(work.stream)
        self._streams[work.stream] = stream
        return stream

    def took(self, stream: Stream, num_items: int) -> None:
        """Grant credit for items that a reader has read.

        The credit of all readers in one turn of the event loop is sent in one message.
        """
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._tell_taken)
        self._taken[stream.number] = self._taken.get(stream.number, 0) + num_items

    def _tell_taken(self) -> None:
        taken, self._taken = self._taken, {}
        self._notify(self._control, Credit(self.name, taken))

    def set_held(self, stream: Stream, *, is_held: bool) -> None:
        """Have the engine hold a text, or continue it."""
        self._notify(self._control, SetHeld(self.name, stream.number, is_held))

    def give_room(self, room: Room) -> None:
        """Send the room for a prompt's pages, behind its request. Raises EngineLostError."""
        if not (self.is_up and self._post(self._work, room)):
            raise EngineLostError("the engine cannot be reached; try again")

    def close_stream(self, stream: Stream) -> None:
        """Close a stream at its reader's end; cancel it if it has not ended."""
        self._streams.pop(stream.number, None)
        if not stream.has_ended:
            self._notify(self._cancel, Cancel(self.name, stream.number))

    def close(self) -> None:
        """Send Goodbye, if connected, and close the sockets."""
        self._notify(self._control, Goodbye(self.name))
        self._break()
        self._watch.close()
        self._replies.close()
        for socket in (self._work, self._cancel, self._control):
            socket.close(linger=LAST_WORDS_MS)

    @staticmethod
    def _connected(context: zmq.Context, address: str, bound: int) -> zmq.Socket:
        socket = new_socket(context, zmq.PUSH, bound)
        socket.set(zmq.IMMEDIATE, 1)  # do not queue messages without a connection
        _connect(socket, address)
        return socket

    @staticmethod
    def _post(socket: zmq.Socket, message: Message) -> bool:
        """Send; return False if there is no connection or the queue is full."""
        try:
            socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _notify(self, socket: zmq.Socket, message: Message) -> None:
        if self.is_up and not self._post(socket, message):
            self._break()  # an engine that does not read control messages counts as lost

    def _received(self, frames: list[bytes]) -> None:
        self._heartbeat.beat()
        try:
            messages = decode_from_engine(frames[-1])
        except msgspec.DecodeError as error:
            logger.error("invalid messages of the engine: %s", error)
            self._break()
            return
        for message in messages:
            self._take(message)

    def _take(self, message: EngineMessage) -> None:
        match message:
            case Accepted(stream=number):
                self._waiting.discard(number)
            case Answer() as answer:
                stream = self._streams.get(answer.stream)
                if stream is not None:
                    stream.put(answer)
            case Beat(status=status):
                self.status = status
            case Welcome() | Refused() as greeting:
                self._greeted(greeting)
            case Farewell(unloads=unloads):
                self.is_unloaded = unloads
                if unloads:
                    self._notify(self._control, Goodbye(self.name))  # the engine waits for it
                self._break()

    def _greeted(self, greeting: Welcome | Refused) -> None:
        """Process the first answer to Hello; a refusal is an error."""
        if self._welcomed.done():
            return
        if isinstance(greeting, Welcome) and greeting.server_id == self._endpoints.server_id:
            self.status = greeting.status
            self._welcomed.set_result(greeting.info)
            return
        self._welcomed.set_exception(ConfigError(self._refusal(greeting.server_id)))

    def _refusal(self, other: str) -> str:
        """Return the error for the engine of another server, or with other pages."""
        own = self._endpoints
        if own.by_format:
            return (
                f"prefill_endpoints={own.base}: that engine's pages cannot be used here: it has "
                f"{other}; this engine has {own.server_id}"
            )
        return (
            f"the engine at {own.request} belongs to another server ({other}, this is "
            f"{own.server_id}): give each server a zmq_endpoint_base of its own"
        )

    def _disconnected(self) -> None:
        self._replies.read()  # a farewell may have arrived before
        self._break()

    def _break(self) -> None:
        """Mark the link as lost and fail all streams."""
        self.lost.set()
        kind = EngineUnloadedError if self.is_unloaded else EngineLostError
        error = kind("the engine has exited; it is being restarted, try again")
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()


def _connect(socket: zmq.Socket, address: str) -> None:
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, LONGEST_RECONNECT_MS)
    socket.connect(address)
