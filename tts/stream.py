"""The bounded queue of one stream, from the engine thread to the event loop.

    engine thread                       event loop
    put ──▶ [item item … item] ──▶ get (awaits)
             │ full: the producer     │ takes one: `on_room`, where it was full
             ▼ keeps its work back    ▼ takes none for too long: `on_stall`

Credit is counted, never enforced by blocking or dropping: a producer asks `is_full` before it
spends work on the next item, and an item that is put is delivered. To wake the event loop costs
both threads more than an item does, so a producer of many queues does that once for all of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from tts.errors import SlowReaderError

Item = TypeVar("Item")


def _ignore() -> None:
    pass


@dataclass(frozen=True, slots=True)
class StreamHooks:
    """What a queue tells its owner, on the event loop's thread."""

    on_room: Callable[[], None] = _ignore  # the reader took an item from a full queue
    on_stall: Callable[[], None] = _ignore  # the reader was given up


class Wakeups:
    """Calls that one thread has for event loops, kept back until it says `flush`."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = deque()

    def add(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Have something called on a loop; it must not raise."""
        self._waiting.append((loop, call))

    def flush(self) -> None:
        """Wake each loop once."""
        if not self._waiting:
            return
        calls: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        while self._waiting:
            loop, call = self._waiting.popleft()
            calls.setdefault(loop, []).append(call)
        for loop, together in calls.items():
            _call(loop, _call_all, together)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody will read
        loop.call_soon_threadsafe(function, *args)


class StreamQueue(Generic[Item]):
    """Items of one stream, in order. Built on the event loop that reads it.

    `timeout_s` is how long a reader may leave a waiting item unread; after that the queue is
    emptied and `get` raises SlowReaderError. None: for ever. With `wakeups` the reader learns of an
    item when they are flushed, else at once.
    """

    def __init__(
        self, capacity: int, *, timeout_s: float | None = None, wakeups: Wakeups | None = None
    ) -> None:
        self._capacity = capacity
        self._wakeups = wakeups
        self._hooks = StreamHooks()
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None  # of the reader, while it waits
        self._error: Exception | None = None
        self._is_closed = False
        self._unread_since_s = 0.0
        self._watch: asyncio.TimerHandle | None = None

    def connect(self, hooks: StreamHooks) -> None:
        """Say who is told about the reader; before the first `put`."""
        self._hooks = hooks

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"StreamQueue({len(self)}/{self._capacity}, error={self._error!r})"

    @property
    def is_full(self) -> bool:
        """Whether the producer should keep its next item back."""
        return len(self._items) >= self._capacity

    @property
    def room(self) -> int:
        """How many more items the producer should put."""
        return max(0, self._capacity - len(self._items))

    def put(self, item: Item) -> None:
        """Append an item; from any thread, never blocks. Nothing happens once the queue failed."""
        with self._lock:
            if self._error is not None or self._is_closed:
                return
            was_empty = not self._items
            if was_empty:  # before the item is there: the watch looks at both without the lock
                self._unread_since_s = time.monotonic()
            self._items.append(item)
        if not was_empty:
            return  # the reader was told of the first one, and reads until there is none
        if self._wakeups is None:
            _call(self._loop, self._note_arrival)
        else:
            self._wakeups.add(self._loop, self._note_arrival)

    async def get(self) -> Item:
        """The next item, when there is one. Raises what `fail` was given."""
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._error
                if self._items:
                    was_full = self.is_full
                    item = self._items.popleft()
                    self._unread_since_s = time.monotonic()
                    break
            # Arrivals are told on this thread, so none is lost between the look and the wait.
            self._waiter = self._loop.create_future()
            await self._waiter
        if was_full:
            self._hooks.on_room()
        return item

    def fail(self, error: Exception) -> None:
        """Drop what is queued; the reader gets the error instead. From any thread."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._items.clear()
        _call(self._loop, self._wake)

    def close(self) -> None:
        """Drop what is queued and watch no more; on the event loop, once the reader is done."""
        with self._lock:
            self._is_closed = True
            self._items.clear()
        if self._watch is not None:
            self._watch.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _note_arrival(self) -> None:
        self._wake()
        if self._watch is None:
            self._check_reader()

    def _check_reader(self) -> None:
        """Give a reader up that left an item unread for too long; else look again in time."""
        self._watch = None
        if self._timeout_s is None or self._is_closed or not self._items:
            return
        left_s = self._unread_since_s + self._timeout_s - time.monotonic()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._check_reader)
            return
        self.fail(SlowReaderError(f"a message was left unread for {self._timeout_s:g} s"))
        self._hooks.on_stall()
