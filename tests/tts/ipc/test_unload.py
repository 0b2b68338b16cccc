"""An engine that unloads its model: front ends know it, ask for the next one, and wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import zmq

from tests.tts.engine.jobs import in_slot, read, run, speech, text
from tests.tts.ipc.remote_engine import engine_info_of, new_base, wait_until
from tts.engine.admission import Admission, AdmissionLimits
from tts.engine.client import AudioBlock
from tts.engine.local_client import LocalEngineClient
from tts.errors import EngineLostError
from tts.ipc import engine_server
from tts.ipc.endpoints import Endpoints, reserved
from tts.ipc.engine_server import EngineServer
from tts.ipc.remote_admission import RemoteAdmission
from tts.ipc.remote_client import RemoteEngineClient


class Host:
    """Starts the servers of one engine, one after the other, as the supervisor starts processes."""

    def __init__(self, engine: LocalEngineClient, endpoints: Endpoints, context: zmq.Context):
        self._engine, self._endpoints, self._context = engine, endpoints, context
        self.admission = Admission(AdmissionLimits(2, 2, 2))
        self.num_wanted = 0
        self.server: EngineServer

    def note_wanted(self) -> None:
        self.num_wanted += 1

    async def start(self) -> None:
        info = engine_info_of(self._engine)
        while True:
            self.server = EngineServer(
                self._engine, info, self._endpoints, self.admission, self._context
            )
            try:
                return await self.server.start()
            except zmq.ZMQError:  # the sockets of the last one are not closed yet
                await self.server.close()
                await asyncio.sleep(0.01)

    async def unload(self) -> None:
        await self.server.unload()
        await self.server.close()


@asynccontextmanager
async def hosted(engine: LocalEngineClient) -> AsyncIterator[tuple[Host, RemoteEngineClient]]:
    """Start a server and connect a client to it."""
    async with AsyncExitStack() as ending:
        endpoints = ending.enter_context(reserved(new_base()))
        context = ending.enter_context(zmq.Context())
        host = Host(engine, endpoints, context)
        await host.start()
        client = await RemoteEngineClient.connect(endpoints, "front", context, host.note_wanted)
        try:
            yield host, client
        finally:
            await client.close()
            await host.server.close()


def test_an_unloaded_engine_is_alive_and_not_wanted_without_calls(
    engine_client: LocalEngineClient,
) -> None:
    async def scenario() -> None:
        async with hosted(engine_client) as (host, client):
            num_wanted = host.num_wanted
            for _ in range(20):
                await host.unload()
                status = await client.status()
                assert (status.is_alive, status.is_loaded) == (True, False)
                await host.start()
                await wait_until(lambda: not client.is_unloaded)
                status = await client.status()
                assert (status.is_alive, status.is_loaded) == (True, True)
            assert host.num_wanted == num_wanted

    run(scenario)


def test_calls_of_another_model_leave_an_engine_unloaded(engine_client: LocalEngineClient) -> None:
    """The first of two engines admits, unless its model is unloaded and the other's is not."""

    async def scenario() -> None:
        async with hosted(engine_client) as (voice, first), hosted(engine_client) as (text, second):
            admission = RemoteAdmission([first, second])
            async with in_slot(admission, "a"):
                assert (voice.admission.running, text.admission.running) == (1, 0)
                await asyncio.wait_for(voice.server.wait_idle(0.01), 60)
                await voice.unload()
                num_wanted = voice.num_wanted
            async with in_slot(admission, "a"):
                assert (voice.admission.running, text.admission.running) == (0, 1)
                await text.unload()
            assert voice.num_wanted == num_wanted
            waiting = asyncio.create_task(in_slot(admission, "a").__aenter__())
            await wait_until(lambda: voice.num_wanted > num_wanted)
            await voice.start()
            await asyncio.wait_for(waiting, 60)
            assert voice.admission.running == 1
            admission.check_integrity()

    run(scenario)


def test_requests_wait_for_the_next_engine(engine_client: LocalEngineClient) -> None:
    async def scenario() -> None:
        async with hosted(engine_client) as (host, client):
            before = await read(client, text("t", exactly=8))
            await host.unload()
            num_wanted = host.num_wanted
            waiting = [asyncio.create_task(read(client, text("t", exactly=8))) for _ in range(3)]
            await wait_until(lambda: host.num_wanted > num_wanted)
            assert not any(task.done() for task in waiting)
            await host.start()
            for chunks in await asyncio.gather(*waiting):
                assert [c.token_ids for c in chunks] == [c.token_ids for c in before]

    run(scenario)


def test_a_request_that_meets_the_unloading_is_repeated(engine_client: LocalEngineClient) -> None:
    async def scenario() -> None:
        async with hosted(engine_client) as (host, client):
            unloading = asyncio.create_task(host.unload())
            reading = asyncio.create_task(read(client, text("t", exactly=8)))
            await unloading
            assert host.server.num_streams == 0
            assert not reading.done()
            await host.start()
            assert sum(len(chunk.token_ids) for chunk in await reading) == 8

    run(scenario)


def test_a_waiting_request_can_be_cancelled(engine_client: LocalEngineClient) -> None:
    async def scenario() -> None:
        async with hosted(engine_client) as (host, client):
            await host.unload()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(client, text("t", exactly=8)), 0.05)
            num_wanted = host.num_wanted
            await host.start()
            await wait_until(lambda: not client.is_unloaded)
            assert host.num_wanted == num_wanted

    run(scenario)


def test_a_job_waits_for_its_slot_at_the_next_engine(engine_client: LocalEngineClient) -> None:
    """The engine unloads its model between the request for the slot and the job."""

    async def scenario() -> None:
        async with hosted(engine_client) as (host, client), AsyncExitStack() as others:
            await _rest(client.speak(speech("s", exactly=8)))  # what is slow is done once
            async with RemoteAdmission([client]).request("a") as slot:
                await host.unload()
                speak = slot.speak_behind(client)
                assert speak is not None
                listening = asyncio.create_task(_rest(speak(speech("s", exactly=8))))
                await asyncio.sleep(0)
                holding = asyncio.create_task(slot.held())
                for name in "xy":
                    await others.enter_async_context(in_slot(host.admission, name))
                await host.start()
                await wait_until(lambda: host.admission.waiting == 1)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(listening), 0.1)
                await others.aclose()
                await holding
                await asyncio.wait_for(listening, 60)

    run(scenario)


@pytest.mark.parametrize("first", ["farewell", "disconnection"])
def test_a_front_end_that_reads_late_waits_for_the_next_engine(
    engine_client: LocalEngineClient, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The engine exits without its goodbye. `first`: what the event loop of the front end hears of
    first.
    """
    monkeypatch.setattr(engine_server, "UNLOAD_S", 0.0)

    async def scenario() -> None:
        async with hosted(engine_client) as (host, client):
            if first == "disconnection":
                replies = client._link._replies
                asyncio.get_running_loop().remove_reader(replies._descriptor)
            await host.unload()
            await wait_until(lambda: not client.takes_work)
            reading = asyncio.create_task(read(client, text("t", exactly=8)))
            await host.start()
            assert sum(len(chunk.token_ids) for chunk in await reading) == 8

    run(scenario)


def test_a_stream_with_answers_is_not_repeated(engine_client: LocalEngineClient) -> None:
    async def scenario() -> None:
        async with hosted(engine_client) as (host, client):
            blocks = client.speak(speech("s", exactly=200))
            await anext(blocks)
            await host.unload()
            with pytest.raises(EngineLostError):
                await _rest(blocks)
            await host.start()

    run(scenario)


async def _rest(blocks: AsyncIterator[AudioBlock]) -> None:
    async for _ in blocks:
        pass


def test_it_is_idle_only_without_streams(engine_client: LocalEngineClient) -> None:
    async def scenario() -> None:
        async with hosted(engine_client) as (host, client):
            blocks = client.speak(speech("s", exactly=200))
            await anext(blocks)
            idle = asyncio.create_task(host.server.wait_idle(0.1))
            await asyncio.sleep(0.3)
            assert not idle.done()
            await blocks.aclose()
            await asyncio.wait_for(idle, 60)
            assert host.server.num_streams == 0

    run(scenario)
