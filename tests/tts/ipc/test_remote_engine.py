"""A remote engine behaves like a local one: same audio, same errors, same limits."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import numpy as np
import pytest
import zmq

from decoder import CodeRangeError, StreamingOptions
from llm import FinishReason, QueueFullError, Request, RequestError
from tests.fakes import create_client, wait_until_idle
from tests.tts.engine.jobs import in_slot, listen, read, run, samples, speech, text
from tests.tts.ipc.remote_engine import (
    engine_info_of,
    new_base,
    new_tcp_base,
    remote_engine,
    wait_until,
)
from tests.tts.ramp import RampClient
from tts.engine.admission import Admission, AdmissionLimits
from tts.engine.client import AudioBlock, Hold, SpeechJob
from tts.engine.local_client import LocalEngineClient
from tts.errors import (
    EngineLostError,
    NotAvailableError,
    PreconditionError,
    ServerBusyError,
    StreamLimitError,
)
from tts.ipc import engine_server, link
from tts.ipc.codec import encode
from tts.ipc.engine_server import AUDIO_WINDOW, REQUEST_BOUND, EngineServer
from tts.ipc.messages import Cancel, Hello, Speak
from tts.ipc.remote_admission import RemoteAdmission, RemoteSlot
from tts.ipc.remote_client import RemoteEngineClient


@pytest.fixture(params=["ipc", "inproc", "tcp"])
def base(request: pytest.FixtureRequest) -> str:
    bases = {"ipc": new_base, "tcp": new_tcp_base, "inproc": lambda: "inproc://engine"}
    return bases[request.param]()


def test_remote_and_local_engines_give_the_same_output(
    engine_client: LocalEngineClient, base: str
) -> None:
    """Speech and text, several streams at once, over every kind of endpoint."""
    jobs = [speech(f"s{n}", f"sentence {n}", seed=n) for n in range(4)]

    async def scenario() -> None:
        alone = [samples(await listen(engine_client, job)) for job in jobs]
        words = await read(engine_client, text("t", exactly=12, top_logprobs=2))
        async with remote_engine(engine_client, base, front_ends=2) as served:
            one, two = served.clients
            streams = await asyncio.gather(*(listen(c, job) for job in jobs for c in (one, two)))
            for number, blocks in enumerate(streams):
                np.testing.assert_array_equal(samples(blocks), alone[number // 2])
                assert blocks[-1].finish_reason is not None
            again = await read(one, text("t", exactly=12, top_logprobs=2))
            assert [(c.token_ids, c.logprobs) for c in again] == [
                (c.token_ids, c.logprobs) for c in words
            ]
            assert again[0].logprobs
            assert one.codec == engine_client.codec
            await served.until_idle()

    run(scenario)


def test_a_held_text_is_not_generated(engine_client: LocalEngineClient) -> None:
    """Here and over endpoints; the text is the one without a hold."""

    async def scenario() -> None:
        whole = await read(engine_client, text("t", exactly=60))
        async with remote_engine(engine_client, new_base()) as served:
            for client in (engine_client, served.client):
                hold = Hold()
                chunks = client.generate(text("t", exactly=60), hold)
                heard = [await anext(chunks)]
                hold.set(is_set=True)
                while not (await engine_client.status()).stats.paused:
                    await asyncio.sleep(0.001)
                await listen(client, speech("s", exactly=40))
                assert (await engine_client.status()).stats.paused == 1
                hold.set(is_set=False)
                heard += [chunk async for chunk in chunks]
                found = [token for chunk in heard for token in chunk.token_ids]
                assert found == [token for chunk in whole for token in chunk.token_ids]
            await served.until_idle()

    run(scenario)


def test_errors_of_the_engine_reach_the_front_end(engine_client: LocalEngineClient) -> None:
    async def scenario() -> None:
        async with remote_engine(engine_client, new_base()) as served:
            client = served.client
            with pytest.raises(RequestError) as far:
                await listen(client, speech("long", prompt_ids=(1,) * 5000))
            with pytest.raises(RequestError) as near:
                await listen(engine_client, speech("long", prompt_ids=(1,) * 5000))
            assert str(far.value) == str(near.value)
            wrong = SpeechJob(speech("x").request, StreamingOptions(), prompt_codes=(10**6,))
            with pytest.raises(CodeRangeError):
                await listen(client, wrong)
            with pytest.raises(RequestError):
                await read(client, Request("token", (10**6,)))
            assert (await listen(client, speech("after")))[-1].finish_reason is not None

    run(scenario)


def test_a_text_model_refuses_speech(text_checkpoint: Path) -> None:
    async def scenario() -> None:
        engine = create_client(text_checkpoint)
        async with remote_engine(engine, new_base()) as served:
            assert served.client.codec is None
            with pytest.raises(PreconditionError, match="text only"):
                await listen(served.client, speech("x"))
            with pytest.raises(PreconditionError, match="recording"):
                await served.client.encode_prompt(np.zeros(10, np.float32))
        await engine.close()

    run(scenario)


def test_reference_clips_are_encoded(engine_client: LocalEngineClient) -> None:
    clip = np.sin(np.arange(16_000) / 20).astype(np.float32)

    async def scenario() -> None:
        async with remote_engine(engine_client, new_base()) as served:
            encoded = await served.client.encode_prompt(clip)
            assert encoded == await engine_client.encode_prompt(clip)
            assert len(encoded.codes) > 10

    run(scenario)


def test_closing_a_stream_frees_its_pages(engine_client: LocalEngineClient) -> None:
    async def scenario() -> None:
        async with remote_engine(engine_client, new_base()) as served:
            for _ in range(20):
                async with aclosing(served.client.speak(speech("go", exactly=500))) as blocks:
                    await anext(blocks)
            await served.until_idle()
            await wait_until_idle(engine_client)
            # Closed before the request reaches the engine.
            waiting = asyncio.ensure_future(listen(served.client, speech("never", exactly=500)))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await served.until_idle()
            await wait_until_idle(engine_client)

    run(scenario)


def test_a_request_and_its_cancellation_in_one_turn_leave_no_stream() -> None:
    """Both messages are read before the stream's task starts, in either order."""

    async def scenario() -> None:
        engine = RampClient()
        async with remote_engine(engine, new_base()) as served:
            (peer,) = served.server._peers.values()
            for number, order in ((1, (0, 1)), (2, (1, 0))):
                job = Speak(peer.name, number, speech("x"))
                messages = (encode(job), encode(Cancel(peer.name, number)))
                for index in order:
                    served.server._received([messages[index]])
            await asyncio.sleep(0)
            await served.until_idle()
            assert engine.jobs == []
            assert not peer.cancelled

    run(scenario)


def test_a_reader_that_stops_pauses_the_engine() -> None:
    """Credit: no more than the window is sent ahead, and none of it is lost."""
    engine = RampClient()
    engine.is_endless = True

    async def scenario() -> None:
        async with remote_engine(engine, new_base()) as served:
            job = speech("slow", max_tokens=800, streaming=StreamingOptions((8,)))
            async with aclosing(served.client.speak(job)) as blocks:
                first = await anext(blocks)
                await asyncio.sleep(0.1)
                stopped = len(engine.spoken)
                assert stopped <= (AUDIO_WINDOW + 2) * 8
                rest = [block async for block in blocks]
            assert [first.first_code, *(b.first_code for b in rest)] == list(range(0, 800, 8))
            assert len(engine.spoken) == 800
            assert rest[-1].finish_reason is FinishReason.LENGTH

    run(scenario)


def test_excess_requests_are_refused_and_admitted_ones_complete() -> None:
    """All requests are made in one turn of the event loop, so the engine reads none meanwhile."""
    engine = RampClient()
    num_asked = 2 * REQUEST_BOUND

    async def scenario() -> None:
        async with remote_engine(engine, new_base()) as served:
            asking = [listen(served.client, speech(f"s{n}")) for n in range(num_asked)]
            answers = await asyncio.gather(*asking, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, QueueFullError)]
            assert len(answers) - len(refused) == len(engine.jobs) == REQUEST_BOUND
            assert all(isinstance(a, list) for a in answers if a not in refused)
            await served.until_idle()
            assert await listen(served.client, speech("after"))

    run(scenario)


# --- ends


def test_streams_of_a_vanished_front_end_are_freed(engine_client: LocalEngineClient) -> None:
    """Its sockets close without a message, as when its process is killed."""

    async def scenario() -> None:
        async with remote_engine(engine_client, new_base()) as served:
            with zmq.Context() as context:
                work, control = context.socket(zmq.PUSH), context.socket(zmq.PUSH)
                replies = context.socket(zmq.DEALER)
                replies.set(zmq.IDENTITY, b"doomed")
                work.connect(served.endpoints.request)
                control.connect(served.endpoints.control)
                replies.connect(served.endpoints.response)
                while not replies.poll(0):
                    control.send(encode(Hello("doomed", served.endpoints.server_id)))
                    await asyncio.sleep(0.02)
                work.send(encode(Speak("doomed", 0, speech("x", exactly=800))))
                await wait_until(lambda: served.server.num_streams == 1)
                assert await listen(served.client, speech("other"))
                assert served.server.num_streams == 1
                context.destroy(linger=0)
            await served.until_idle()
            await wait_until_idle(engine_client)
            assert await listen(served.client, speech("after"))

    run(scenario)


def test_a_front_end_that_reads_nothing_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is connected but reads nothing: the number of replies kept for it is limited."""
    monkeypatch.setattr(engine_server, "REPLY_BOUND", 20)
    monkeypatch.setattr(engine_server, "BEAT_S", 0.05)

    async def scenario() -> None:
        engine = RampClient()
        engine.gate.clear()
        async with remote_engine(engine, "inproc://engine") as served:
            with (
                served.context.socket(zmq.PUSH) as control,
                served.context.socket(zmq.PUSH) as work,
                served.context.socket(zmq.DEALER) as replies,
            ):
                replies.set(zmq.IDENTITY, b"deaf")
                replies.set(zmq.RCVHWM, 1)
                replies.set(zmq.LINGER, 0)
                control.connect(served.endpoints.control)
                work.connect(served.endpoints.request)
                replies.connect(served.endpoints.response)
                while "peers=1," in repr(served.server):
                    control.send(encode(Hello("deaf", served.endpoints.server_id)))
                    await asyncio.sleep(0.01)
                work.send(encode(Speak("deaf", 0, speech("unheard"))))
                await wait_until(lambda: engine.num_open == 1)
                await wait_until(lambda: "front end deaf is gone; 1 streams end" in caplog.text)
                await wait_until(lambda: engine.num_open == 0)
            engine.gate.set()
            assert await listen(served.client, speech("x"))

    run(scenario)


async def until_alive(client: RemoteEngineClient) -> None:
    while not (await client.status()).is_alive:
        await asyncio.sleep(0.005)


def test_an_ended_engine_is_noticed_at_once_and_reconnected(
    engine_client: LocalEngineClient,
) -> None:
    async def scenario() -> None:
        base = new_base()
        async with remote_engine(engine_client, base) as served:
            client = served.client
            stream = client.speak(speech("x", exactly=800))
            await anext(stream)
            assert (await client.status()).is_alive
            await served.server.close()
            with pytest.raises(EngineLostError):
                async for _ in stream:
                    pass
            with pytest.raises(EngineLostError):
                await listen(client, speech("y"))
            assert not (await client.status()).is_alive
            await wait_until_idle(engine_client)
            again = EngineServer(
                engine_client, engine_info_of(engine_client), served.endpoints, None, served.context
            )
            await again.start()
            await until_alive(client)
            assert await listen(client, speech("z"))
            await again.close()

    run(scenario)


def test_an_engine_without_heartbeats_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hang with its sockets open; when heartbeats return, it is connected again."""
    monkeypatch.setattr(link, "STALL_S", 2.0)
    monkeypatch.setattr(engine_server, "BEAT_S", 60)
    engine = RampClient()
    engine.gate.clear()

    async def scenario() -> None:
        async with remote_engine(engine, new_base()) as served:
            with pytest.raises(EngineLostError):
                await listen(served.client, speech("x"))
            engine.gate.set()
            await until_alive(served.client)
            assert await listen(served.client, speech("y"))

    run(scenario)


def test_an_engine_with_another_model_is_refused(
    engine_client: LocalEngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with remote_engine(engine_client, new_base()) as served:
            await served.server.close()
            other = RampClient(codebook_size=9)
            again = EngineServer(
                other, engine_info_of(other), served.endpoints, None, served.context
            )
            await again.start()
            await wait_until(lambda: "another model" in caplog.text)
            with pytest.raises(EngineLostError):
                await listen(served.client, speech("x"))
            await again.close()

    run(scenario)


def test_invalid_messages_do_not_affect_other_requests(
    engine_client: LocalEngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with remote_engine(engine_client, new_base()) as served:
            with served.context.socket(zmq.PUSH) as other:
                other.connect(served.endpoints.request)
                other.send(b"nonsense")
                other.send_multipart((b"", b"more", b"frames"))
                await wait_until(lambda: caplog.text.count("invalid message") == 2)
                assert await listen(served.client, speech("x"))

    run(scenario)


def test_endpoints_in_use_are_reported() -> None:
    async def scenario() -> None:
        engine = RampClient()
        async with remote_engine(engine, new_tcp_base()) as served:
            second = EngineServer(
                engine, engine_info_of(engine), served.endpoints, None, served.context
            )
            with pytest.raises(zmq.ZMQError, match="in use"):
                await second.start()
            await second.close()
            assert await listen(served.client, speech("x"))

    run(scenario)


# --- places


def test_places_are_shared_by_all_front_ends() -> None:
    async def scenario() -> None:
        admission = Admission(AdmissionLimits(max_running=2, max_waiting=1, max_per_client=3))
        async with remote_engine(
            RampClient(), new_base(), front_ends=2, admission=admission
        ) as served:
            one, two = (RemoteAdmission([client]) for client in served.clients)
            async with in_slot(one, "a"), in_slot(two, "a"):
                assert admission.running == 2
                waiting = asyncio.ensure_future(in_slot(one, "b").__aenter__())
                await wait_until(lambda: admission.waiting == 1)
                with pytest.raises(ServerBusyError) as busy:
                    await in_slot(two, "c").__aenter__()
                assert busy.value.retry_after_s > 0
            await waiting
            assert admission.running == 1
            admission.check_integrity()

    run(scenario)


def test_calls_leave_no_cycles_for_the_garbage_collector() -> None:
    """Each collection stops all streams."""
    engine, num_calls = RampClient(), 40

    async def scenario() -> None:
        limits = AdmissionLimits(max_running=2, max_waiting=1, max_per_client=3)
        async with remote_engine(engine, new_base(), admission=Admission(limits)) as served:
            places = RemoteAdmission(served.clients)
            for number in range(num_calls + 1):
                async with in_slot(places, "a"):
                    assert await listen(served.client, speech(f"heard-{number}"))
                async with aclosing(served.client.speak(speech(f"left-{number}"))) as blocks:
                    await anext(blocks)
                if not number:
                    gc.collect()
                    gc.disable()
            await served.until_idle()
            assert gc.collect() < num_calls

    try:
        run(scenario)
    finally:
        gc.enable()


def test_a_job_waits_for_its_calls_place_in_the_engines_process() -> None:
    """It is sent before the answer, runs when the place is held, and never if it is refused."""
    engine = RampClient()

    async def scenario() -> None:
        admission = Admission(AdmissionLimits(max_running=1, max_waiting=1, max_per_client=9))
        async with remote_engine(engine, new_base(), admission=admission) as served:
            places = RemoteAdmission(served.clients)

            async def listen_behind(slot: RemoteSlot, name: str) -> list[AudioBlock]:
                speak = slot.speak_behind(served.client)
                assert speak is not None
                return [block async for block in speak(speech(name))]

            async with AsyncExitStack() as first:
                slot = await first.enter_async_context(places.request("a"))
                assert (places.running, places.waiting) == (0, 1)
                alone = await listen_behind(slot, "s")  # before `held`
                await slot.held()
                assert (places.running, places.waiting) == (1, 0)
                async with places.request("b") as waiting, places.request("c") as refused:
                    listening = asyncio.ensure_future(listen_behind(waiting, "s"))
                    never = asyncio.ensure_future(listen_behind(refused, "s"))
                    with pytest.raises(ServerBusyError):
                        await refused.held()
                    with pytest.raises(NotAvailableError):
                        await listen_behind(refused, "s")
                    assert len(engine.jobs) == 1
                    assert not listening.done()
                    never.cancel()
                    await first.aclose()
                    assert samples(await listening).tolist() == samples(alone).tolist()
                    await waiting.held()
            assert (places.running, places.waiting) == (0, 0)
            assert len(engine.jobs) == 2
            await served.until_idle()
            assert admission.running == 0

    run(scenario)


def test_a_place_is_asked_for_at_the_next_engine_when_the_first_one_is_lost() -> None:
    async def scenario() -> None:
        admission = Admission(AdmissionLimits(max_running=1, max_waiting=1, max_per_client=9))
        async with remote_engine(RampClient(), new_base(), admission=admission) as lost:
            async with remote_engine(RampClient(), new_base(), admission=admission) as served:
                places = RemoteAdmission([lost.client, served.client])
                async with lost.client.admit("a"), places.request("b") as slot:
                    assert slot.speak_behind(lost.client) is not None
                    assert slot.speak_behind(served.client) is None
                    holding = asyncio.ensure_future(slot.held())
                    await wait_until(lambda: admission.waiting == 1)
                    await lost.server.close()
                    await holding
                    assert slot.speak_behind(lost.client) is None
                    assert slot.speak_behind(served.client) is not None
                    assert places.running == 1
                    assert await listen(served.client, speech("s"))
            assert (places.running, places.waiting) == (0, 0)

    run(scenario)


def test_one_clients_calls_are_counted_over_all_front_ends() -> None:
    async def scenario() -> None:
        admission = Admission(AdmissionLimits(max_running=9, max_waiting=9, max_per_client=2))
        async with remote_engine(
            RampClient(), new_base(), front_ends=2, admission=admission
        ) as served:
            one, two = (RemoteAdmission([client]) for client in served.clients)
            async with in_slot(one, "a"), in_slot(two, "a"):
                with pytest.raises(StreamLimitError):
                    await in_slot(one, "a").__aenter__()
            await wait_until(lambda: admission.running == 0)
            async with in_slot(one, "a"):
                pass

    run(scenario)


def test_connecting_waits_for_the_engine() -> None:
    async def scenario() -> None:
        base = new_base()
        async with remote_engine(RampClient(), base) as served:
            endpoints, context = served.endpoints, served.context
            await served.server.close()
            early = asyncio.ensure_future(RemoteEngineClient.connect(endpoints, "early", context))
            await asyncio.sleep(0.1)
            assert not early.done()
            engine = RampClient()
            again = EngineServer(engine, engine_info_of(engine), endpoints, None, context)
            await again.start()
            client = await early
            assert client.codec == engine.codec
            await client.close()
            await again.close()

    run(scenario)
