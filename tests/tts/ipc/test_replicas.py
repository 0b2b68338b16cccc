"""Several engines behind one client: which gets a request, and what happens without one of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import zmq

from tests.tts.engine.jobs import listen, run, speech
from tests.tts.ipc.remote_engine import engine_info_of, new_base, wait_until
from tests.tts.ramp import RampClient
from tts.engine.client import SpeechJob
from tts.errors import EngineLostError
from tts.ipc.endpoints import Endpoints, replica_base
from tts.ipc.engine_server import EngineServer
from tts.ipc.remote_client import RemoteEngineClient
from tts.ipc.replicas import MARGIN, Load, ReplicatedClient, choose

COUNT = 2


@dataclass
class Replicas:
    """Engines that render at once, or wait for their gates, and their servers."""

    engines: list[RampClient]
    servers: list[EngineServer | None]
    endpoints: list[Endpoints]
    context: zmq.Context
    client: ReplicatedClient

    async def start(self, number: int) -> None:
        engine = self.engines[number]
        server = EngineServer(
            engine, engine_info_of(engine), self.endpoints[number], None, self.context
        )
        while True:
            try:
                await server.start()
                break
            except zmq.ZMQError:  # the sockets of the last one are not closed yet
                await server.close()
                await asyncio.sleep(0.01)
        self.servers[number] = server

    async def stop(self, number: int) -> None:
        server, self.servers[number] = self.servers[number], None
        if server is not None:
            await server.close()

    @property
    def num_open(self) -> list[int]:
        return [engine.num_open for engine in self.engines]

    def shut(self) -> None:
        for engine in self.engines:
            engine.gate.clear()

    def open(self) -> None:
        for engine in self.engines:
            engine.gate.set()


@asynccontextmanager
async def replicas(num_started: int = COUNT) -> AsyncIterator[Replicas]:
    """Serve engines and connect; only the first `num_started` are there at first."""
    base = new_base()
    async with AsyncExitStack() as ending:
        context = ending.enter_context(zmq.Context())
        endpoints = [Endpoints.of(replica_base(base, n), "server") for n in range(COUNT)]
        clients = [RemoteEngineClient(each, "front", context) for each in endpoints]
        engines = [RampClient() for _ in range(COUNT)]
        served = Replicas(engines, [None] * COUNT, endpoints, context, ReplicatedClient(clients))
        for number in range(num_started):
            await served.start(number)
            ending.push_async_callback(served.stop, number)
        waits_for_all = num_started == COUNT
        connecting = ReplicatedClient.connect(clients, waits_for_all=waits_for_all)
        served.client = await asyncio.wait_for(connecting, 60)
        ending.push_async_callback(served.client.close)
        yield served


def spoken_by(voice: int, number: int = 0, lora: str = "") -> SpeechJob:
    """A job whose voice has codes, and whose text is its own."""
    job = speech(f"{lora}-{voice}-{number}", f"text {number}")
    return replace(job, prompt_codes=(voice,) * 40, request=replace(job.request, lora=lora))


def start_of(served: Replicas, count: int, voice: int = 1) -> list[asyncio.Task[object]]:
    jobs = (spoken_by(voice, number) for number in range(count))
    return [asyncio.create_task(listen(served.client, job)) for job in jobs]


def test_streams_of_one_voice_are_spread_by_load() -> None:
    async def scenario() -> None:
        async with replicas() as served:
            served.shut()
            streams = start_of(served, 8)
            await wait_until(lambda: sum(served.num_open) == 8)
            fewest, most = sorted(served.num_open)
            assert 0 < most - fewest <= MARGIN
            status = await served.client.status()
            assert [each.is_alive for each in status.replicas] == [True, True]
            served.open()
            await asyncio.gather(*streams)

    run(scenario)


@pytest.mark.parametrize("has_one_key", [False, True])
def test_front_ends_do_not_all_choose_one_replica_between_two_heartbeats(has_one_key: bool) -> None:
    """3,240 streams on four engines by 16 front ends, 810 calls per second, half of them between
    two heartbeats; in steps of 50 ms.
    """
    rng = random.Random(1)
    num_clients, count, period_s = 16, 4, 0.05
    own = [[0] * count for _ in range(num_clients)]
    reported = [0] * count
    ends: dict[int, list[tuple[int, int]]] = {}
    bursts, totals = list[int](), [0] * count
    for step in range(round(20 / period_s)):
        for client, number in ends.pop(step, ()):
            own[client][number] -= 1
        totals = [sum(each[number] for each in own) for number in range(count)]
        if step % 10 == 0:
            reported = totals
        arrived = Counter[int]()
        for _ in range(round(810 * period_s)):
            client, preferred = rng.randrange(num_clients), 0 if has_one_key else rng.randrange(4)
            loads = {n: Load(own[client][n], reported[n]) for n in range(count)}
            number = choose(preferred, loads, num_clients)
            own[client][number] += 1
            arrived[number] += 1
            ends.setdefault(step + round(rng.uniform(2, 6) / period_s), []).append((client, number))
        if step * period_s > 6:
            bursts += [arrived[number] for number in range(count)]
            assert max(totals) - min(totals) < 0.1 * sum(totals)
    assert sorted(bursts)[len(bursts) * 99 // 100] < 30, "of 40; each replica gets 10 on average"


@pytest.mark.parametrize("lora", ["", "adapter"])
def test_requests_of_one_voice_or_adapter_prefer_one_replica(lora: str) -> None:
    """Whatever their texts are, and adapters whatever their voices are."""

    async def scenario() -> None:
        async with replicas() as served:
            used = []
            for kind in range(8):
                for number in range(3):
                    name = f"{lora}{kind}" if lora else ""
                    voice = number if lora else kind
                    before = [len(engine.jobs) for engine in served.engines]
                    await listen(served.client, spoken_by(voice, number, name))
                    after = [len(engine.jobs) for engine in served.engines]
                    used.append([b - a for a, b in zip(before, after, strict=True)])
            kinds = [used[first : first + 3] for first in range(0, len(used), 3)]
            assert all(each == [each[0]] * 3 for each in kinds)
            assert len({tuple(each[0]) for each in kinds}) == COUNT, "all kinds prefer the same"

    run(scenario)


def test_a_lost_replica_ends_only_its_streams_and_comes_back() -> None:
    async def scenario() -> None:
        async with replicas() as served:
            served.shut()
            streams = start_of(served, 8)
            await wait_until(lambda: sum(served.num_open) == 8)
            num_lost = served.num_open[0]
            await served.stop(0)
            served.open()
            ends = await asyncio.gather(*streams, return_exceptions=True)
            lost = [end for end in ends if isinstance(end, BaseException)]
            assert [type(end) for end in lost] == [EngineLostError] * num_lost
            status = await served.client.status()
            assert status.is_alive
            assert [each.is_alive for each in status.replicas] == [False, True]
            await asyncio.gather(*start_of(served, 8))
            await served.start(0)
            remote = served.client.replicas[0]
            await wait_until(lambda: remote.takes_work)
            served.shut()
            streams = start_of(served, 8)
            await wait_until(lambda: sum(served.num_open) == 8)
            assert min(served.num_open) > 0
            served.open()
            await asyncio.gather(*streams)
            await served.stop(0)
            await served.stop(1)
            await wait_until(lambda: not any(r.takes_work for r in served.client.replicas))
            assert not (await served.client.status()).is_alive
            with pytest.raises(EngineLostError):
                await listen(served.client, spoken_by(1))

    run(scenario)


def test_a_draining_replica_finishes_its_streams_and_gets_no_more() -> None:
    async def scenario() -> None:
        async with replicas() as served:
            served.shut()
            streams = start_of(served, 4)
            await wait_until(lambda: sum(served.num_open) == 4)
            before = served.num_open
            server = served.servers[0]
            assert server is not None
            draining = asyncio.create_task(server.drain(60))
            remote = served.client.replicas[0]
            await wait_until(lambda: not remote.takes_work)
            more = start_of(served, 4)
            await wait_until(lambda: sum(served.num_open) == 8)
            assert served.num_open[0] == before[0] > 0
            assert not draining.done()
            served.open()
            await asyncio.gather(*streams, *more)
            await draining

    run(scenario)


def test_drain_ends_after_its_grace_period() -> None:
    async def scenario() -> None:
        async with replicas() as served:
            served.shut()
            streams = start_of(served, 4)
            await wait_until(lambda: sum(served.num_open) == 4)
            server = served.servers[0]
            assert server is not None
            await server.drain(0.01)
            assert served.num_open[0] > 0
            served.open()
            await asyncio.gather(*streams)

    run(scenario)


def test_a_client_that_does_not_wait_for_all_is_joined_by_late_replicas() -> None:
    async def scenario() -> None:
        async with replicas(num_started=1) as served:
            await asyncio.gather(*start_of(served, 4))
            assert [len(engine.jobs) for engine in served.engines] == [4, 0]
            await served.start(1)
            try:
                late = served.client.replicas[1]
                await wait_until(lambda: late.takes_work)
                served.shut()
                streams = start_of(served, 4)
                await wait_until(lambda: sum(served.num_open) == 4)
                assert min(served.num_open) > 0
                served.open()
                await asyncio.gather(*streams)
            finally:
                await served.stop(1)

    run(scenario)
