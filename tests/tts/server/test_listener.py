"""A path that is not UTF-8 closes gRPC's own listener but not ours."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.tts.server.raw_http2 import END_HEADERS, END_STREAM, raw_client
from tests.tts.server_process import serving_process, stub_of
from tests.tts.serving import (
    CHANNEL_OPTIONS,
    Serving,
    collect_speech,
    health,
    run,
    run_with_server,
    say,
    serving,
    session_config,
    unary_request,
)
from tts.config.server import ServerConfig
from tts.factory import Service
from tts.server.server import SpeechServer
from tts.v1.speech_pb2_grpc import SpeechServiceStub

Status = health_pb2.HealthCheckResponse
TLS = Path(__file__).parents[1] / "tls"
NOT_TEXT = b"/\xff"


async def break_loop(address: str, context: ssl.SSLContext | None = None) -> None:
    """Make a call with a path that is not UTF-8, which ends the server loop of grpc.aio."""
    async with raw_client(address, context) as client:
        client.open(1, NOT_TEXT, flags=END_HEADERS | END_STREAM)
        while not client.is_closed and 1 not in client.ended:
            client.changed.clear()
            await client.changed.wait()


async def answers(channel: grpc.aio.Channel) -> None:
    """Make a call and wait for its response."""
    await SpeechServiceStub(channel).Synthesize(unary_request(), wait_for_ready=True)


def test_an_invalid_path_does_not_close_the_server(service: Service) -> None:
    """After each such call new connections are accepted, and a running stream completes."""

    async def ask(served: Serving) -> None:
        expected = (await collect_speech(served)).data
        running = served.speech.StreamingSynthesize()
        await running.write(session_config())
        await running.read()
        for _ in range(3):
            await break_loop(served.server.address)
            async with grpc.aio.insecure_channel(served.server.address, CHANNEL_OPTIONS) as channel:
                await answers(channel)
                assert await health(channel) == Status.SERVING
        await running.write(say("Hello there. This is a short test."))
        await running.done_writing()
        data, response = b"", await running.read()
        while response.WhichOneof("event") != "done":
            data += response.audio.data
            response = await running.read()
        assert data == expected

    run_with_server(service, ask)


@pytest.mark.parametrize("values", [{"auth_token": "secret"}, {"enable_reflection": False}])
def test_an_invalid_path_does_not_close_a_server_with_a_token(
    service: Service, values: dict[str, Any]
) -> None:
    async def ask(served: Serving) -> None:
        await break_loop(served.server.address)
        async with grpc.aio.insecure_channel(served.server.address, CHANNEL_OPTIONS) as channel:
            metadata = (("authorization", "Bearer secret"),)
            call = SpeechServiceStub(channel).Synthesize(
                unary_request(), metadata=metadata, wait_for_ready=True
            )
            assert (await call).audio

    run_with_server(service, ask, **values)


def test_an_invalid_path_does_not_close_a_server_with_tls(service: Service) -> None:
    async def scenario() -> None:
        ca = TLS / "ca.pem"
        context = ssl.create_default_context(cafile=str(ca))
        context.set_alpn_protocols(["h2"])
        context.check_hostname = False
        files = {"tls_cert": TLS / "server.pem", "tls_key": TLS / "server.key"}
        server = SpeechServer(ServerConfig(port=0, **files))
        await server.start()
        await server.serve(service)
        await break_loop(server.address, context)
        credentials = grpc.ssl_channel_credentials(ca.read_bytes())
        async with grpc.aio.secure_channel(server.address, credentials, CHANNEL_OPTIONS) as channel:
            await answers(channel)
        await server.drain(0, 5)
        await server.stop()

    run(scenario())


def test_an_ended_loop_is_logged_in_one_line(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(served: Serving) -> None:
        await break_loop(served.server.address)
        async with grpc.aio.insecure_channel(served.server.address, CHANNEL_OPTIONS) as channel:
            await answers(channel)

    run_with_server(service, ask)
    told = [made for made in caplog.records if made.name == "tts.listener"]
    assert len(told) == 1
    assert "listening again" in told[0].getMessage()


def test_the_log_has_one_line_for_each_and_not_the_path(tiny_checkpoint: Path) -> None:
    """This holds in a separate process, also when gRPC deletes the ended server."""

    async def scenario() -> str:
        async with serving_process(tiny_checkpoint, log_format="json", front_ends=0) as process:
            address = await process.ready()
            for number in range(1, 5):
                await break_loop(address)
                await process.logged(rf"(?s)(listening again.*){{{number}}}")
                async with stub_of(address) as stub:
                    await stub.Synthesize(unary_request(), wait_for_ready=True)
            process.process.terminate()
            assert await process.ended() == 0
            return process.log

    lines = [json.loads(line) for line in run(scenario()).splitlines()]
    assert sum("listening again" in line["message"] for line in lines) == 4
    assert [line for line in lines if "exception" in line or "xff" in line["message"]] == []


def test_a_server_whose_port_was_taken_meanwhile_is_not_serving(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health reports it on open connections, and SERVING when the port is free again.

    `_bind` is replaced: another program would have to bind the port before the server does.
    """
    bind, is_taken = SpeechServer._bind, False

    def bind_if_free(server: SpeechServer, made: grpc.aio.Server, port: int) -> int:
        if is_taken:
            raise RuntimeError("the port is in use")
        return bind(server, made, port)

    monkeypatch.setattr(SpeechServer, "_bind", bind_if_free)

    async def scenario() -> None:
        nonlocal is_taken
        async with serving(service) as served:
            watch = _watch(served.channel)
            assert (await watch.read()).status == Status.SERVING
            is_taken = True
            await break_loop(served.server.address)
            assert (await watch.read()).status == Status.NOT_SERVING
            is_taken = False
            assert (await watch.read()).status == Status.SERVING
            watch.cancel()
            async with grpc.aio.insecure_channel(served.server.address, CHANNEL_OPTIONS) as channel:
                await answers(channel)

    run(scenario())


def _watch(channel: grpc.aio.Channel) -> Any:
    from grpc_health.v1.health_pb2_grpc import HealthStub

    return HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
