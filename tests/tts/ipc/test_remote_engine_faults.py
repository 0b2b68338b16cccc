"""Faults of clients with a remote engine: disconnects, deadlines, slow readers, floods."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.fakes import tiny_config, wait_until_idle
from tests.tts.ipc.remote_engine import engine_info_of, new_base, remote_engine
from tests.tts.server.test_faults import LONG_TEXT, disconnect, long_request
from tests.tts.serving import (
    SMALL_WINDOW,
    Serving,
    collect_speech,
    error_of,
    error_of_reading,
    reason_of,
    retry_s,
    run,
    serving,
    stream_request,
)
from tts.config.server import ServerConfig
from tts.engine.local_client import LocalEngineClient
from tts.factory import connect_service
from tts.ipc import link
from tts.ipc.endpoints import Endpoints, reserved
from tts.ipc.engine_server import EngineServer
from tts.ipc.remote_client import RemoteEngineClient


@asynccontextmanager
async def checked_server(
    engine: LocalEngineClient, checkpoint: Path, *options: tuple[str, int], **values: Any
) -> AsyncIterator[Serving]:
    """Serve with a remote engine; it must still answer after the body."""
    config, server = tiny_config(checkpoint), ServerConfig(**values)
    async with remote_engine(engine, new_base()) as served:
        service = connect_service(config, server, served.client, served.client.info)
        async with serving(service, *options, **values) as client:
            expected = (await collect_speech(client)).data
            yield client
            assert await client.server.host.calls.wait_idle(5)
            await served.until_idle()
            await wait_until_idle(engine)
            assert (await collect_speech(client)).data == expected


def test_clients_that_disconnect_mid_stream_free_their_resources(
    engine_client: LocalEngineClient, tiny_checkpoint: Path
) -> None:
    async def scenario() -> None:
        draw = random.Random(3)
        async with checked_server(engine_client, tiny_checkpoint) as served:
            for _ in range(4):
                await asyncio.gather(*(disconnect(served, draw) for _ in range(10)))

    run(scenario())


def test_a_deadline_of_50_ms(engine_client: LocalEngineClient, tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with checked_server(engine_client, tiny_checkpoint) as served:
            request = stream_request(LONG_TEXT, max_tokens=None)
            late = await error_of(served.speech.SynthesizeStream(request, timeout=0.05))
            assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await wait_until_idle(engine_client)

    run(scenario())


def test_a_reader_that_stops_reading_is_paused(
    engine_client: LocalEngineClient, tiny_checkpoint: Path
) -> None:
    """Nothing more is generated for it, and another stream continues."""

    async def scenario() -> None:
        async with checked_server(
            engine_client, tiny_checkpoint, SMALL_WINDOW, slow_reader_timeout_s=600
        ) as served:
            stuck = served.speech.SynthesizeStream(long_request())
            assert (await stuck.read()).WhichOneof("event") == "started"
            await _paused(engine_client)
            assert (await collect_speech(served)).data
            stuck.cancel()

    run(scenario())


def test_a_reader_that_stops_reading_is_cancelled(
    engine_client: LocalEngineClient, tiny_checkpoint: Path
) -> None:
    async def scenario() -> None:
        async with checked_server(
            engine_client, tiny_checkpoint, SMALL_WINDOW, slow_reader_timeout_s=1
        ) as served:
            stuck = served.speech.SynthesizeStream(long_request())
            assert (await stuck.read()).WhichOneof("event") == "started"
            while not (await engine_client.status()).audio_streams:
                await asyncio.sleep(0.01)
            await wait_until_idle(engine_client)
            given_up = await error_of_reading(stuck)
            assert given_up.code() is grpc.StatusCode.ABORTED
            assert reason_of(given_up) == "SLOW_READER"

    run(scenario())


def test_excess_calls_on_a_blocked_engine_are_refused(
    engine_client: LocalEngineClient, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's event loop is blocked: calls wait up to the limit, further ones are refused."""
    bound, num_more = 24, 8
    monkeypatch.setattr(link, "REQUEST_BOUND", bound)
    config, server = tiny_config(tiny_checkpoint), ServerConfig()
    released = threading.Event()

    async def scenario() -> None:
        with engine_of_another_loop(engine_client) as (endpoints, loop):
            client = await RemoteEngineClient.connect(endpoints, "front")
            service = connect_service(config, server, client, client.info)
            async with serving(service, max_concurrent_requests=bound + num_more) as served:
                loop.call_soon_threadsafe(released.wait)
                calls = [collect_speech(served) for _ in range(bound + num_more)]
                ends = asyncio.as_completed(calls)
                for _ in range(num_more):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await next(ends)
                    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    assert reason_of(refused.value) == "QUEUE_FULL"
                    assert retry_s(refused.value) > 0
                released.set()
                assert len({(await end).data for end in ends}) == 1
            await client.close()

    try:
        run(scenario())
    finally:
        released.set()


@contextmanager
def engine_of_another_loop(
    engine: LocalEngineClient,
) -> Iterator[tuple[Endpoints, asyncio.AbstractEventLoop]]:
    """Serve it on a thread of its own, as its process does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def on_loop(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(60)

    with reserved(new_base()) as endpoints:
        engine_server = EngineServer(engine, engine_info_of(engine), endpoints)
        on_loop(engine_server.start())
        try:
            yield endpoints, loop
        finally:
            on_loop(engine_server.close())
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


async def _paused(engine: LocalEngineClient) -> None:
    """Wait until nothing more is generated for the only request, which keeps its pages."""
    pages, steady = 0, 0
    for _ in range(6000):
        now = (await engine.status()).used_pages
        steady = steady + 1 if now == pages and now else 0
        pages = now
        if steady >= 20:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it was never paused")
