"""Engines with roles in this process: real engines, real sockets, pages that really move."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceABC
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq

from llm import (
    PageTransfer,
    PeerPool,
    PipelineConfig,
    PipelineRole,
    Request,
    SamplingParams,
    TokenChunk,
    create_engine,
)
from llm.scheduler import Scheduler
from llm.sequence import Sequence
from tests.fakes import wait_until_idle
from tests.tts.ipc.remote_engine import engine_info_of, new_base, wait_until
from tts.engine.client import EngineClient
from tts.engine.local_client import LocalEngineClient, StreamLimits
from tts.engine.prefill_client import PrefillClient
from tts.ipc.decode_client import DecodeClient
from tts.ipc.endpoints import Endpoints, reserved
from tts.ipc.engine_server import EngineServer
from tts.ipc.messages import Pages
from tts.ipc.remote_client import RemotePrompt

PAGE = 16
_generated: dict[str, list[tuple[int, ...]]] = {}
WRITTEN, INBOX, MESSAGE = "written to the pool", "in shared memory", "in messages"


def config(checkpoint: Path, role: PipelineRole, **values: Any) -> PipelineConfig:
    cache = {"kv_cache_page_size": PAGE, "num_pages": 128} | values.pop("cache", {})
    model = {"model_path": str(checkpoint), "kv_cache": cache}
    bases = ["ipc:///unused"] if role is PipelineRole.DecodeOnly else []
    own = {"max_batch_size": 8, "max_length": 400} | values
    return PipelineConfig(model=model, pipeline_role=role, prefill_endpoints=bases, **own)


def client_of(checkpoint: Path, role: PipelineRole, **values: Any) -> LocalEngineClient:
    return LocalEngineClient(create_engine(config(checkpoint, role, **values)))


def prompt(number: int, length: int) -> tuple[int, ...]:
    """Return a prompt of its own from the first token on."""
    return tuple((number * 37 + place * 11) % 200 for place in range(length))


def requests(length: int = 90, count: int = 6) -> list[Request]:
    """Return prompts of about this length, with greedy and seeded sampling, some with penalties."""
    return [
        Request(
            f"r{number}",
            prompt(number, length + number),
            SamplingParams(
                seed=number,
                temperature=0.8 if number % 2 else 0.0,
                repetition_penalty=1.2 if number % 3 == 0 else 1.0,
                max_tokens=20,
                ignore_eos=True,
            ),
        )
        for number in range(count)
    ]


async def tokens_of(client: EngineClient, request: Request) -> tuple[tuple[int, ...], int]:
    """Return the tokens of a request, and the number of prompt tokens that were not computed."""
    chunks = [chunk async for chunk in client.generate(request)]
    assert not chunks[-1].error
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return tuple(tokens), chunks[-1].cached_prompt_tokens  # type: ignore[arg-type]


async def chunks_of(client: EngineClient, request: Request) -> list[TokenChunk]:
    return [chunk async for chunk in client.generate(request)]


def outputs(chunks: SequenceABC[TokenChunk]) -> tuple[Any, ...]:
    """Return what a caller sees of an answer, however it is divided."""
    return (
        [token for chunk in chunks for token in chunk.token_ids],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        chunks[-1].finish_reason,
        chunks[-1].error,
    )


def ways_of_pages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set that will have the ways in which pages arrive."""
    ways: set[str] = set()
    all_pages = RemotePrompt.pages

    async def watched(self: RemotePrompt, *arguments: Any, **named: Any) -> AsyncIterator[Pages]:
        async with aclosing(all_pages(self, *arguments, **named)) as answers:
            async for pages in answers:
                if pages.num_pages:
                    ways.add(WRITTEN if pages.is_written else INBOX if pages.slot >= 0 else MESSAGE)
                yield pages

    monkeypatch.setattr(RemotePrompt, "pages", watched)
    return ways


def write_while_steps_run(monkeypatch: pytest.MonkeyPatch, wait_s: float = 0.02) -> list[bool]:
    """Have the pages of a CPU written before the token of their prompt arrives, as those of a GPU.

    Returns a list with one entry for each write: whether the step was still running.
    """
    commit, write_to = Scheduler.commit, PageTransfer.write_to
    running: set[tuple[int, ...]] = set()
    found: list[bool] = []

    def commit_late(self: Scheduler, *arguments: Any) -> list[TokenChunk]:
        launched = [s for s in self._in_flight._steps[0].sequences if is_whole(s)]
        pages = {tuple(sequence.pages) for sequence in launched}
        running.update(pages)
        for sequence in launched:
            assert sequence.on_launched is not None
            sequence.on_launched(sequence.pages)
        if launched:
            time.sleep(wait_s)
        running.difference_update(pages)
        return commit(self, *arguments)

    def is_whole(sequence: Sequence) -> bool:
        return sequence.on_launched is not None and sequence.active_end == sequence.extend_end

    def watched(
        self: PageTransfer, peer: PeerPool, pages: Any, own_pages: Any, stored: Any
    ) -> None:
        is_early = any({*own_pages} <= {*each} for each in tuple(running))
        write_to(self, peer, pages, own_pages, stored)
        found.append(is_early)

    monkeypatch.setattr(PageTransfer, "writes_early", True)
    monkeypatch.setattr(PageTransfer, "write_to", watched)
    monkeypatch.setattr(Scheduler, "commit", commit_late)
    return found


async def all_tokens(client: EngineClient, asked: SequenceABC[Request]) -> list[tuple[int, ...]]:
    """Return the tokens of requests that run together."""
    found = await asyncio.gather(*(tokens_of(client, request) for request in asked))
    return [tokens for tokens, _ in found]


async def oracle(
    checkpoint: Path, asked: SequenceABC[Request], **values: Any
) -> list[tuple[int, ...]]:
    """Return the tokens that one engine generates; the same requests are asked once."""
    key = repr((checkpoint, asked, values))
    if key not in _generated:
        client = client_of(checkpoint, PipelineRole.PrefillAndDecode, **values)
        try:
            _generated[key] = await all_tokens(client, asked)
        finally:
            await client.close()
    return _generated[key]


async def check_released(client: LocalEngineClient) -> None:
    """Wait until no page is held, and check all counts of the pages."""
    await wait_until_idle(client)
    kv = client.engine.pipeline.kv_manager

    def check() -> None:
        kv.check_integrity()
        assert (kv.num_claims, kv.num_transfers, kv.used_pages) == (0, 0, 0)

    await asyncio.wrap_future(client.engine.run_on_engine(check))


@dataclass
class Prefill:
    """One engine for prompts and its server."""

    local: LocalEngineClient
    endpoints: Endpoints
    context: zmq.Context
    servers: list[EngineServer] = field(default_factory=list)

    async def start(self) -> None:
        client = PrefillClient(self.local)
        endpoints = Endpoints.of(self.endpoints.base, client.page_format)
        server = EngineServer(client, engine_info_of(client), endpoints, None, self.context)
        self.servers.append(server)
        await server.start()

    async def stop(self) -> None:
        while self.servers:
            await self.servers.pop().close()


@dataclass
class Roles:
    """Engines for prompts, and one that decodes."""

    prefills: list[Prefill]
    local: LocalEngineClient
    client: DecodeClient

    @property
    def sent(self) -> list[int]:
        """Number of pages that each engine for prompts has sent."""
        return [prefill.local.engine.stats().pages_sent for prefill in self.prefills]

    @property
    def received(self) -> int:
        return self.local.engine.stats().pages_received

    async def check_released(self) -> None:
        await wait_until(lambda: not self.client._releasing)
        for client in (self.local, *(prefill.local for prefill in self.prefills)):
            await check_released(client)


@asynccontextmanager
async def prefill_engine(checkpoint: Path, base: str, **values: Any) -> AsyncIterator[Prefill]:
    """Serve an engine for prompts at a base."""
    async with AsyncExitStack() as ending:
        context = ending.enter_context(zmq.Context())
        endpoints = ending.enter_context(reserved(base))
        local = client_of(checkpoint, PipelineRole.PrefillOnly, **values)
        ending.push_async_callback(local.close)
        prefill = Prefill(local, endpoints, context)
        ending.push_async_callback(prefill.stop)
        await prefill.start()
        yield prefill


@asynccontextmanager
async def roles(
    checkpoint: Path,
    *,
    count: int = 1,
    bases: SequenceABC[str] = (),
    prefill: dict[str, Any] | None = None,
    watermark: float = 0.95,
    limits: StreamLimits | None = None,
    **values: Any,
) -> AsyncIterator[Roles]:
    """Run `count` engines for prompts and one that decodes; everything is closed afterwards.

    `prefill`: configuration of the engines for prompts, `values` of the other.
    """
    async with AsyncExitStack() as ending:
        addresses = [*bases] or [new_base() for _ in range(count)]
        prefills = [
            await ending.enter_async_context(prefill_engine(checkpoint, base, **(prefill or {})))
            for base in addresses
        ]
        engine = create_engine(config(checkpoint, PipelineRole.DecodeOnly, **values))
        local = LocalEngineClient(engine, limits=limits)
        client = await DecodeClient.connect(local, addresses, watermark)
        ending.push_async_callback(client.close)
        yield Roles(prefills, local, client)
