"""Prompts computed by one engine and decoded by another: same tokens, all pages given back."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zmq

from llm import (
    ConfigError,
    PageTransfer,
    PeerPool,
    PipelineRole,
    PoolHandle,
    Request,
    SamplingParams,
)
from llm.kv_cache import transfer
from tests.fakes import build_text_checkpoint
from tests.llm.csm_checkpoints import write_csm
from tests.llm.higgs_checkpoints import write_higgs
from tests.llm.lora.adapters import write_adapter
from tests.llm.qwen3_tts_checkpoints import write_qwen3_tts
from tests.tts.engine.jobs import run
from tests.tts.ipc import roles as parts
from tests.tts.ipc.remote_engine import new_base, new_tcp_base, wait_until
from tests.tts.ipc.roles import PAGE, prompt, requests, roles, tokens_of
from tts.engine import prefill_client
from tts.engine.local_client import StreamLimits
from tts.errors import NotAvailableError, SlowReaderError
from tts.ipc import decode_client, engine_server, inbox
from tts.ipc.codec import encode
from tts.ipc.decode_client import DecodeClient
from tts.ipc.endpoints import Endpoints
from tts.ipc.link import Link
from tts.ipc.messages import Cancel, Prefill, Room
from tts.ipc.sockets import MAX_MESSAGE_BYTES

OVERLAP = {"enable_overlap_scheduler": True, "force": True}
CHUNKS = {"max_batch_input_tokens": 40, "max_batch_size": 8}


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("decode", [{}, OVERLAP], ids=["steps", "overlap"])
@pytest.mark.parametrize("prefill", [{}, CHUNKS, OVERLAP], ids=["whole", "chunks", "overlap"])
def test_tokens_are_those_of_one_engine(
    text_checkpoint: Path, prefill: dict[str, Any], decode: dict[str, Any], one_by_one: bool
) -> None:
    async def scenario() -> None:
        asked = requests()
        expected = await parts.oracle(text_checkpoint, asked)
        async with roles(text_checkpoint, prefill=prefill, **decode) as served:
            if one_by_one:
                found = [await tokens_of(served.client, request) for request in asked]
                # Nothing of a prompt is computed by the engine that decodes.
                assert [cached for _, cached in found] == [len(r.prompt_ids) for r in asked]
                assert [tokens for tokens, _ in found] == expected
            else:
                assert await parts.all_tokens(served.client, asked) == expected
            assert served.sent == [served.received]
            assert served.received == sum(-(-len(r.prompt_ids) // PAGE) for r in asked)
            await served.check_released()

    run(scenario)


def test_cached_pages_are_not_sent_again(text_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with roles(text_checkpoint) as served:
            short, long = (Request(f"r{n}", prompt(1, n), SamplingParams(seed=1)) for n in (60, 90))
            assert (await tokens_of(served.client, short))[1] == 60
            assert served.sent == [4]
            tokens, num_cached = await tokens_of(served.client, long)
            assert num_cached == 90
            assert served.sent == [7], "three pages are there"
            computed = served.prefills[0].local.engine.stats().input_tokens
            assert await tokens_of(served.client, long) == (tokens, 80)
            assert served.sent == [7], "less than a page is missing"
            assert served.prefills[0].local.engine.stats().input_tokens == computed
            other = Request("salted", long.prompt_ids, long.sampling, cache_salt="other")
            assert await tokens_of(served.client, other) == (tokens, 90)
            assert served.sent == [13]
            await served.check_released()

    run(scenario)


@pytest.mark.parametrize("write", [write_qwen3_tts, write_csm, write_higgs])
@pytest.mark.parametrize("decode", [{}, OVERLAP], ids=["steps", "overlap"])
def test_frames_are_those_of_one_engine(
    tmp_path: Path, write: Callable[[Path], Path], decode: dict[str, Any]
) -> None:
    """With the texts of frames, and codes that delays force; the first frame comes from the engine
    for prompts.
    """
    folder = write(tmp_path / "model")
    has_texts = write is write_qwen3_tts
    asked = [
        Request(
            f"r{number}",
            tuple((number * 7 + place * 3) % 30 for place in range(50 + number)),
            SamplingParams(
                seed=number,
                temperature=0.9 * (number % 2),
                max_tokens=12,
                ignore_eos=True,
                frame_texts=(5, 7, 9, 3) if has_texts else (),
            ),
        )
        for number in range(4)
    ]

    async def scenario() -> None:
        small = {"max_length": 100}
        expected = await parts.oracle(folder, asked, **small)
        async with roles(folder, prefill=small, **small, **decode) as served:
            found = [await tokens_of(served.client, request) for request in asked]
            assert [cached for _, cached in found] == [len(r.prompt_ids) for r in asked]
            assert [tokens for tokens, _ in found] == expected
            await served.check_released()

    run(scenario)


def test_pages_are_written_into_the_pool(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool of a CPU is a file that the other engine maps, as it maps a GPU's memory."""
    ways = parts.ways_of_pages(monkeypatch)

    async def scenario() -> None:
        asked = requests()
        expected = await parts.oracle(text_checkpoint, asked)
        async with roles(text_checkpoint, count=2) as served:
            assert await parts.all_tokens(served.client, asked) == expected
            assert ways == {parts.WRITTEN}
            assert sum(served.sent) == served.received == 36
            await served.check_released()

    run(scenario)


def test_a_pool_that_cannot_be_mapped_is_not_written(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ways = parts.ways_of_pages(monkeypatch)
    monkeypatch.setattr(PageTransfer, "share", lambda self: PoolHandle(128, "/proc/1/fd/99999"))

    async def scenario() -> None:
        asked = requests(count=3)
        expected = await parts.oracle(text_checkpoint, asked)
        async with roles(text_checkpoint) as served:
            assert await parts.all_tokens(served.client, asked) == expected
            assert ways == {parts.INBOX}
            await served.check_released()

    run(scenario)
    assert caplog.text.count("pages go over the host's memory") == 1


def test_pages_that_arrive_otherwise_are_not_used(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies between some GPUs report success and change nothing. Pages are compared until some of
    them have arrived, also those of prompts that move together.
    """
    ways = parts.ways_of_pages(monkeypatch)
    is_written = threading.Event()
    monkeypatch.setattr(PeerPool, "write", lambda self, *pages: is_written.set())

    async def scenario() -> None:
        asked = requests(count=3)
        expected = await parts.oracle(text_checkpoint, asked)
        async with roles(text_checkpoint) as served:
            first = asyncio.create_task(tokens_of(served.client, replace(asked[0], request_id="c")))
            await asyncio.to_thread(is_written.wait, 60)
            first.cancel()  # before it can compare
            await asyncio.gather(first, return_exceptions=True)
            assert await parts.all_tokens(served.client, asked[:2]) == expected[:2]
            assert parts.WRITTEN in ways
            ways.clear()
            assert (await tokens_of(served.client, asked[2]))[0] == expected[2]
            assert ways == {parts.INBOX}
            await served.check_released()

    run(scenario)
    assert "did not arrive in this engine's pool" in caplog.text


def num_mapped() -> int:
    """Return how often pools are mapped in this process, by their owners and by writers."""
    return Path("/proc/self/maps").read_text().count("memfd:sonant-kv")


def test_the_pool_of_a_reader_that_is_gone_is_unmapped(text_checkpoint: Path) -> None:
    """Else its memory would outlive its process, which is started again and needs as much."""

    async def scenario() -> None:
        (asked,) = requests(count=1)
        base = new_base()
        async with parts.prefill_engine(text_checkpoint, base):
            local = parts.client_of(text_checkpoint, PipelineRole.DecodeOnly)
            gc.collect()  # clients of other tests
            own = num_mapped()
            client = await DecodeClient.connect(local, [base])
            await tokens_of(client, asked)
            assert num_mapped() == own + 1
            client._prefills[0]._link._break()
            await wait_until(lambda: num_mapped() == own)
            await wait_until(lambda: client._prefills[0].takes_work)
            await tokens_of(client, replace(asked, cache_salt="again"))
            assert num_mapped() == own + 1
            await client.close()
            await wait_until(lambda: num_mapped() == own)

    run(scenario)


def test_requests_that_end_at_once(text_checkpoint: Path) -> None:
    """At their first token, which the other engine may have sampled; and with log-probabilities,
    which it does not send.
    """

    async def scenario() -> None:
        sampling = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
        (first,) = await parts.oracle(text_checkpoint, [Request("f", prompt(1, 90), sampling)])
        cases = {
            "one": replace(sampling, max_tokens=1),
            "stop": replace(sampling, ignore_eos=False, stop_token_ids=first[:1]),
            "later": replace(sampling, ignore_eos=False, stop_token_ids=first[1:2]),
            "least": replace(sampling, stop_token_ids=first[:1], ignore_eos=False, min_tokens=3),
            "scored": replace(sampling, top_logprobs=2),
        }
        asked = [Request(name, prompt(1, 90), params) for name, params in cases.items()]
        own = parts.client_of(text_checkpoint, PipelineRole.PrefillAndDecode)
        expected = [await parts.chunks_of(own, request) for request in asked]
        await own.close()
        async with roles(text_checkpoint) as served:
            for request, chunks in zip(asked, expected, strict=True):
                salted = replace(request, cache_salt=request.request_id)
                found = await parts.chunks_of(served.client, salted)
                assert parts.outputs(found) == parts.outputs(chunks), request.request_id
                assert found[-1].output_tokens == chunks[-1].output_tokens
                assert found[-1].prompt_tokens == 90
            await served.check_released()

    run(scenario)


@pytest.mark.parametrize("end", ["cancelled", "lost"])
def test_pages_that_may_be_written_are_not_used(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The request ends, or is computed here, while the other engine still writes its pages."""
    begun, may_end = threading.Event(), threading.Event()
    write_to = PageTransfer.write_to

    def slowly(self: PageTransfer, *arguments: Any) -> None:
        begun.set()
        assert may_end.wait(60)
        write_to(self, *arguments)

    async def scenario() -> None:
        (asked,) = requests(length=200, count=1)
        (expected,) = await parts.oracle(text_checkpoint, [asked])
        monkeypatch.setattr(PageTransfer, "write_to", slowly)
        async with roles(text_checkpoint) as served:
            kv = served.local.engine.pipeline.kv_manager
            running = asyncio.create_task(tokens_of(served.client, asked))
            await asyncio.to_thread(begun.wait, 60)
            if end == "cancelled":
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            else:
                served.client._prefills[0]._link._break()
                assert (await running)[0] == expected
            await asyncio.sleep(0.2)
            assert kv.num_transfers == 1, "its pages are held"
            served.client._transfer.is_on_gpu = True
            may_end.set()
            await served.prefills[0].servers[0].wait_idle(0.01)
            assert kv.num_transfers == 1, "a process that ended would look the same"
            await served.check_released()
            served.client._transfer.is_on_gpu = False
            again = Request("again", asked.prompt_ids, asked.sampling, cache_salt="again")
            await wait_until(lambda: served.client._prefills[0].takes_work)
            assert (await tokens_of(served.client, again))[0] == expected
            await served.check_released()

    run(scenario)


def test_pages_are_free_at_once_if_no_engine_knows_them(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost between the claim and the message with its pages."""
    claim = DecodeClient._claim
    claimed: list[PageTransfer] = []

    async def and_lose(self: DecodeClient, *arguments: Any) -> None:
        await claim(self, *arguments)
        self._prefills[0]._link._break()
        self._transfer.is_on_gpu = True
        claimed.append(self._transfer)

    async def scenario() -> None:
        (asked,) = requests(length=200, count=1)
        (expected,) = await parts.oracle(text_checkpoint, [asked])
        monkeypatch.setattr(DecodeClient, "_claim", and_lose)
        async with roles(text_checkpoint) as served:
            assert await tokens_of(served.client, asked) == (expected, 0)
            assert claimed == [served.client._transfer]
            assert not served.client._releasing
            await served.check_released()

    run(scenario)


@pytest.mark.parametrize("place", ["no shared memory", "full", "another machine"])
def test_pages_travel_in_messages_without_shared_memory(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    ways = parts.ways_of_pages(monkeypatch)

    async def scenario() -> None:
        asked = requests(count=2)
        expected = await parts.oracle(text_checkpoint, asked)
        base = new_base() if place == "no shared memory" else new_tcp_base()
        if place == "no shared memory":
            monkeypatch.setattr(inbox, "FOLDER", tmp_path / "missing")
        elif place == "full":
            monkeypatch.setattr(inbox.Outlet, "put", lambda outlet, data: -1)
        else:
            monkeypatch.setattr(inbox.Outlet, "open", lambda path: None)
        async with roles(text_checkpoint, bases=[base]) as served:
            assert await parts.all_tokens(served.client, asked) == expected
            assert served.sent == [served.received]
            assert served.received == 12
            assert ways == {parts.MESSAGE}
            await served.check_released()

    run(scenario)


def test_many_parts_use_the_slots_in_turn(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 24 pages, in parts of one page, through five slots."""
    ways = parts.ways_of_pages(monkeypatch)

    async def scenario() -> None:
        monkeypatch.setattr("llm.kv_cache.transfer.PART_BYTES", 1)
        asked = requests(length=370, count=3)
        expected = await parts.oracle(text_checkpoint, asked)
        async with roles(text_checkpoint, bases=[new_tcp_base()]) as served:
            assert await parts.all_tokens(served.client, asked) == expected
            assert served.received == 3 * 24
            assert ways == {parts.INBOX}
            assert not [*inbox.FOLDER.glob(f"sonant-pages-{os.getpid()}-*")]
            await served.check_released()

    run(scenario)


def test_requests_that_need_every_prompt_token_are_computed_here(text_checkpoint: Path) -> None:
    async def scenario() -> None:
        echo = SamplingParams(seed=1, max_tokens=2, top_logprobs=0, echo=True)
        async with roles(text_checkpoint, enable_echo=True) as served:
            assert (await tokens_of(served.client, Request("e", prompt(1, 90), echo)))[1] == 0
            single = Request("s", prompt(1, PAGE), SamplingParams(max_tokens=2))
            assert (await tokens_of(served.client, single))[1] == 0
            assert served.sent == [0]
            await served.check_released()

    run(scenario)


def test_cancelled_requests_give_all_pages_back(text_checkpoint: Path) -> None:
    """At every time: before the claim, while the prompt is computed, while pages move."""

    async def scenario() -> None:
        async with roles(text_checkpoint, prefill=CHUNKS) as served:
            asked = requests(length=300, count=1)[0]
            for number in range(12):
                request = Request(f"c{number}", prompt(number, 300), asked.sampling)
                task = asyncio.create_task(tokens_of(served.client, request))
                await asyncio.sleep(0.004 * number)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await served.prefills[0].servers[0].wait_idle(0.01)
            await served.check_released()
            assert not [*inbox.FOLDER.glob(f"sonant-pages-{os.getpid()}-*")]
            [expected] = await parts.oracle(text_checkpoint, [asked])
            assert (await tokens_of(served.client, asked))[0] == expected

    run(scenario)


def test_prompts_wait_for_room_and_decoding_continues(text_checkpoint: Path) -> None:
    """Prompts of 20 pages each for a pool of 31: one after the other, none fails."""

    async def scenario() -> None:
        asked = requests(length=310, count=5)
        expected = await parts.oracle(text_checkpoint, asked)
        small = {"num_pages": 32}
        async with roles(text_checkpoint, cache=small, prefill={"cache": small}) as served:
            assert await parts.all_tokens(served.client, asked) == expected
            await served.check_released()

    run(scenario)


def test_a_prompt_without_room_waits_in_the_scheduler(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused sequence has the pages, whose reader does not read: the scheduler takes them."""

    async def scenario() -> None:
        monkeypatch.setattr(decode_client, "LONGEST_WAIT_S", 0.2)
        limits = StreamLimits(text_chunks=4)
        slow = Request("slow", prompt(1, 60), SamplingParams(max_tokens=40, ignore_eos=True))
        asked = Request("asked", prompt(2, 90), SamplingParams(max_tokens=5))
        [expected, later] = await parts.oracle(text_checkpoint, [asked, slow])
        async with roles(text_checkpoint, cache={"num_pages": 9}, limits=limits) as served:
            chunks = served.client.generate(slow)
            first = await anext(chunks)
            await wait_until(lambda: served.local.engine.stats().paused == 1)
            assert await tokens_of(served.client, asked) == (expected, 0)
            rest = [chunk async for chunk in chunks]
            assert tuple(t for chunk in (first, *rest) for t in chunk.token_ids) == later
            await served.check_released()

    run(scenario)


def test_a_claim_that_comes_too_late_is_released(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the pages that the prompt waits for in the scheduler."""
    claim, num_calls = PageTransfer.claim, 0

    def slowly(self: PageTransfer, *arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            return None
        time.sleep(0.5)
        return claim(self, *arguments)

    async def scenario() -> None:
        monkeypatch.setattr(decode_client, "LONGEST_WAIT_S", 0.2)
        asked = Request("asked", prompt(2, 90), SamplingParams(max_tokens=5))
        [expected] = await parts.oracle(text_checkpoint, [asked])
        async with roles(text_checkpoint, cache={"num_pages": 9}) as served:
            monkeypatch.setattr(PageTransfer, "claim", slowly)
            async with asyncio.timeout(20):
                assert await tokens_of(served.client, asked) == (expected, 0)
            assert num_calls == 2
            await served.check_released()

    run(scenario)


class LateClaims:
    """Claims of an engine that wait until `allow` is called, and whether one has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._may_end = threading.Event(), threading.Event()
        claim = PageTransfer.claim

        def late(transfer: PageTransfer, *arguments: Any) -> Any:
            self.begun.set()
            assert self._may_end.wait(60)
            return claim(transfer, *arguments)

        monkeypatch.setattr(PageTransfer, "claim", late)
        self.allow = self._may_end.set


async def is_computed(served: parts.Roles, number: int = 0) -> None:
    """Wait until an engine for prompts holds a computed prompt."""
    kv = served.prefills[number].local.engine.pipeline.kv_manager
    await wait_until(lambda: kv.num_transfers == 1)


@pytest.mark.parametrize("base", [new_base, new_tcp_base], ids=["pool", "parts"])
def test_a_prompt_is_computed_before_its_claim_is_answered(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, base: Callable[[], str]
) -> None:
    """Nothing of it moves before the pages are claimed."""
    ways = parts.ways_of_pages(monkeypatch)

    async def scenario() -> None:
        asked = requests(count=1)[0]
        [expected] = await parts.oracle(text_checkpoint, [asked])
        async with roles(text_checkpoint, bases=[base()]) as served:
            claims = LateClaims(monkeypatch)
            running = asyncio.create_task(tokens_of(served.client, asked))
            await asyncio.to_thread(claims.begun.wait, 60)
            await is_computed(served)
            await asyncio.sleep(0.1)
            assert (ways, served.received) == (set(), 0)
            claims.allow()
            assert await running == (expected, len(asked.prompt_ids))
            assert ways == {parts.WRITTEN if base is new_base else parts.INBOX}
            await served.check_released()

    run(scenario)


@pytest.mark.parametrize("end", ["cancelled", "lost", "stopped", "reader stopped"])
def test_a_prompt_that_ends_before_its_claim_is_answered(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Cancelled by its caller, or one of the two engines is lost or stops: both release it."""

    async def scenario() -> None:
        asked = requests(count=1)[0]
        [expected] = await parts.oracle(text_checkpoint, [asked])
        async with roles(text_checkpoint, count=2) as served:
            claims = LateClaims(monkeypatch)
            running = asyncio.create_task(tokens_of(served.client, asked))
            await asyncio.to_thread(claims.begun.wait, 60)
            number = served.client._num_open.index(1)
            await is_computed(served, number)
            if end in ("cancelled", "reader stopped"):
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            elif end == "lost":
                served.client._prefills[number]._link._break()
            else:
                await served.prefills[number].stop()
            if end == "reader stopped":
                closing = asyncio.create_task(served.client.close())
                await wait_until(lambda: served.prefills[number].servers[0].num_streams == 0)
                claims.allow()
                await closing
                await parts.check_released(served.prefills[number].local)
                return
            claims.allow()
            if end != "cancelled":
                assert await running == (expected, len(asked.prompt_ids)), "by the other one"
                assert served.received == 6
            await served.check_released()

    run(scenario)


def test_a_claim_that_fails_after_its_prompt_was_sent(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the prompt is computed here, and the others wait for room before they are sent."""

    async def scenario() -> None:
        monkeypatch.setattr(decode_client, "LONGEST_WAIT_S", 0.3)
        asked = requests(count=3)
        expected = await parts.oracle(text_checkpoint, asked)
        async with roles(text_checkpoint) as served:
            monkeypatch.setattr(PageTransfer, "claim", lambda *arguments: None)
            claims = LateClaims(monkeypatch)
            running = asyncio.create_task(parts.all_tokens(served.client, asked))
            await is_computed(served)
            await asyncio.sleep(0.1)
            assert served.prefills[0].servers[0].num_streams == 1
            claims.allow()
            assert await running == expected
            assert (served.sent, served.received) == ([0], 0)
            await served.prefills[0].servers[0].wait_idle(0.01)
            await served.check_released()

    run(scenario)


def test_a_prompt_without_room_is_not_kept_for_ever(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader is there, and never names the room."""
    monkeypatch.setattr(engine_server, "PAGES_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with roles(text_checkpoint) as served:
            async with served.client._prefills[0].prefill(requests(count=1)[0]) as prompt:
                await is_computed(served)
                await served.prefills[0].servers[0].wait_idle(0.01)
                with pytest.raises(SlowReaderError, match="had no room"):
                    await anext(prompt.pages(0))
            await served.check_released()

    run(scenario)


def test_a_lone_sequence_outlives_pages_that_are_held_for_a_transfer(
    text_checkpoint: Path,
) -> None:
    """It needs a page that only the end of the transfer frees, and waits for it."""

    async def scenario() -> None:
        asked = Request("lone", prompt(1, 20), SamplingParams(max_tokens=60, ignore_eos=True))
        [expected] = await parts.oracle(text_checkpoint, [asked])
        async with roles(text_checkpoint, cache={"num_pages": 8}) as served:
            engine, transfer = served.local.engine, served.local.engine.transfer
            assert transfer is not None
            chunks = served.client.generate(asked)
            first = await anext(chunks)
            held = Request("held", prompt(2, 60), SamplingParams())
            claiming = engine.run_on_engine(lambda: transfer.claim("held", held))
            claim = await asyncio.wrap_future(claiming)
            assert claim is not None
            await asyncio.sleep(0.2)
            assert engine.stats().running == 1, "it waits"
            engine.run_on_engine(lambda: transfer.release(claim))
            rest = [chunk async for chunk in chunks]
            assert not rest[-1].error
            found = [token for chunk in (first, *rest) for token in chunk.token_ids]
            assert tuple(found) == expected
            await served.check_released()

    run(scenario)


def test_a_lost_engine_is_replaced_by_another_or_by_the_own_one(
    text_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        asked = requests(length=300)
        expected = await parts.oracle(text_checkpoint, asked)
        async with roles(text_checkpoint, count=2, prefill=CHUNKS) as served:
            running = asyncio.create_task(parts.all_tokens(served.client, asked))
            await wait_until(lambda: min(served.sent) > 0)
            await served.prefills[0].stop()
            assert await running == expected
            others = [Request(f"x{r.request_id}", r.prompt_ids, r.sampling) for r in asked]
            await served.prefills[1].stop()
            again = [Request(r.request_id, r.prompt_ids, r.sampling, 0, "salt") for r in others]
            assert await parts.all_tokens(served.client, again) == expected
            before = served.received
            await served.prefills[0].start()
            await wait_until(lambda: served.client._prefills[0].takes_work)
            last = [Request(r.request_id, r.prompt_ids, r.sampling, 0, "more") for r in others]
            assert await parts.all_tokens(served.client, last) == expected
            assert served.received > before
            await served.check_released()

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert "computed here" in caplog.text


@pytest.mark.parametrize("difference", ["weights", "page size", "server"])
def test_an_engine_with_other_pages_is_one_clear_error(
    text_checkpoint: Path, tmp_path: Path, difference: str
) -> None:
    async def scenario() -> None:
        base = new_base()
        other, values = text_checkpoint, {}
        if difference == "weights":
            other = build_text_checkpoint(tmp_path / "other", seed=5)
        elif difference == "page size":
            values = {"cache": {"kv_cache_page_size": 32}}
        async with parts.prefill_engine(other, base, **values) as prefill:
            if difference == "server":
                server = prefill.servers[0]
                server._endpoints = prefill.endpoints
            local = parts.client_of(text_checkpoint, PipelineRole.DecodeOnly)
            with pytest.raises(ConfigError) as error:
                await DecodeClient.connect(local, [base])
        message = str(error.value)
        assert message.startswith(f"prefill_endpoints={base}: that engine's pages cannot be used")
        assert "this engine has weights" in message
        assert "16 tokens per page" in message
        assert ("32 tokens per page" in message) == (difference == "page size")

    run(scenario)


def test_an_engine_for_prompts_refuses_to_generate(text_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with roles(text_checkpoint) as served:
            asked = requests(count=1)[0]
            remote = served.client._prefills[0]
            with pytest.raises(NotAvailableError, match="computes prompts for other engines only"):
                await tokens_of(remote, asked)
            await served.check_released()

    run(scenario)


def test_a_failed_prompt_is_computed_here(text_checkpoint: Path) -> None:
    """Engines for prompts that accept shorter ones only."""

    async def scenario() -> None:
        asked = requests(length=300, count=2)
        expected = await parts.oracle(text_checkpoint, asked)
        async with roles(text_checkpoint, prefill={"max_length": 100}) as served:
            assert await parts.all_tokens(served.client, asked) == expected
            assert served.received == 0
            await served.check_released()

    run(scenario)


def test_closing_the_iterator_early_releases_the_pages(text_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with roles(text_checkpoint) as served:
            remote, asked = served.client._prefills[0], requests(length=300, count=1)[0]
            async with remote.prefill(asked) as prompt, aclosing(prompt.pages(0)) as answers:
                async for pages in answers:
                    assert pages.num_pages
                    break
            await served.prefills[0].servers[0].wait_idle(0.01)
            await served.check_released()

    run(scenario)


@pytest.mark.parametrize(
    "wrong", ["too short", "too many pages", "no such slot", "too many written"]
)
def test_wrong_pages_are_not_used(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    async def scenario() -> None:
        asked = requests(count=2)
        expected = await parts.oracle(text_checkpoint, asked)
        if wrong == "too short":
            monkeypatch.setattr(PageTransfer, "read", lambda self, pages: np.zeros(7, np.uint8))
        elif wrong.startswith("too many"):
            part = prefill_client.PagePart
            too_many = lambda n, *rest, **named: part(99, *rest, **named)  # noqa: E731
            monkeypatch.setattr(prefill_client, "PagePart", too_many)
        else:
            monkeypatch.setattr(inbox.Outlet, "put", lambda outlet, data: prefill_client.NUM_SLOTS)
        base = new_base() if wrong == "too many written" else new_tcp_base()
        async with roles(text_checkpoint, bases=[base]) as served:
            assert await parts.all_tokens(served.client, asked) == expected
            assert served.received == 0
            await served.check_released()

    run(scenario)


def invalid_messages(name: str) -> list[bytes]:
    """Return messages that are none, and some whose fields are invalid or dangerous."""
    asked = requests(count=1)[0]
    unknown = Request("u", (10**6, 10**7), SamplingParams())
    works = [
        Prefill("unknown", 0, asked),
        Room("unknown", 0, 0),
        Room(name, 0, 0),
        Prefill(name, 0, unknown),
        Prefill(name, 1, asked),
        Room(name, 1, -1),
        Room(name, 1, 0),
        *(Prefill(name, number, asked) for number in range(2, 6)),
        Room(name, 2, 10**9, "/etc/passwd"),
        Room(name, 3, 0, f"{inbox.FOLDER}/../../etc/passwd"),
        Room(name, 4, 0, "x" * 100_000),
        Room(name, 5, 0, "", PoolHandle(10**9, "/etc/passwd"), (1, -2)),
        Room(name, 5, 0),
        Cancel(name, 10**9),
    ]
    return [b"", b"\x00" * 40, b"\xc1" * 1000, *map(encode, works)]


def test_invalid_messages_do_no_harm(text_checkpoint: Path) -> None:
    """A process that knows the format sends nonsense, and a message beyond the largest size."""

    async def scenario() -> None:
        asked = requests(count=3)
        expected = await parts.oracle(text_checkpoint, asked)
        async with roles(text_checkpoint, bases=[new_tcp_base()]) as served:
            prefill = served.prefills[0]
            endpoints = Endpoints.of(
                prefill.endpoints.base, prefill.servers[0]._endpoints.server_id
            )
            with zmq.Context() as context:
                link = Link(endpoints, "test", context)
                await link.welcome()
                for address in (endpoints.request, endpoints.cancel, endpoints.control):
                    for message in (*invalid_messages(link.name), bytes(MAX_MESSAGE_BYTES + 1)):
                        with context.socket(zmq.PUSH) as sender:
                            sender.connect(address)
                            await asyncio.to_thread(sender.send, message)
                            await asyncio.sleep(0.01)
                assert await parts.all_tokens(served.client, asked) == expected
                assert served.received == 18
                link.close()
            await prefill.servers[0].wait_idle(0.01)
            await served.check_released()

    run(scenario)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm(text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Random lengths, shared beginnings and cancellations in small pools, while an engine for
    prompts is stopped and started: whatever ends has the right tokens, and all pages come back.
    """
    if seed == 2:
        parts.write_while_steps_run(monkeypatch, wait_s=0.002)
    random = Random(seed)
    asked = [
        Request(
            f"s{number}",
            (prompt(random.randrange(4), 200)[: random.randrange(1, 200)] + prompt(number, 150))[
                : random.randrange(1, 300)
            ],
            SamplingParams(seed=number, temperature=0.7 * (number % 2), max_tokens=12),
        )
        for number in range(60)
    ]

    async def scenario() -> None:
        expected = await parts.oracle(text_checkpoint, asked)
        small = {"num_pages": 48}
        options = {"cache": small, "max_batch_input_tokens": 64}
        async with roles(text_checkpoint, count=2, prefill=options, **options) as served:
            ended = 0

            async def one(request: Request, tokens: tuple[int, ...]) -> None:
                nonlocal ended
                await asyncio.sleep(random.random())
                task = asyncio.create_task(tokens_of(served.client, request))
                if random.random() < 0.3:
                    await asyncio.sleep(random.random() / 5)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                else:
                    assert (await task)[0] == tokens
                    ended += 1

            async def restarts() -> None:
                while True:
                    await asyncio.sleep(0.2)
                    await served.prefills[0].stop()
                    await asyncio.sleep(0.1)
                    await served.prefills[0].start()

            restarting = asyncio.create_task(restarts())
            await asyncio.gather(*map(one, asked, expected))
            restarting.cancel()
            await asyncio.gather(restarting, return_exceptions=True)
            assert ended > 30
            assert served.received > 20
            await served.check_released()

    run(scenario)


def test_prompts_of_adapters_are_computed_where_they_decode(
    text_checkpoint: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        adapter = str(write_adapter(tmp_path / "low", text_checkpoint))
        lora = {"lora": {"enable_lora": True, "lora_paths": [adapter]}}
        plain = Request("r", prompt(1, 90), SamplingParams(seed=1, max_tokens=20))
        adapted = Request("a", plain.prompt_ids, plain.sampling, lora="low")
        own = parts.client_of(text_checkpoint, PipelineRole.PrefillAndDecode, **lora)
        expected = await parts.all_tokens(own, [plain, adapted])
        await own.close()
        assert expected[0] != expected[1]
        async with roles(text_checkpoint, prefill=lora, **lora) as served:
            assert await parts.all_tokens(served.client, [plain, adapted]) == expected
            assert served.received == 6  # of the plain one

    run(scenario)


def test_a_lost_reader_leaves_no_pages_behind(text_checkpoint: Path) -> None:
    """Its connection breaks without a word, while prompts are computed and while pages move."""

    async def scenario() -> None:
        asked = requests(length=300, count=4)
        expected = await parts.oracle(text_checkpoint, asked)
        large = {"num_pages": 400}  # all of the claims at once
        async with roles(text_checkpoint, prefill=CHUNKS, cache=large) as served:
            running = asyncio.create_task(parts.all_tokens(served.client, asked))
            await wait_until(lambda: served.prefills[0].servers[0].num_streams == 4)
            served.client._prefills[0]._link._break()
            assert await running == expected
            await served.prefills[0].servers[0].wait_idle(0.01)
            await served.check_released()
            await wait_until(lambda: served.client._prefills[0].takes_work)

    run(scenario)


def test_a_reader_that_reads_no_pages_does_not_keep_them(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_server, "PAGES_TIMEOUT_S", 0.2)
    monkeypatch.setattr(transfer, "PART_BYTES", 1)  # a part for each page: more than a window

    async def scenario() -> None:
        async with roles(text_checkpoint) as served:
            (asked,) = requests(length=300, count=1)
            async with served.client._prefills[0].prefill(asked) as prompt:
                answers = prompt.pages(0)
                assert (await anext(answers)).num_pages == 1
                await served.prefills[0].servers[0].wait_idle(0.01)  # although the reader is there
                with pytest.raises(SlowReaderError):
                    async for _ in answers:
                        pass
            await served.check_released()

    run(scenario)
