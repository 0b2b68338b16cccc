"""`EngineServer`: serves an `EngineClient` of this process to front ends in other processes.

    Speak ─▶ task: async for block in client.speak(job): wait for credit ─▶ Audio
    Cancel ─▶ the task is cancelled, which closes the iterator, which cancels the job

A stream may be WINDOW items ahead of its reader; then its task stops reading from the client,
whose queue fills, which pauses the sequence. Messages for one front end in the same turn of the
event loop are bundled, because most of the cost is per message, unless it has few streams. A lost
connection is detected by the next message to its front end, at the latest by a heartbeat; its
streams are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from itertools import chain

import msgspec
import zmq

from llm import PoolHandle, Request
from tts.engine.admission import Admission
from tts.engine.client import EngineClient, EngineInfo, Hold
from tts.engine.prefill_client import PagePart, PeerRoom, PrefillClient
from tts.errors import NotAvailableError, SlowReaderError
from tts.ipc.codec import bundle, decode_from_front_end, encode, to_error_value
from tts.ipc.endpoints import Endpoints
from tts.ipc.inbox import Outlet
from tts.ipc.messages import (
    NO_SLOT,
    Accepted,
    Admit,
    Admitted,
    Audio,
    Beat,
    Cancel,
    Credit,
    Encode,
    Encoded,
    Failed,
    Farewell,
    FrontEndMessage,
    Generate,
    Goodbye,
    Hello,
    Message,
    Pages,
    Prefill,
    Refused,
    Room,
    SetHeld,
    Speak,
    Tokens,
    Welcome,
    Work,
)
from tts.ipc.sockets import Inlet, bound_socket
from tts.observe.engine_status import EngineStatus
from tts.observe.logs import request_id

logger = logging.getLogger("tts.engine")

# items of one stream that were sent and are unread
AUDIO_WINDOW, TEXT_WINDOW, PAGES_WINDOW = 4, 32, 4
NO_DATA = memoryview(b"")
BEAT_S = 0.5
PAGES_TIMEOUT_S = 60.0  # for an engine to read the pages that it was sent
REQUEST_BOUND = 1024  # queued messages from one front end
REPLY_BOUND = 16_384  # queued messages to one front end
NOTICE_BOUND = 65_536  # queued cancellations and credit; a few per stream
UNLOAD_S = 2.0  # for front ends to learn that the engine unloads
ACCEPTED_S = 0.005  # for which the confirmation of a request waits for an answer to go with
FEW = 4  # streams and slots of a front end, whose answers do not wait for the end of the turn
BUNDLE_BYTES = 2**18  # maximum size of a bundle; a larger message is sent alone


class _Stream:
    """Task of one stream, with its credit. `is_slot`: it holds a slot among the running calls.

    `timeout_s` limits each wait for credit; None: the reader has a limit of its own.
    """

    def __init__(
        self, credit: int, *, is_slot: bool = False, timeout_s: float | None = None
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self.is_slot = is_slot
        self.hold = Hold()
        self._credit = credit
        self._timeout_s = timeout_s
        self._may_send = asyncio.Event()
        self.is_held = asyncio.Event()  # of a slot
        self._room: asyncio.Future[Room] = asyncio.get_running_loop().create_future()

    def give(self, num_items: int) -> None:
        """Add credit for items that the reader has read."""
        self._credit += num_items
        if self._credit > 0:
            self._may_send.set()

    async def take(self) -> None:
        """Wait for one item of credit and consume it. Raises SlowReaderError."""
        if self._credit <= 0:
            self._may_send.clear()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._may_send.wait()
            except TimeoutError as error:
                text = f"an answer was left unread for {self._timeout_s:g} s"
                raise SlowReaderError(text) from error
        self._credit -= 1

    def note(self, message: SetHeld | Room) -> None:
        """Hold a text or continue it; set the room for a prompt's pages, once."""
        if isinstance(message, SetHeld):
            self.hold.set(is_set=message.is_held)
        elif not self._room.done():
            self._room.set_result(message)

    async def room(self) -> Room:
        """Wait for the room for a prompt's pages. Raises SlowReaderError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._room
        except TimeoutError as error:
            text = f"a prompt had no room for {self._timeout_s:g} s"
            raise SlowReaderError(text) from error


@dataclass(slots=True)
class _Peer:
    """Connection of one front end: its streams, and cancellations that overtook their request."""

    name: str
    streams: dict[int, _Stream] = field(default_factory=dict)
    newest: int = -1  # number of its newest stream
    cancelled: set[int] = field(default_factory=set)
    outbox: list[bytes] = field(default_factory=list)  # sent at the end of this turn
    num_bytes: int = 0  # size of the outbox
    accepted: list[bytes] = field(default_factory=list)  # sent with the outbox, or a little later
    pools: set[PoolHandle] = field(default_factory=set)  # that this process maps


class EngineServer:
    """Server of one engine client, from `start` to `close`. One event loop; the caller closes the
    client.

    `admission` holds the slots of calls when several front ends share them.
    """

    def __init__(
        self,
        client: EngineClient,
        info: EngineInfo,
        endpoints: Endpoints,
        admission: Admission | None = None,
        context: zmq.Context | None = None,
    ) -> None:
        self._client, self._info, self._admission = client, info, admission
        self._endpoints = endpoints
        self._context = context or zmq.Context.instance()
        self._peers: dict[str, _Peer] = {}
        self._inlets: list[Inlet] = []
        self._reply: zmq.Socket | None = None
        self._beating: asyncio.Task[None] | None = None
        self._status: EngineStatus | None = None
        self._last_work_s = time.monotonic()
        self._is_unloading = self._is_draining = False
        self._peer_left = asyncio.Event()
        self.broken = asyncio.Event()
        """Set when the client's engine has stopped unexpectedly, or hangs."""

    def __repr__(self) -> str:
        return f"EngineServer(peers={len(self._peers)}, streams={self.num_streams})"

    @property
    def num_streams(self) -> int:
        """Number of streams and admission slots that front ends hold."""
        return sum(len(peer.streams) for peer in self._peers.values())

    @property
    def is_working(self) -> bool:
        """Whether the model has work. Slots are none: another model's calls hold them, too."""
        streams = chain.from_iterable(peer.streams.values() for peer in self._peers.values())
        return any(not stream.is_slot for stream in streams)

    async def wait_idle(self, idle_s: float) -> None:
        """Wait until there has been no work for a time."""
        while True:
            now_s = time.monotonic()
            if self.is_working:
                self._last_work_s = now_s
            left_s = self._last_work_s + idle_s - now_s
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    async def start(self) -> None:
        """Bind the endpoints and accept work. Raises zmq.ZMQError when one cannot be bound.

        Call `close` afterwards in any case.
        """
        self._status = await self._client.status()
        self._reply = bound_socket(self._context, zmq.ROUTER, self._endpoints.response, REPLY_BOUND)
        self._reply.set(zmq.ROUTER_MANDATORY, 1)  # an unroutable message is an error, not lost
        for address, bound in (
            (self._endpoints.request, REQUEST_BOUND),
            (self._endpoints.cancel, NOTICE_BOUND),
            (self._endpoints.control, NOTICE_BOUND),
        ):
            socket = bound_socket(self._context, zmq.PULL, address, bound)
            self._inlets.append(Inlet(socket, self._received))
        self._beating = asyncio.create_task(self._beat())

    async def unload(self) -> None:
        """Accept no more work and notify the front ends; wait until they know it. Then `close`.

        They repeat requests that have no answer yet, when the engine is back.
        """
        self._is_unloading = True
        for peer in self._peers.values():
            self._send(peer, Farewell(unloads=True))
        with suppress(TimeoutError):
            async with asyncio.timeout(UNLOAD_S):
                while self._peers:
                    self._peer_left.clear()
                    await self._peer_left.wait()

    async def drain(self, grace_s: float) -> None:
        """Have front ends send new work elsewhere; wait for what is here, at most so long, or until
        the engine fails.

        Work that comes nevertheless is done, too: front ends may have sent it before they know.
        """
        self._is_draining, self._last_work_s = True, time.monotonic()
        await self._send_status()
        ends = [asyncio.ensure_future(e) for e in (self.wait_idle(BEAT_S), self.broken.wait())]
        await asyncio.wait(ends, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()

    async def close(self) -> None:
        """Cancel all streams, notify the front ends, and unbind."""
        if self._beating is not None:
            self._beating.cancel()
        for peer in list(self._peers.values()):
            self._send(peer, Farewell(unloads=self._is_unloading))
            self._flush(peer)
            await self._forget(peer)
        for inlet in self._inlets:
            inlet.close()
        if self._reply is not None:
            self._reply.close(linger=100)

    async def _beat(self) -> None:
        """Send heartbeats; drop front ends that are disconnected."""
        while True:
            await self._send_status()
            await asyncio.sleep(BEAT_S)

    async def _send_status(self) -> None:
        """Send the engine's status to all front ends."""
        status = await self._client.status()
        status = self._status = replace(status, is_draining=self._is_draining)
        beat = encode(Beat(status))
        for peer in list(self._peers.values()):
            self._send_bytes(peer, beat)
        if not status.is_alive:
            self.broken.set()

    def _received(self, frames: list[bytes]) -> None:
        try:
            message = decode_from_front_end(b"".join(frames))
        except msgspec.DecodeError as error:
            logger.warning("invalid message: %s", error)
            return
        if self._is_unloading and isinstance(message, Hello | Work):
            return  # it is repeated for the next engine
        if isinstance(message, Hello):
            self._greet(message)
            return
        peer = self._peers.get(message.front_end)
        if peer is not None:  # else it was dropped, and will detect that
            self._handle(message, peer)

    def _greet(self, hello: Hello) -> None:
        """Accept a front end once it is reachable; until then it repeats its Hello."""
        assert self._status is not None
        name, server_id = hello.front_end, self._endpoints.server_id
        if hello.server_id != server_id:
            if self._reached(name, encode(Refused(server_id))):
                logger.error(
                    "%s of server %s is refused: another server, or other pages",
                    name,
                    hello.server_id,
                )
        elif self._reached(name, encode(Welcome(server_id, self._info, self._status))):
            self._peers.setdefault(name, _Peer(name))

    def _handle(self, message: FrontEndMessage, peer: _Peer) -> None:
        """Process a message of a known front end."""
        match message:
            case Credit(num_items=taken):
                for number, num_items in taken.items():
                    if number in peer.streams:
                        peer.streams[number].give(num_items)
            case SetHeld(stream=number) | Room(stream=number):
                if number in peer.streams:
                    peer.streams[number].note(message)
            case Work():
                self._begin(message, peer)
            case Cancel(stream=number):
                self._cancel(number, peer)
            case Goodbye():
                self._drop(peer)

    def _begin(self, work: Work, peer: _Peer) -> None:
        number = peer.newest = work.stream
        if not peer.accepted:
            asyncio.get_running_loop().call_later(ACCEPTED_S, self._flush, peer)
        peer.accepted.append(encode(Accepted(number)))
        if number in peer.cancelled:
            peer.cancelled.remove(number)
            return
        windows = {Speak: AUDIO_WINDOW, Prefill: PAGES_WINDOW}
        window = windows.get(type(work), TEXT_WINDOW)
        limit_s = PAGES_TIMEOUT_S if isinstance(work, Prefill) else None
        stream = _Stream(window, is_slot=isinstance(work, Admit), timeout_s=limit_s)
        peer.streams[number] = stream
        stream.task = asyncio.create_task(self._work(peer, work, stream))
        # Done here because a task that is cancelled before its first step does not run.
        stream.task.add_done_callback(lambda _: self._ended(peer, number, stream))

    def _ended(self, peer: _Peer, number: int, stream: _Stream) -> None:
        peer.streams.pop(number, None)
        stream.task = None  # a cancelled one refers to the stream: a cycle for the collector
        if not stream.is_slot:
            self._last_work_s = time.monotonic()
        self._unmap_pools(peer)

    def _unmap_pools(self, peer: _Peer) -> None:
        """Unmap the pools of a front end that is gone, when nothing is written to them any more:
        else their memory would outlive its process.
        """
        is_gone = self._peers.get(peer.name) is not peer and not peer.streams
        if is_gone and isinstance(self._client, PrefillClient):
            for pool in peer.pools:
                self._client.unmap(pool)
            peer.pools.clear()

    @staticmethod
    def _cancel(number: int, peer: _Peer) -> None:
        stream = peer.streams.get(number)
        if stream is not None and stream.task is not None:
            stream.task.cancel()
        elif number > peer.newest:
            peer.cancelled.add(number)

    async def _work(self, peer: _Peer, work: Work, stream: _Stream) -> None:
        """Run one stream; send its error as the last answer."""
        try:
            async with aclosing(self._answers(peer, work, stream)) as answers:
                async for answer in answers:
                    await stream.take()
                    self._send(peer, answer)
                    if len(peer.streams) <= FEW:
                        self._flush(peer)
        except Exception as error:
            value = to_error_value(error)
            if value.message != str(error):
                logger.error("%s of %s failed", type(work).__name__, peer.name, exc_info=error)
            self._send(peer, Failed(work.stream, value))

    async def _answers(
        self, peer: _Peer, work: Work, stream: _Stream
    ) -> AsyncGenerator[Message, None]:
        number = work.stream
        match work:
            case Speak(job=job, slot=slot):
                await _held(peer, slot)
                request = job.request
                request_id.set(request.request_id)  # for log lines of this stream's task
                job = replace(job, request=_renamed(request, peer, number))
                async with aclosing(self._client.speak(job)) as blocks:
                    async for block in blocks:
                        yield Audio(number, block)
            case Generate(request=request):
                request_id.set(request.request_id)
                async with aclosing(
                    self._client.generate(_renamed(request, peer, number), stream.hold)
                ) as chunks:
                    async for chunk in chunks:
                        yield Tokens(number, chunk._replace(request_id=request.request_id))
            case Encode(samples=samples):
                yield Encoded(number, await self._client.encode_prompt(samples))
            case Prefill():
                async with aclosing(self._prefill(peer, work, stream)) as pages:
                    async for answer in pages:
                        yield answer
            case Admit(client=client):
                async for answer in self._admit(number, client, stream):
                    yield answer

    async def _prefill(
        self, peer: _Peer, work: Prefill, stream: _Stream
    ) -> AsyncGenerator[Message, None]:
        """Send the pages of a prompt: into the reader's pool if this process can, else into its
        inbox.
        """
        if not isinstance(self._client, PrefillClient):
            raise NotAvailableError("this engine computes no prompts for others")
        request = _renamed(work.request, peer, work.stream)
        with ExitStack() as opened:
            outlet = None

            async def room() -> PeerRoom:
                nonlocal outlet
                found = await stream.room()
                outlet, pool = Outlet.open(found.inbox), None
                if outlet is not None:
                    opened.enter_context(outlet)
                    # Of this user only: a process of another machine could name any memory. With an
                    # inbox only: without it the reader does not wait for writes.
                    pool = found.pool if self._endpoints.base.startswith("ipc://") else None
                if pool is not None:
                    peer.pools.add(pool)
                return PeerRoom(found.first_page, pool, found.pages, found.wants_digest)

            async with aclosing(self._client.prefill(request, room)) as parts:
                async for part in parts:
                    yield _pages(work.stream, part, outlet)

    async def _admit(
        self, number: int, client: str, stream: _Stream
    ) -> AsyncGenerator[Message, None]:
        """Hold a slot among the running calls until the stream is cancelled."""
        if self._admission is None:
            raise NotAvailableError("this engine has no admission; its front end has")
        async with self._admission.request(client) as slot:
            await slot.held()
            stream.is_held.set()
            yield Admitted(number)
            await asyncio.Event().wait()

    def _send(self, peer: _Peer, message: Message) -> None:
        self._send_bytes(peer, encode(message))

    def _send_bytes(self, peer: _Peer, data: bytes) -> None:
        """Queue a message in the front end's bundle of this turn of the event loop."""
        if peer.num_bytes + len(data) > BUNDLE_BYTES:
            self._flush(peer)
        if not peer.outbox:
            asyncio.get_running_loop().call_soon(self._flush, peer)
        peer.outbox.append(data)
        peer.num_bytes += len(data)

    def _flush(self, peer: _Peer) -> None:
        """Send a front end's bundle."""
        outbox = peer.accepted + peer.outbox
        peer.accepted, peer.outbox, peer.num_bytes = [], [], 0
        if not outbox or self._peers.get(peer.name) is not peer:
            return
        try:
            is_there = self._reached(peer.name, *outbox)
        except zmq.ZMQError:
            self._drop(peer)
            raise
        if not is_there:
            logger.warning("front end %s is gone; %d streams end", peer.name, len(peer.streams))
            self._drop(peer)

    def _reached(self, name: str, *messages: bytes) -> bool:
        """Send; return False if the front end is disconnected or its queue is full."""
        assert self._reply is not None
        try:
            self._reply.send_multipart((name.encode(), bundle(messages)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def _drop(self, peer: _Peer) -> list[asyncio.Task[None]]:
        """Drop a front end and cancel its streams."""
        self._peers.pop(peer.name, None)
        self._peer_left.set()
        tasks = [stream.task for stream in peer.streams.values() if stream.task is not None]
        for task in tasks:
            task.cancel()
        self._unmap_pools(peer)
        return tasks

    async def _forget(self, peer: _Peer) -> None:
        await asyncio.gather(*self._drop(peer), return_exceptions=True)


async def _held(peer: _Peer, number: int) -> None:
    """Wait until a slot, if any, is held. Raises NotAvailableError for one that was refused.

    A refusal in the meantime ends the wait: the front end cancels what waits.
    """
    if number == NO_SLOT:
        return
    slot = peer.streams.get(number)
    if slot is None:
        raise NotAvailableError("the call has no slot")
    await slot.is_held.wait()


def _pages(stream: int, part: PagePart, outlet: Outlet | None) -> Pages:
    """Return the message of pages; their content goes into the outlet if it fits there."""
    num_pages, content, is_written, is_last, token, digest = part
    slot, data = -1, NO_DATA
    if not is_written:
        slot = -1 if outlet is None else outlet.put(content)
        data = content.data if slot < 0 else NO_DATA
    return Pages(stream, num_pages, content.nbytes, data, slot, is_written, is_last, token, digest)


def _renamed(request: Request, peer: _Peer, stream: int) -> Request:
    """Return the request with an id that is unique among all front ends."""
    return replace(request, request_id=f"{peer.name}/{stream}/{request.request_id}")
