"""The bounded queue between the engine thread and the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable

import pytest

from tests.tts.engine.virtual_time import run_virtually
from tts.engine import queue as stream_queue
from tts.engine.queue import StreamQueue, Wakeups
from tts.errors import SlowReaderError


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), timeout=60)

    asyncio.run(bounded())


def test_items_cross_threads_in_order() -> None:
    async def scenario() -> None:
        queue: StreamQueue[int] = StreamQueue(4)
        producer = threading.Thread(target=lambda: [queue.put(n) for n in range(1000)])
        producer.start()
        assert [await queue.get() for _ in range(1000)] == list(range(1000))
        producer.join()
        assert len(queue) == 0

    in_loop(scenario)


def test_an_item_put_while_the_reader_waits_wakes_it() -> None:
    async def scenario() -> None:
        queue: StreamQueue[str] = StreamQueue(1)
        reader = asyncio.create_task(queue.get())
        await asyncio.sleep(0.01)
        assert not reader.done()
        await asyncio.to_thread(queue.put, "late")
        assert await reader == "late"

    in_loop(scenario)


def test_readers_of_many_queues_are_woken_together() -> None:
    async def scenario() -> None:
        wakeups = Wakeups()
        queues = [StreamQueue[int](4, wakeups=wakeups) for _ in range(3)]
        readers = [asyncio.create_task(queue.get()) for queue in queues]
        await asyncio.sleep(0)
        for number, queue in enumerate(queues):
            queue.put(number)
            queue.put(number + 10)
        await asyncio.sleep(0.01)
        assert not any(reader.done() for reader in readers)
        await asyncio.to_thread(wakeups.flush)
        assert await asyncio.gather(*readers) == [0, 1, 2]
        assert [await queue.get() for queue in queues] == [10, 11, 12]

    in_loop(scenario)


def test_a_flush_can_wait_until_the_readers_have_passed_their_items_on() -> None:
    async def scenario() -> None:
        wakeups, passed = Wakeups(), list[int]()
        queue = StreamQueue[int](4, wakeups=wakeups)

        async def forward() -> None:
            passed.append(await asyncio.create_task(queue.get()))

        def produce() -> list[int]:
            queue.put(1)
            wakeups.flush(10.0)
            return passed.copy()

        reader = asyncio.create_task(forward())
        await asyncio.sleep(0.01)
        assert await asyncio.to_thread(produce) == [1]
        await reader

    in_loop(scenario)


def test_wakeups_reach_each_loop_and_outlive_a_closed_one() -> None:
    async def build() -> StreamQueue[int]:
        return StreamQueue(4, wakeups=wakeups)

    async def scenario() -> None:
        open_queue = await build()
        reader = asyncio.create_task(open_queue.get())
        await asyncio.sleep(0)
        for queue in (closed_queue, open_queue):
            queue.put(1)
        wakeups.flush()
        wakeups.flush()
        assert await asyncio.wait_for(reader, 60) == 1

    wakeups = Wakeups()
    closed_queue = asyncio.run(build())
    in_loop(scenario)


def test_an_item_that_is_being_put_does_not_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timeout is checked in the middle of a `put`, long after the last read."""

    async def scenario() -> None:
        queue: StreamQueue[int] = StreamQueue(4, timeout_s=0.05)
        queue._lock = threading.RLock()

        class Watched(deque[int]):
            def append(self, item: int) -> None:
                super().append(item)
                queue._check_reader()

        queue._items = Watched()
        for item in (1, 2):
            await asyncio.sleep(0.1)
            queue.put(item)
            assert await queue.get() == item

    run_virtually(scenario(), stream_queue, monkeypatch)


def test_room_is_counted_but_not_enforced() -> None:
    async def scenario() -> None:
        queue: StreamQueue[int] = StreamQueue(2)
        assert (queue.room, queue.is_full) == (2, False)
        for n in range(3):
            queue.put(n)
        assert (queue.room, queue.is_full) == (0, True)
        assert [await queue.get() for _ in range(3)] == [0, 1, 2]

    in_loop(scenario)


def test_the_owner_is_notified_when_a_full_queue_gets_room() -> None:
    async def scenario() -> None:
        heard: list[int] = []
        queue: StreamQueue[int] = StreamQueue(2)
        queue.on_room = lambda: heard.append(len(queue))
        for n in range(2):
            queue.put(n)
        await queue.get()
        await queue.get()
        assert heard == [1]  # the second one was taken from a queue with room

    in_loop(scenario)


def test_a_failure_replaces_queued_items() -> None:
    async def scenario() -> None:
        queue: StreamQueue[int] = StreamQueue(4)
        queue.put(1)
        queue.fail(ValueError("first"))
        queue.fail(ValueError("second"))
        queue.put(2)
        for _ in range(2):
            with pytest.raises(ValueError, match="first"):
                await queue.get()
        assert len(queue) == 0

    in_loop(scenario)


def test_failure_reaches_a_waiting_reader() -> None:
    async def scenario() -> None:
        queue: StreamQueue[int] = StreamQueue(4)
        reader = asyncio.create_task(queue.get())
        await asyncio.sleep(0.01)
        await asyncio.to_thread(queue.fail, ValueError("gone"))
        with pytest.raises(ValueError, match="gone"):
            await reader

    in_loop(scenario)


def test_an_unread_item_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        stalled = asyncio.Event()
        queue: StreamQueue[int] = StreamQueue(4, timeout_s=0.05)
        queue.on_stall = stalled.set
        queue.put(1)
        await stalled.wait()
        with pytest.raises(SlowReaderError, match=r"0\.05 s"):
            await queue.get()

    run_virtually(scenario(), stream_queue, monkeypatch)


def test_a_reader_that_waits_for_the_producer_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        queue: StreamQueue[int] = StreamQueue(4, timeout_s=0.05)
        for n in range(4):
            asyncio.get_running_loop().call_later(0.04 * n, queue.put, n)
        assert [await queue.get() for _ in range(4)] == [0, 1, 2, 3]
        await asyncio.sleep(0.1)  # empty for twice the limit
        queue.put(4)
        await asyncio.sleep(0.02)
        assert await queue.get() == 4

    run_virtually(scenario(), stream_queue, monkeypatch)


def test_a_reader_that_takes_items_one_by_one_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        queue: StreamQueue[int] = StreamQueue(8, timeout_s=0.1)
        for n in range(8):
            queue.put(n)
        for n in range(8):  # 0.24 s in all, 0.03 s each
            await asyncio.sleep(0.03)
            assert await queue.get() == n

    run_virtually(scenario(), stream_queue, monkeypatch)


def test_a_closed_queue_takes_no_items_and_does_not_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        stalls: list[bool] = []
        queue: StreamQueue[int] = StreamQueue(4, timeout_s=0.02)
        queue.on_stall = lambda: stalls.append(True)
        queue.put(1)
        await asyncio.sleep(0)  # the watch is armed
        queue.close()
        queue.put(2)
        await asyncio.sleep(0.06)
        assert (len(queue), stalls) == (0, [])

    run_virtually(scenario(), stream_queue, monkeypatch)


def test_a_producer_outlives_the_loop() -> None:
    async def build() -> StreamQueue[int]:
        return StreamQueue(4)

    queue = asyncio.run(build())
    queue.put(1)
    queue.fail(ValueError("no reader"))
    assert len(queue) == 0
