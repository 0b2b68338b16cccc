"""A Wyoming server for tests, and a client that writes and reads the protocol's bytes itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.tts.serving import Serving, checked_server
from tts.factory import Service
from tts.wyoming.server import WyomingServer


@dataclass(frozen=True)
class Event:
    """One event of the server."""

    type: str
    data: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


class Client:
    """One connection; events are sent as Home Assistant does, with the data after the line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, kind: str, **data: Any) -> None:
        self.writer.write(frame(kind, **data))
        await self.writer.drain()

    async def read(self) -> Event | None:
        """Return the next event; None at the end of the connection."""
        line = await self.reader.readline()
        if not line:
            return None
        header = json.loads(line)
        data = await self.reader.readexactly(header.get("data_length", 0))
        payload = await self.reader.readexactly(header.get("payload_length", 0))
        return Event(header["type"], json.loads(data) if data else {}, payload)

    async def until(self, kind: str) -> list[Event]:
        """Return the events up to the first of a type, and that one."""
        events: list[Event] = []
        while not events or events[-1].type != kind:
            event = await self.read()
            assert event is not None, [event.type for event in events]
            assert event.type != "error" or kind == "error", event.data
            events.append(event)
        return events

    async def last(self) -> Event:
        """Return the last event before the connection ends."""
        events = []
        while (event := await self.read()) is not None:
            events.append(event)
        return events[-1]

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


def frame(kind: str, **data: Any) -> bytes:
    """Return the bytes of an event."""
    packed = json.dumps(data, ensure_ascii=False).encode()
    return json.dumps({"type": kind, "data_length": len(packed)}).encode() + b"\n" + packed


def pcm(events: list[Event]) -> bytes:
    return b"".join(event.payload for event in events if event.type == "audio-chunk")


@dataclass(frozen=True)
class WyomingServing:
    """A server with a Wyoming port, and its gRPC port for comparisons."""

    grpc: Serving
    server: WyomingServer

    async def connect(self) -> Client:
        address = "127.0.0.1", self.server.port
        return Client(*await asyncio.open_connection(*address, limit=2**24))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        client = await self.connect()
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def wyoming_server(service: Service, **values: Any) -> AsyncIterator[WyomingServing]:
    """A server that must still answer over gRPC after the body, with no resource in use."""
    async with checked_server(service, wyoming_port=0, **values) as served:
        host = served.server.host
        wyoming = WyomingServer(host.config, host, served.server.access)
        await wyoming.start()
        try:
            yield WyomingServing(served, wyoming)
        finally:
            await wyoming.stop()
            assert wyoming.num_connections == 0
