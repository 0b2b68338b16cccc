"""An event loop on a thread of its own, so that callers need none and may have another one.

caller's thread or loop          loop thread
submit ────────────────────────▶ coroutine
Future.result() / wrap_future ◀── its result
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

END_S = 1.0  # for what runs to end by itself, as requests do when their engine has stopped


class LoopThread:
    """Runs coroutines of any thread on one event loop. `stop` ends it."""

    def __init__(self) -> None:
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._lock = threading.RLock()  # the garbage collector may submit, too
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="speech", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._loop.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        if running := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(running, timeout=END_S)

    @property
    def is_stopped(self) -> bool:
        """Whether nothing can be submitted any more."""
        return self._is_stopped

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the loop's thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, Item]) -> Future[Item]:
        """Start a coroutine; cancelling the future cancels it.

        Raises `RuntimeError` once the loop is stopped.
        """
        with self._lock:
            if not self._is_stopped:
                return asyncio.run_coroutine_threadsafe(work, self._loop.result())
        work.close()
        raise RuntimeError("the voice is closed")

    def stop(self) -> None:
        """End the thread; what has not ended within `END_S` is cancelled. Calling it again is
        harmless.
        """
        with self._lock:
            self._is_stopped, was_stopped = True, self._is_stopped
        if not was_stopped:
            self._loop.result().call_soon_threadsafe(self._stop.set)
            self._thread.join()


class RemoteIterator(Generic[Item]):
    """An asynchronous generator that runs on a `LoopThread`, one item per call of `next`."""

    def __init__(self, loop: LoopThread, items: AsyncGenerator[Item, None]) -> None:
        self._loop, self._items = loop, items
        self._turn = asyncio.Lock()  # a cancelled `next` has ended before `close` begins

    def next(self) -> Future[Item | None]:
        """Return the next item; None at the end. Raises `RuntimeError` once the loop is stopped."""
        return self._loop.submit(self._next())

    def close(self) -> Future[None]:
        """End the generator, wherever it is. A loop that stopped has ended it already."""
        try:
            return self._loop.submit(self._close())
        except RuntimeError:
            ended: Future[None] = Future()
            ended.set_result(None)
            return ended

    def discard(self) -> None:
        """End the generator of a caller that may be the garbage collector.

        That runs on any thread, also on the loop's own, and when the interpreter ends: then there
        is nothing to wait for.
        """
        if not sys.is_finalizing():
            ended = self.close()
            if not self._loop.is_current:
                wait(ended)

    async def _next(self) -> Item | None:
        async with self._turn:
            return await anext(self._items, None)

    async def _close(self) -> None:
        async with self._turn:
            await self._items.aclose()


def wait(future: Future[Item]) -> Item:
    """The result; a caller that is interrupted meanwhile cancels the work."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
