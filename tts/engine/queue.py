"""The bounded queue of one stream, from the engine thread to the event loop.

    engine thread                       event loop
    put ──▶ [item item … item] ──▶ get (awaits)
             │ full: the producer     │ removes an item of a full queue: `on_room`
             ▼ holds its work back    ▼ leaves an item for too long: `on_stall`

The bound is not enforced by blocking or dropping: a producer checks `is_full` before it works on
the next item, and every item that is put is delivered. Waking the event loop costs both threads
more than an item does, so a producer of many queues wakes it once for all of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from tts.errors import SlowReaderError

Item = TypeVar("Item")


def _ignore() -> None:
    pass


class Wakeups:
    """Deferred calls from one thread to event loops; `flush` runs them."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = deque()

    def add(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Schedule a call on a loop for the next `flush`; it must not raise."""
        self._waiting.append((loop, call))

    def flush(self, wait_s: float = 0.0) -> None:
        """Wake each loop once; wait, at most so long, until the readers have passed their items on.

        Without the wait this thread and theirs take the interpreter lock from each other.
        """
        if not self._waiting:
            return
        calls: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        while self._waiting:
            loop, call = self._waiting.popleft()
            calls.setdefault(loop, []).append(call)
        read = threading.Event() if wait_s else None
        for loop, together in calls.items():
            with suppress(RuntimeError):  # the loop is closed, so no reader is left
                loop.call_soon_threadsafe(_call_all, together, read)
        if read is not None:
            read.wait(wait_s)


def _call_all(calls: Sequence[Callable[[], None]], read: threading.Event | None) -> None:
    """Run calls that wake readers; set `read`, if there is one, behind the readers' turn and the
    next one, in which a task that waits for a reader runs.
    """
    for call in calls:
        call()
    if read is not None:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, read.set)


class StreamQueue(Generic[Item]):
    """Queue of one stream's items, created on the event loop that reads it.

    A reader may leave an item unread for `timeout_s` (None: no limit); then the queue is emptied
    and `get` raises SlowReaderError. With `wakeups` the reader wakes when they are flushed, else
    at once. The owner may set `on_room` and `on_stall` before the first `put`; both are called on
    the event loop's thread.
    """

    def __init__(
        self, capacity: int, *, timeout_s: float | None = None, wakeups: Wakeups | None = None
    ) -> None:
        self._capacity = capacity
        self._wakeups = wakeups
        self.on_room: Callable[[], None] = _ignore  # an item was read from a full queue
        self.on_stall: Callable[[], None] = _ignore  # an item was left unread for too long
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None  # future of the waiting reader
        self._error: Exception | None = None
        self._is_closed = False
        self._unread_since_s = 0.0
        self._watch: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"StreamQueue({len(self)}/{self._capacity}, error={self._error!r})"

    @property
    def is_full(self) -> bool:
        """Whether the producer should hold its next item back; `put` returns it, too."""
        return len(self._items) >= self._capacity

    @property
    def room(self) -> int:
        """Number of items that the producer may still put."""
        return max(0, self._capacity - len(self._items))

    def put(self, item: Item) -> bool:
        """Append an item; callable from any thread, never blocks. Does nothing after `fail`.

        Returns whether the producer should hold its next item back.
        """
        with self._lock:
            if self._error is not None or self._is_closed:
                return False
            was_empty = not self._items
            if was_empty:  # before the append: the check of the reader reads both without the lock
                self._unread_since_s = time.monotonic()
            self._items.append(item)
            is_full = len(self._items) >= self._capacity
        if not was_empty:
            return is_full  # the reader is awake, and reads until the queue is empty
        if self._wakeups is None:
            self._call(self._note_change)
        else:
            self._wakeups.add(self._loop, self._note_change)
        return is_full

    async def get(self) -> Item:
        """Wait for the next item and return it. Raises the error of `fail`."""
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._error
                if self._items:
                    was_full = len(self._items) >= self._capacity
                    item = self._items.popleft()
                    self._unread_since_s = time.monotonic()
                    break
            # Arrivals are signalled on this thread, so none is lost between the check and the wait.
            self._waiter = self._loop.create_future()
            await self._waiter
        if was_full:
            self.on_room()
        return item

    def fail(self, error: Exception) -> None:
        """Drop the queued items and raise the error in the reader; callable from any thread."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._items.clear()
        self._call(self._note_change)

    def close(self) -> None:
        """Drop the queued items and stop the timeout; on the event loop, after the last read."""
        with self._lock:
            self._is_closed = True
            self._items.clear()
        self.on_room = self.on_stall = _ignore  # they refer to the stream, which is over
        if self._watch is not None:
            self._watch.cancel()

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, so no reader is left
            self._loop.call_soon_threadsafe(function)

    def _note_change(self) -> None:
        """Wake the reader for an item or an error; begin to watch that it reads."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._watch is None:
            self._check_reader()

    def _check_reader(self) -> None:
        """Fail a queue whose reader exceeded the timeout; else schedule the next check."""
        self._watch = None
        if self._timeout_s is None or self._is_closed or not self._items:
            return
        left_s = self._unread_since_s + self._timeout_s - time.monotonic()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._check_reader)
            return
        self.fail(SlowReaderError(f"a message was left unread for {self._timeout_s:g} s"))
        self.on_stall()
