"""Access: tokens and TLS; and reflection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from llm import ConfigError
from tests.tts.serving import (
    Serving,
    error_of,
    health,
    reason_of,
    run,
    run_with_server,
    stream_request,
    unary_request,
)
from tts.config.server import ServerConfig
from tts.factory import Service
from tts.server.server import SpeechServer
from tts.v1 import speech_pb2 as pb
from tts.v1 import text_pb2
from tts.v1.speech_pb2_grpc import SpeechServiceStub

SPEECH, TEXT_SERVICE = "tts.v1.SpeechService", "tts.v1.TextService"
TLS = Path(__file__).parents[1] / "tls"
Status = health_pb2.HealthCheckResponse


# --- reflection


async def reflected(channel: grpc.aio.Channel) -> set[str]:
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    call = ServerReflectionStub(channel).ServerReflectionInfo(requests)
    (response,) = [response async for response in call]
    return {service.name for service in response.list_services_response.service}


def test_reflection_lists_all_services(service: Service) -> None:
    async def ask(served: Serving) -> None:
        names = await reflected(served.channel)
        assert {SPEECH, TEXT_SERVICE, "grpc.health.v1.Health"} <= names

    run_with_server(service, ask)


def test_reflection_can_be_switched_off(service: Service) -> None:
    async def ask(served: Serving) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflected(served.channel)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run_with_server(service, ask, enable_reflection=False)


# --- tokens


def authorization(token: str, scheme: str = "Bearer") -> tuple[tuple[str, str], ...]:
    return (("authorization", f"{scheme} {token}"),)


def test_calls_require_a_token(service: Service) -> None:
    async def ask(served: Serving) -> None:
        for metadata in (
            None,
            authorization("wrong"),
            authorization("secret", "Basic"),
            authorization(""),
        ):
            calls: list[Any] = [
                served.speech.Synthesize(unary_request(), metadata=metadata),
                served.speech.SynthesizeStream(stream_request(), metadata=metadata),
                served.speech.StreamingSynthesize(metadata=metadata),
                served.text.Generate(text_pb2.GenerateRequest(), metadata=metadata),
            ]
            for call in calls:
                error = await error_of(call)
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                assert reason_of(error) == "UNAUTHENTICATED"
                assert "secret" not in error.details()
        with pytest.raises(grpc.aio.AioRpcError, match="Bearer"):
            await reflected(served.channel)
        assert await health(served.channel) == Status.SERVING
        call = served.speech.Synthesize(unary_request(), metadata=authorization("secret"))
        assert (await call).audio
        refused = served.metric(
            "sonant_errors_total", grpc_code="UNAUTHENTICATED", reason="UNAUTHENTICATED"
        )
        assert refused == 17

    run_with_server(service, ask, auth_token="secret")


def test_changing_voices_requires_the_admin_token(service: Service) -> None:
    async def ask(served: Serving) -> None:
        for token, code in (
            ("user", grpc.StatusCode.PERMISSION_DENIED),
            ("wrong", grpc.StatusCode.UNAUTHENTICATED),
            ("admin", grpc.StatusCode.NOT_FOUND),
        ):
            request = pb.DeleteVoiceRequest(name="unknown")
            call = served.speech.DeleteVoice(request, metadata=authorization(token))
            assert (await error_of(call)).code() is code
        request = pb.CreateVoiceRequest(voice_id="x")
        call = served.speech.CreateVoice(request, metadata=authorization("user"))
        assert (await error_of(call)).code() is grpc.StatusCode.PERMISSION_DENIED
        for token in ("user", "admin"):
            listed = served.speech.ListVoices(pb.ListVoicesRequest(), metadata=authorization(token))
            assert (await listed).voices

    run_with_server(service, ask, auth_token="user", admin_token="admin")


# --- TLS


def tls_channel(address: str, *, with_certificate: bool) -> grpc.aio.Channel:
    ca, key, chain = ((TLS / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem"))
    own = (key, chain) if with_certificate else (None, None)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, *own))


@pytest.mark.parametrize("mutual", [False, True])
def test_tls(service: Service, mutual: bool) -> None:
    async def scenario() -> None:
        files = {"tls_cert": TLS / "server.pem", "tls_key": TLS / "server.key"}
        client_ca = {"tls_client_ca": TLS / "ca.pem"} if mutual else {}
        server = SpeechServer(ServerConfig(port=0, **files, **client_ca))
        await server.start()
        await server.serve(service)
        async with tls_channel(server.address, with_certificate=True) as channel:
            assert (await SpeechServiceStub(channel).Synthesize(unary_request())).audio
        async with tls_channel(server.address, with_certificate=False) as channel:
            if mutual:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await health(channel)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            else:
                assert await health(channel) == Status.SERVING
        async with grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health(channel)
        await server.drain(0, 1)
        await server.stop()

    run(scenario())


@pytest.mark.parametrize(
    ("certificate", "message"),
    [("no.pem", r"no\.pem: No such file"), ("/dev/zero", "/dev/zero has more than 1048576 bytes")],
)
def test_unreadable_certificates_are_reported(
    certificate: str, message: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        server = SpeechServer(
            ServerConfig(port=0, tls_cert=tmp_path / certificate, tls_key=TLS / "server.key")
        )
        with pytest.raises(ConfigError, match=message):
            await server.start()
        await server.stop()

    run(scenario())
