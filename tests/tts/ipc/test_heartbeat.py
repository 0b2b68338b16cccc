"""Heartbeats: a peer without them is lost, unless this process itself was stopped."""

from __future__ import annotations

import asyncio

import pytest

from tests.tts.engine.virtual_time import VirtualLoop, run_virtually
from tts.ipc import heartbeat as module
from tts.ipc.heartbeat import LATE_S, Heartbeat

LIMIT_S = 0.2


def test_a_peer_without_heartbeats_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        heartbeat = Heartbeat(LIMIT_S)
        stopping = asyncio.create_task(heartbeat.stopped())
        await asyncio.sleep(2 * LIMIT_S)
        assert not stopping.done(), "it has not begun"
        for _ in range(5):
            heartbeat.beat()
            last_s = asyncio.get_running_loop().time()
            await asyncio.sleep(LIMIT_S / 2)
            assert not stopping.done()
        await stopping
        silent_s = asyncio.get_running_loop().time() - last_s
        assert LIMIT_S <= silent_s <= LIMIT_S + 2 * LATE_S

    run_virtually(scenario(), module, monkeypatch)


def test_heartbeats_received_while_this_process_was_stopped_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        heartbeat = Heartbeat(LIMIT_S)
        heartbeat.beat()
        stopping = asyncio.create_task(heartbeat.stopped())
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.now_s += 3 * (LIMIT_S + LATE_S)  # the whole process stops: no message is read
        loop.call_later(LATE_S / 4, heartbeat.beat)
        await asyncio.sleep(LATE_S / 2)
        assert not stopping.done()
        await stopping

    run_virtually(scenario(), module, monkeypatch)
