"""The server around the services: loading, serving, draining, its address and its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from llm import ConfigError
from tests.deadlines import HANG_S
from tests.fakes import create_client
from tests.tts.serving import (
    Serving,
    collect_speech,
    error_of,
    health,
    reason_of,
    retry_s,
    run,
    run_with_server,
    say,
    serving,
    session_config,
    stream_request,
    unary_request,
)
from tts.config.server import ServerConfig
from tts.factory import Service
from tts.server.server import SpeechServer, exposure_warnings
from tts.v1 import speech_pb2 as pb
from tts.v1 import text_pb2
from tts.v1.speech_pb2_grpc import SpeechServiceStub

SPEECH, TEXT_SERVICE = "tts.v1.SpeechService", "tts.v1.TextService"
TLS = Path(__file__).parents[1] / "tls"
Status = health_pb2.HealthCheckResponse


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float = HANG_S) -> None:
    for _ in range(round(timeout_s / 0.01)):
        if await holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


# --- loading, serving, draining


async def listed(channel: grpc.aio.Channel) -> dict[str, int]:
    """Return the statuses of Health.List by service."""
    response = await HealthStub(channel).List(health_pb2.HealthListRequest())
    return {name: found.status for name, found in response.statuses.items()}


def test_calls_are_refused_while_loading(service: Service) -> None:
    async def scenario() -> None:
        server = SpeechServer(ServerConfig(port=0))
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            for name in ("", SPEECH, TEXT_SERVICE):
                assert await health(channel, name) == Status.NOT_SERVING
            names = ("", SPEECH, TEXT_SERVICE)
            assert await listed(channel) == dict.fromkeys(names, Status.NOT_SERVING)
            stub = SpeechServiceStub(channel)
            calls: list[Any] = [
                stub.Synthesize(unary_request()),
                stub.SynthesizeStream(stream_request()),
                stub.StreamingSynthesize(),
                stub.GetServerInfo(pb.GetServerInfoRequest()),
            ]
            for call in calls:
                error = await error_of(call)
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert reason_of(error) == "LOADING"
                assert retry_s(error) > 0
            await server.serve(service)
            for name in ("", SPEECH, TEXT_SERVICE):
                assert await health(channel, name) == Status.SERVING
            assert await listed(channel) == dict.fromkeys(names, Status.SERVING)
            assert (await stub.Synthesize(unary_request())).audio
        await server.drain(0, 1)
        await server.stop()

    run(scenario())


def test_draining_lets_streams_finish_and_refuses_new_ones(service: Service) -> None:
    async def ask(served: Serving) -> None:
        expected = await collect_speech(served)
        running = served.speech.StreamingSynthesize()
        await running.write(session_config())
        await running.read()
        watch = HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == Status.SERVING
        draining = asyncio.create_task(served.server.drain(0, 20))
        assert (await watch.read()).status == Status.NOT_SERVING
        error = await error_of(served.speech.SynthesizeStream(stream_request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(error) == "DRAINING"
        assert not draining.done()
        await running.write(say(expected_text := "Hello there. This is a short test."))
        await running.done_writing()
        data, response = b"", await running.read()
        while response.WhichOneof("event") != "done":
            data += response.audio.data
            response = await running.read()
        assert data == expected.data
        assert response.done.usage.input_characters == len(expected_text)
        assert await draining is True
        watch.cancel()

    run_with_server(service, ask)


def test_new_calls_are_taken_during_the_drain_delay(service: Service) -> None:
    """Load balancers see NOT_SERVING with a delay; until then their calls are answered."""

    async def ask(served: Serving) -> None:
        draining = asyncio.create_task(served.server.drain(0.3, 5))
        await until(lambda: _is_not_serving(served))
        assert (await collect_speech(served)).data
        assert await draining is True

    run_with_server(service, ask)


async def _is_not_serving(served: Serving) -> bool:
    return await health(served.channel) == Status.NOT_SERVING


def test_streams_that_do_not_finish_are_cut_off(service: Service) -> None:
    async def ask(served: Serving) -> None:
        endless = served.speech.StreamingSynthesize()
        await endless.write(session_config())
        await endless.read()
        assert await served.server.drain(0, 0.1) is False
        await served.server.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await endless.read()
        assert caught.value.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,
            grpc.StatusCode.UNKNOWN,
        )

    run_with_server(service, ask)


def test_a_dead_engine_is_not_serving(service: Service, tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        client = create_client(tiny_checkpoint)
        async with serving(replace(service, client=client)) as served:
            assert await health(served.channel) == Status.SERVING
            await client.close()
            await until(lambda: _is_not_serving(served))
            request = text_pb2.GenerateRequest(input=text_pb2.GenerationInput(prompt="hello"))
            error = await error_of(served.text.Generate(request))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(error) == "ENGINE_STOPPED"

    run(scenario())


def test_a_text_only_model_serves_text_only(text_checkpoint: Path) -> None:
    async def scenario() -> None:
        from tests.fakes import tiny_config
        from tts.factory import create_service

        service = create_service(tiny_config(text_checkpoint))
        async with serving(service) as served:
            assert await health(served.channel, TEXT_SERVICE) == Status.SERVING
            assert await health(served.channel, SPEECH) == Status.NOT_SERVING
            for call in (
                served.speech.Synthesize(unary_request()),
                served.speech.StreamingSynthesize(iter([session_config()])),
                served.speech.ListVoices(pb.ListVoicesRequest()),
            ):
                error = await error_of(call)
                assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert reason_of(error) == "SPEECH_UNAVAILABLE"
            info = await served.speech.GetServerInfo(pb.GetServerInfoRequest())
            assert info.models[0].text_generation
            assert not info.models[0].codec
            request = text_pb2.GenerateRequest(input=text_pb2.GenerationInput(prompt="hello"))
            request.config.sampling.max_tokens = 3
            assert (await served.text.Generate(request)).usage.prompt_tokens == 5
        await service.client.close()

    run(scenario())


# --- the address


def test_an_address_in_use_is_reported() -> None:
    async def scenario() -> None:
        first = SpeechServer(ServerConfig(port=0))
        await first.start()
        second = SpeechServer(ServerConfig(port=first.port))
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{first.port}"):
            await second.start()
        await first.stop()
        await second.stop()

    run(scenario())


def test_addresses_have_the_form_that_clients_use() -> None:
    async def address(host: str) -> str:
        server = SpeechServer(ServerConfig(host=host, port=0))
        server.port = 5
        await server.stop()
        return server.address

    assert run(address("::1")) == "[::1]:5"
    assert run(address("127.0.0.1")) == "127.0.0.1:5"


def test_unprotected_servers_log_warnings() -> None:
    def warnings(**values: Any) -> str:
        return " ".join(exposure_warnings(ServerConfig(**values)))

    everywhere = {"host": "0.0.0.0"}
    tls = {"tls_cert": TLS / "server.pem", "tls_key": TLS / "server.key"}
    assert not warnings()
    assert "every client that reaches 0.0.0.0" in warnings(**everywhere)
    assert "every client" in warnings(**everywhere, **tls)
    assert "unencrypted" in warnings(**everywhere, auth_token="secret")
    assert "secret" not in warnings(**everywhere, auth_token="secret")
    assert not warnings(**everywhere, **tls, auth_token="secret")
    assert not warnings(**everywhere, **tls, tls_client_ca=TLS / "ca.pem")


# --- limits of the transport


def test_messages_larger_than_allowed(service: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.Synthesize(unary_request("x" * 70_000))
        assert (await error_of(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await collect_speech(served)).data

    run_with_server(service, ask, max_message_bytes=64 * 1024)


def test_messages_over_the_default_limit_of_grpc_are_accepted(service: Service) -> None:
    """A 30 s clip in 48 kHz stereo is 5.8 MB; gRPC alone would stop at 4 MiB."""

    async def ask(served: Serving) -> None:
        prompt = pb.VoicePrompt(audio=b"R" * (5 * 2**20), transcript="no audio at all")
        call = served.speech.Synthesize(unary_request(voice=pb.VoiceSelection(prompt=prompt)))
        assert (await error_of(call)).code() is grpc.StatusCode.INVALID_ARGUMENT

    run_with_server(service, ask)


def test_unknown_methods_are_unimplemented(service: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.channel.unary_unary("/tts.v1.SpeechService/Sing")(b"")
        assert (await error_of(call)).code() is grpc.StatusCode.UNIMPLEMENTED

    run_with_server(service, ask)
