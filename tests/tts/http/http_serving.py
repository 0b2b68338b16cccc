"""A real server with gRPC and HTTP on the loopback interface, and the requests that tests make."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from tests.deadlines import HANG_S
from tests.fakes import wait_until_idle
from tests.tts.serving import TEXT, Serving, run, serving
from tts.factory import Service
from tts.http.server import HttpServer

Result = TypeVar("Result")

SPEECH = "/v1/audio/speech"


@dataclass(frozen=True)
class HttpServing:
    """A server of both protocols, and an HTTP client."""

    grpc: Serving
    http: HttpServer
    client: httpx.AsyncClient

    async def speak(self, **values: Any) -> httpx.Response:
        """Request speech: 40 tokens at most, as random weights rarely choose the end token."""
        return await self.client.post(SPEECH, json=speech(**values))

    @property
    def num_open(self) -> int:
        return self.grpc.server.host.calls.num_open


def speech(**values: Any) -> dict[str, Any]:
    """Return the JSON of a short request."""
    return {"input": TEXT, "response_format": "pcm", "seed": 7, **values}


@asynccontextmanager
async def http_serving(service: Service, **values: Any) -> AsyncIterator[HttpServing]:
    """Serve on free ports with these values of ServerConfig."""
    async with serving(service, http_port=0, **values) as served:
        server = HttpServer(served.server.host.config, served.server.host, served.server.access)
        await server.start()
        try:
            async with httpx.AsyncClient(
                base_url=f"http://{server.address}",
                timeout=HANG_S,
                limits=httpx.Limits(),
                verify=False,  # reading the certificates of all authorities takes as long as a test
                trust_env=False,
            ) as client:
                yield HttpServing(served, server, client)
            assert await served.server.host.calls.wait_idle(60)
            await wait_until_idle(service.client)
        finally:
            await server.stop()
            assert server.num_connections == 0


def run_with_http(
    service: Service, ask: Callable[[HttpServing], Coroutine[Any, Any, Result]], **values: Any
) -> Result:
    """Serve, run the requests, stop."""

    async def scenario() -> Result:
        async with http_serving(service, **values) as served:
            return await ask(served)

    return run(scenario())


@dataclass
class RawConnection:
    """A TCP connection on which a test sends any bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self) -> bytes:
        """Return all bytes until the server closes the connection."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""


@asynccontextmanager
async def raw_connection(served: HttpServing, **options: Any) -> AsyncIterator[RawConnection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.http.port, **options)
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.transport.abort()


def post(body: bytes, path: str = SPEECH, length: int | None = None) -> bytes:
    """Return the bytes of a POST; `length`: what the header states instead of the truth."""
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode() + body


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error in a response, which has OpenAI's shape."""
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    return error


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the server-sent events of a response."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.content.split(b"\n\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data: ") for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]
