"""Pages that are written while the step that computes them runs, as between GPUs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from llm import PeerPool, TokenChunk
from llm.memory.shared_file import SharedFile
from llm.scheduler import Scheduler
from tests.tts.engine.jobs import run
from tests.tts.ipc import roles as parts
from tests.tts.ipc.roles import requests, roles, tokens_of

pytestmark = pytest.mark.skipif(not SharedFile.is_available(), reason="needs files in memory")
CHUNKS = {"max_batch_input_tokens": 40, "max_batch_size": 8}


@pytest.mark.parametrize("prefill", [{}, CHUNKS], ids=["whole", "chunks"])
def test_tokens_are_those_of_one_engine(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, prefill: dict[str, Any]
) -> None:
    early = parts.write_while_steps_run(monkeypatch, wait_s=0.2)
    ways = parts.ways_of_pages(monkeypatch)

    async def scenario() -> None:
        asked = requests(count=4)
        expected = await parts.oracle(text_checkpoint, asked)
        async with roles(text_checkpoint, prefill=prefill) as served:
            assert await parts.all_tokens(served.client, asked) == expected
            assert ways == {parts.WRITTEN}
            assert len(early) == len(asked), "each prompt is written once"
            assert any(early)
            assert sum(served.sent) == served.received == 24
            await served.check_released()

    run(scenario)


def test_a_pool_that_cannot_be_written_has_its_pages_read(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    early = parts.write_while_steps_run(monkeypatch, wait_s=0.2)
    ways = parts.ways_of_pages(monkeypatch)

    def failing(self: PeerPool, *pages: Any) -> None:
        raise RuntimeError("no copies")

    monkeypatch.setattr(PeerPool, "write", failing)

    async def scenario() -> None:
        asked = requests(count=2)
        expected = await parts.oracle(text_checkpoint, asked)
        async with roles(text_checkpoint) as served:
            assert await parts.all_tokens(served.client, asked) == expected
            assert (ways, early) == ({parts.INBOX}, [])
            await served.check_released()

    run(scenario)
    assert "pages go over the host's memory: no copies" in caplog.text


def test_a_step_that_fails_after_its_launch(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages that were written are not used: the prompt is computed here."""
    failed: list[bool] = []
    commit = Scheduler.commit

    def failing(self: Scheduler, batch: Any, *arguments: Any) -> list[TokenChunk]:
        if any(sequence.kept_as for sequence in self._in_flight._steps[0].sequences):
            failed.append(True)
            return self.fail(batch, "the device has failed")
        return commit(self, batch, *arguments)

    monkeypatch.setattr(Scheduler, "commit", failing)
    early = parts.write_while_steps_run(monkeypatch, wait_s=0.2)

    async def scenario() -> None:
        asked = requests(count=2)
        async with roles(text_checkpoint) as served:
            found = [await tokens_of(served.client, request) for request in asked]
            assert len(failed) == 2
            assert early == [True, True]
            assert [cached for _, cached in found] == [0, 0]
            assert served.received == 0
            await served.check_released()
        monkeypatch.undo()
        assert [tokens for tokens, _ in found] == await parts.oracle(text_checkpoint, asked)

    run(scenario)


def test_pages_are_held_while_they_are_written(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller leaves while the step runs and its pages are written."""
    begun, may_end = threading.Event(), threading.Event()
    write = PeerPool.write

    def slowly(self: PeerPool, *arguments: Any) -> None:
        begun.set()
        assert may_end.wait(60)
        write(self, *arguments)

    monkeypatch.setattr(PeerPool, "write", slowly)
    parts.write_while_steps_run(monkeypatch, wait_s=0.2)

    async def scenario() -> None:
        (asked,) = requests(length=200, count=1)
        async with roles(text_checkpoint) as served:
            kept = served.prefills[0].local.engine.pipeline.kv_manager
            claimed = served.local.engine.pipeline.kv_manager
            running = asyncio.create_task(tokens_of(served.client, asked))
            await asyncio.to_thread(begun.wait, 60)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await asyncio.sleep(0.4)  # the step has ended
            assert (kept.num_claims, claimed.num_transfers) == (1, 1), "both ends hold the pages"
            may_end.set()
            await served.check_released()

    run(scenario)
