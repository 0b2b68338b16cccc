"""The HTTP server around its routes: health, models, access, errors of routing, bounds, TLS."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from llm import ConfigError
from tests.deadlines import HANG_S
from tests.fakes import create_client
from tests.tts.http.http_serving import (
    HttpServing,
    error_of,
    http_serving,
    post,
    raw_connection,
    run_with_http,
)
from tests.tts.serving import run
from tts.config.packages import check_packages
from tts.config.server import ServerConfig
from tts.factory import Service
from tts.http import connection
from tts.http.server import HttpServer
from tts.server.server import SpeechServer

TLS = Path(__file__).parents[1] / "tls"
FILES = {"tls_cert": TLS / "server.pem", "tls_key": TLS / "server.key"}


def test_models_and_health(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        health = await served.client.get("/health")
        assert (health.status_code, health.json()) == (200, {"status": "SERVING"})
        (model,) = (await served.client.get("/v1/models")).json()["data"]
        assert model["id"] == service.model
        assert model["object"] == "model"
        one = await served.client.get(f"/v1/models/{service.model}")
        assert one.json() == model
        missing = await served.client.get("/v1/models/other/model")
        assert missing.status_code == 404
        error = error_of(missing)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert service.model in error["message"]

    run_with_http(service, ask)


def test_calls_are_refused_while_loading_and_while_draining(service: Service) -> None:
    async def scenario() -> None:
        server = SpeechServer(ServerConfig(port=0, http_port=0))
        await server.start()
        http = HttpServer(server.host.config, server.host, server.access)
        await http.start()
        async with httpx.AsyncClient(base_url=f"http://{http.address}", verify=False) as client:
            await _is_unavailable(client, "loading")
            await server.serve(service)
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 200
            assert await server.drain(0, 5)
            await _is_unavailable(client, "draining")
            await http.stop()
            await http.stop()
            with pytest.raises(httpx.TransportError):
                await client.get("/health")
        await server.stop()

    run(scenario())


async def _is_unavailable(client: httpx.AsyncClient, code: str) -> None:
    health = await client.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "NOT_SERVING"})
    assert int(health.headers["retry-after"]) >= 1
    refused = await client.post("/v1/audio/speech", json={"input": "hello"})
    assert refused.status_code == 503
    assert error_of(refused)["code"] == code
    assert int(refused.headers["retry-after"]) >= 1


def test_health_follows_the_engine(service: Service, tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        client = create_client(tiny_checkpoint)
        async with http_serving(service) as served:
            await served.grpc.server.serve(replace(service, client=client))
            await client.close()
            for _ in range(6000):
                if (await served.client.get("/health")).status_code == 503:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("health never changed")

    run(scenario())


def test_metrics_are_those_of_grpc(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        await served.client.get("/v1/models")
        shown = await served.client.get("/metrics")
        assert shown.headers["content-type"].startswith("text/plain")
        assert 'method="GET /v1/models"' in shown.text
        assert "sonant_kv_pages" in shown.text

    run_with_http(service, ask)


def test_metrics_of_one_of_several_front_ends_are_refused(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        refused = await served.client.get("/metrics")
        assert refused.status_code == 400
        assert "launch_multiproc_server" in error_of(refused)["message"]

    run_with_http(service, ask, front_ends=2)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/none", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/%ff%00", 404),
        ("POST", "/v1/models", 405),
        ("BREW", "/health", 405),
    ],
)
def test_unknown_paths_and_methods(service: Service, method: str, path: str, status: int) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.client.request(method, path)
        assert response.status_code == status
        assert error_of(response)["code"] in ("not_found", "model_not_found")

    run_with_http(service, ask)


def test_request_ids_are_kept_or_made(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        headers = {"x-request-id": "mine-1"}
        kept = await served.client.get("/v1/models", headers=headers)
        assert kept.headers["x-request-id"] == "mine-1"
        wrong = await served.client.get("/v1/models/none", headers={"x-request-id": "a b"})
        assert len(wrong.headers["x-request-id"]) == 32

    run_with_http(service, ask)


# --- access


def test_tokens(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for path in ("/v1/models", "/metrics"):
            for value in ("", "Bearer wrong", "Basic secret", "Bearer \xff"):
                headers = {"authorization": value.encode("latin1")}
                refused = await served.client.get(path, headers=headers)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
                assert error_of(refused)["type"] == "authentication_error"
            headers = {"authorization": b"Bearer secret"}
            assert (await served.client.get(path, headers=headers)).status_code == 200
        assert (await served.client.get("/health")).status_code == 200

    run_with_http(service, ask, auth_token="secret")


def test_a_client_has_a_limit_of_calls(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        with served.grpc.server.access.counted("ipv4:127.0.0.1"):
            refused = await served.client.get("/v1/models")
        assert refused.status_code == 429
        assert error_of(refused)["code"] == "stream_limit"
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1
        assert (await served.client.get("/v1/models")).status_code == 200

    run_with_http(service, ask, max_streams_per_client=1)


def test_web_pages_of_other_origins_may_not_post(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        own = f"http://{served.http.address}"
        for origin, status in (("https://evil.example", 403), ("null", 403), (own, 400)):
            headers = {"origin": origin}
            response = await served.client.post("/v1/audio/speech", content=b"", headers=headers)
            assert response.status_code == status
            assert "access-control-allow-origin" not in response.headers

    run_with_http(service, ask)


def test_named_origins_may_call(service: Service) -> None:
    page = "https://page.example"

    async def ask(served: HttpServing) -> None:
        asked = {"origin": page, "access-control-request-method": "POST"}
        allowed = await served.client.options("/v1/audio/speech", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == page
        posted = await served.client.post("/v1/audio/speech", headers={"origin": page})
        assert posted.status_code == 400
        assert posted.headers["access-control-allow-origin"] == page
        shown = posted.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-ignored-fields", "retry-after", "retry-after-ms"} == set(shown)
        other = {**asked, "origin": "https://other.example"}
        refused = await served.client.options("/v1/audio/speech", headers=other)
        assert "access-control-allow-origin" not in refused.headers

    run_with_http(service, ask, http_cors_origins=[page])


# --- bounds of connections


def test_half_a_head_is_cut_off(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for start in (b"", b"GET /health HTTP/1.1\r\nhost:"):
            async with raw_connection(served) as raw:
                await raw.send(start)
                assert b"408 Request Timeout" in await raw.rest()
        async with raw_connection(served) as raw:  # the second request of a connection
            await raw.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nG")
            answer = await raw.rest()
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert b"408 Request Timeout" in answer

    run_with_http(service, ask, receive_timeout_s=0.2)


@pytest.fixture
def soon_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close connections soon after a refused body: these tests wait for that."""
    monkeypatch.setattr(connection, "LINGER_S", 0.2)


@pytest.mark.usefixtures("soon_closed")
def test_half_a_body_is_cut_off(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        async with raw_connection(served) as raw:
            await raw.send(post(b'{"input"', length=100))
            answer = await raw.rest()
            assert answer.startswith(b"HTTP/1.1 408")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "idle_timeout"
        served.grpc.server.access.slots.check_integrity()

    run_with_http(service, ask, receive_timeout_s=0.2)


@pytest.mark.usefixtures("soon_closed")
def test_large_bodies_are_refused_before_they_are_sent(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        async with raw_connection(served) as raw:
            await raw.send(post(b"", length=10**9))
            answer = await raw.rest()
            assert answer.startswith(b"HTTP/1.1 413")
        response = await served.client.post("/v1/audio/speech", content=_parts(20_000))
        assert response.status_code == 413
        assert error_of(response)["code"] == "message_too_large"

    run_with_http(service, ask, max_message_bytes=4096)


async def _parts(size: int) -> Any:
    for _ in range(size // 1000):
        yield b" " * 1000


@pytest.mark.usefixtures("soon_closed")
def test_a_refused_body_is_not_read_for_ever(service: Service) -> None:
    """A client that continues to send after the response is cut off."""

    async def ask(served: HttpServing) -> None:
        async with raw_connection(served) as raw:
            await raw.send(post(b"", path="/v1/models", length=10**9))
            answer = await asyncio.wait_for(raw.rest(), HANG_S)
            assert answer.startswith(b"HTTP/1.1 405")

    run_with_http(service, ask)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * 40_000,
    ],
)
def test_what_is_not_http_is_refused(service: Service, data: bytes) -> None:
    async def ask(served: HttpServing) -> None:
        async with raw_connection(served) as raw:
            await raw.send(data)
            assert (await raw.rest()).startswith((b"HTTP/1.1 400", b""))
        assert (await served.client.get("/health")).status_code == 200

    run_with_http(service, ask)


def test_connections_of_a_client_are_bounded(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        await served.client.aclose()
        opened = [await asyncio.open_connection("127.0.0.1", served.http.port) for _ in range(4)]
        async with raw_connection(served) as raw:
            assert (await raw.rest()).startswith(b"HTTP/1.1 429")
        for _, writer in opened:
            writer.transport.abort()
        while served.http.num_connections:
            await asyncio.sleep(0.01)
        async with raw_connection(served) as raw:
            await raw.send(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await raw.rest()).startswith(b"HTTP/1.1 200")

    run_with_http(service, ask, max_streams_per_client=1)


# --- the address


def test_tls_with_and_without_client_certificates(service: Service) -> None:
    async def scenario(client_ca: dict[str, Path]) -> None:
        async with http_serving(service, **FILES, **client_ca) as served:
            context = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
            url = f"https://localhost:{served.http.port}/health"
            if client_ca:
                async with httpx.AsyncClient(verify=context) as client:
                    with pytest.raises(httpx.TransportError):
                        await client.get(url)
                context.load_cert_chain(TLS / "client.pem", TLS / "client.key")
            async with httpx.AsyncClient(verify=context) as client:
                assert (await client.get(url)).status_code == 200

    run(scenario({}))
    run(scenario({"tls_client_ca": TLS / "ca.pem"}))


def test_wrong_tls_files_are_reported() -> None:
    async def start(**values: Path) -> None:
        server = SpeechServer(ServerConfig(http_port=0, **values))
        await HttpServer(server.host.config, server.host, server.access).start()

    with pytest.raises(ConfigError, match=r"cannot use .*ca\.pem"):
        run(start(tls_cert=TLS / "ca.pem", tls_key=TLS / "server.key"))


def test_an_address_in_use_is_reported(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        host = served.grpc.server.host
        config = ServerConfig(http_port=served.http.port)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{served.http.port}"):
            await HttpServer(config, host, served.grpc.server.access).start()

    run_with_http(service, ask)


def test_missing_packages_are_named() -> None:
    check_packages("http_port", "http", ("starlette",))
    with pytest.raises(ConfigError, match=r"http_port needs .* none_such; .*'sonant\[http\]'"):
        check_packages("http_port", "http", ("starlette", "none_such"))


def test_origins_are_checked() -> None:
    ServerConfig(http_cors_origins=["*", "http://localhost:3000"])
    with pytest.raises(ValueError, match="is no origin"):
        ServerConfig(http_cors_origins=["example.org/page"])
