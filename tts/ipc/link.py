"""One connection of a front end to the engine, from Hello until one of them has gone.

    open ─▶ Hello, Hello … ─▶ Welcome ─▶ streams ─▶ lost: every stream fails at once

A link is used once: after a loss a new one is made, under a new name, so that nothing of the old
one can reach the new engine, nor the other way round.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque

import zmq

from llm import ConfigError, QueueFullError
from tts.engine_client import EngineFacts, EngineStatus
from tts.errors import EngineLostError
from tts.ipc.codec import decode_from_engine, encode, from_error_value
from tts.ipc.endpoints import Endpoints
from tts.ipc.engine_server import NOTICE_BOUND, REPLY_BOUND, REQUEST_BOUND
from tts.ipc.messages import (
    Answer,
    Beat,
    Cancel,
    EngineMessage,
    Failed,
    Farewell,
    Goodbye,
    Hello,
    Message,
    Refused,
    Taken,
    Took,
    Welcome,
    Work,
)
from tts.ipc.pulse import Pulse
from tts.ipc.sockets import ConnectionWatch, Inlet, new_socket

HELLO_S = 0.05
STALL_S = 15.0  # without a sign of life for so long, the engine counts as lost
QUIET_S = 4.0  # and after so long as not to be counted on; what runs on it goes on
RECONNECT_MS, LONGEST_RECONNECT_MS = 20, 500
LAST_WORDS_MS = 200


class Stream:
    """The answers to one piece of work, in order. A single reader."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_ended = False  # the engine knows that nothing more comes
        self._items: deque[Answer] = deque()
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, answer: Answer) -> None:
        """Append what came."""
        if isinstance(answer, Failed):
            self.has_ended = True
            self.fail(from_error_value(answer.error))
            return
        self._items.append(answer)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """The reader gets this error, at once."""
        self._error = self._error or error
        self._arrived.set()

    async def get(self) -> Answer:
        """The next answer. Raises what the engine raised, or EngineLostError."""
        while self._error is None and not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        if self._error is not None:
            raise self._error
        return self._items.popleft()


class Link:
    """Sockets of one connection and the streams on it. One event loop."""

    def __init__(self, endpoints: Endpoints, name: str, context: zmq.Context) -> None:
        self.name = f"{name}-{secrets.token_hex(4)}"
        self.status: EngineStatus | None = None
        self.lost = asyncio.Event()
        self._endpoints = endpoints
        self._welcomed: asyncio.Future[EngineFacts] = asyncio.get_running_loop().create_future()
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count()
        self._waiting: set[int] = set()  # streams whose work the engine has not taken yet
        self._taken: dict[int, int] = {}  # items by stream, of which the engine is told soon
        self._pulse = Pulse(STALL_S)
        self._work = self._connected(context, endpoints.request, REQUEST_BOUND)
        self._cancel = self._connected(context, endpoints.cancel, NOTICE_BOUND)
        self._control = self._connected(context, endpoints.control, NOTICE_BOUND)
        replies = new_socket(context, zmq.DEALER, REPLY_BOUND)
        replies.set(zmq.IDENTITY, self.name.encode())
        self._replies = Inlet(replies, self._received)
        self._watch = ConnectionWatch(replies, self._break)
        _connect(replies, endpoints.response)

    def __repr__(self) -> str:
        state = "lost" if self.lost.is_set() else "up" if self.is_up else "new"
        return f"Link({self.name}, {state}, streams={len(self._streams)})"

    @property
    def is_up(self) -> bool:
        """Whether work can be sent."""
        welcomed = self._welcomed
        return welcomed.done() and welcomed.exception() is None and not self.lost.is_set()

    @property
    def is_answering(self) -> bool:
        """Whether the engine is there and shows signs of life."""
        return self.is_up and self._pulse.silence_s < QUIET_S

    async def welcome(self) -> EngineFacts:
        """Greet the engine until it answers, for as long as that takes.

        Raises EngineLostError when it goes away meanwhile, ConfigError when it is another server's.
        """
        while not self._welcomed.done():
            if self.lost.is_set():
                raise EngineLostError("the engine went away before it had answered")
            self._post(self._control, Hello(self.name, self._endpoints.server_id))
            await asyncio.wait((self._welcomed,), timeout=HELLO_S)
        return self._welcomed.result()

    async def wait_lost(self) -> None:
        """Until the engine is gone, or has been silent for too long."""
        waits = [asyncio.ensure_future(w) for w in (self.lost.wait(), self._pulse.stopped())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._break()

    def new_number(self) -> int:
        """A number for a stream; used in the order they are given out."""
        return next(self._numbers)

    def open(self, work: Work) -> Stream:
        """Send work. Raises EngineLostError, or QueueFullError when the engine takes too little."""
        if not self.is_up:
            raise EngineLostError("the engine is not there; it is being restarted, try again")
        if len(self._waiting) >= REQUEST_BOUND:
            raise QueueFullError(f"{REQUEST_BOUND} requests wait already; try again later")
        if not self._post(self._work, work):
            raise EngineLostError("the engine cannot be reached; try again")
        stream = Stream(work.stream)
        self._waiting.add(work.stream)
        self._streams[work.stream] = stream
        return stream

    def took(self, stream: Stream, num_items: int) -> None:
        """The reader took items of a stream: more may come. Told together for all readers that
        take some in this turn of the event loop.
        """
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._tell_taken)
        self._taken[stream.number] = self._taken.get(stream.number, 0) + num_items

    def _tell_taken(self) -> None:
        taken, self._taken = self._taken, {}
        self._notify(self._control, Took(self.name, taken))

    def close_stream(self, stream: Stream) -> None:
        """The reader is done; a stream that has not ended is cancelled."""
        self._streams.pop(stream.number, None)
        if not stream.has_ended:
            self._notify(self._cancel, Cancel(self.name, stream.number))

    def close(self) -> None:
        """Say good-bye, where there is somebody, and close the sockets."""
        self._notify(self._control, Goodbye(self.name))
        self._break()
        self._watch.close()
        self._replies.close()
        for socket in (self._work, self._cancel, self._control):
            socket.close(linger=LAST_WORDS_MS)

    @staticmethod
    def _connected(context: zmq.Context, address: str, bound: int) -> zmq.Socket:
        socket = new_socket(context, zmq.PUSH, bound)
        _connect(socket, address)
        return socket

    @staticmethod
    def _post(socket: zmq.Socket, message: Message) -> bool:
        """Send; False when there is no connection or no room."""
        try:
            socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _notify(self, socket: zmq.Socket, message: Message) -> None:
        if self.is_up and not self._post(socket, message):
            self._break()  # an engine that does not even read this is no engine

    def _received(self, frames: list[bytes]) -> None:
        self._pulse.felt()
        for message in decode_from_engine(frames[-1]):
            self._take(message)

    def _take(self, message: EngineMessage) -> None:
        match message:
            case Taken(stream=number):
                self._waiting.discard(number)
            case Answer() as answer:
                stream = self._streams.get(answer.stream)
                if stream is not None:
                    stream.put(answer)
            case Beat(status=status):
                self.status = status
            case Welcome() | Refused() as greeting:
                self._greeted(greeting)
            case Farewell():
                self._break()

    def _greeted(self, greeting: Welcome | Refused) -> None:
        """The first answer to Hello counts; one from another server's engine is an error."""
        if self._welcomed.done():
            return
        if isinstance(greeting, Welcome) and greeting.server_id == self._endpoints.server_id:
            self.status = greeting.status
            self._welcomed.set_result(greeting.facts)
            return
        self._welcomed.set_exception(
            ConfigError(
                f"the engine at {self._endpoints.request} belongs to another server "
                f"({greeting.server_id}, this is {self._endpoints.server_id}): "
                "give each server a zmq_endpoint_base of its own"
            )
        )

    def _break(self) -> None:
        """The engine is gone: every reader is told at once."""
        self.lost.set()
        error = EngineLostError("the engine has gone; it is being restarted, try again")
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()


def _connect(socket: zmq.Socket, address: str) -> None:
    socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for an engine that is not there
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, LONGEST_RECONNECT_MS)
    socket.connect(address)
