"""A minimal HTTP/2 client that can send what a gRPC library never sends."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FIRST_WINDOW = 65_535
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 3, 4  # settings
FRAME_BYTES = 16_384


def field(name: bytes, value: bytes) -> bytes:
    """A header, literal and not indexed (RFC 7541, 6.2.2)."""
    assert len(name) < 127, name
    assert len(value) < 127, value
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


class RawClient:
    """One connection; a task records the received frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.window = FIRST_WINDOW  # of the connection
        self.first_window = FIRST_WINDOW  # of a new stream
        self.settings: dict[int, int] = {}
        self.windows: dict[int, int] = {}
        self.ended: set[int] = set()
        self.received: defaultdict[int, bytes] = defaultdict(bytes)
        """Header blocks and data of each stream, undecoded."""
        self.greeted = asyncio.Event()
        self.changed = asyncio.Event()
        self.is_closed = False
        self._reading = asyncio.create_task(self._read())

    def send(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        """Write one frame."""
        size = struct.pack(">I", len(payload))[1:]
        self._writer.write(size + struct.pack(">BBI", kind, flags, stream) + payload)

    def open(
        self, stream: int, path: bytes, *headers: tuple[bytes, bytes], flags: int = END_HEADERS
    ) -> None:
        """Send the headers of a gRPC call."""
        block = b"".join(
            field(name, value)
            for name, value in (
                (b":method", b"POST"),
                (b":scheme", b"http"),
                (b":path", path),
                (b":authority", b"localhost"),
                (b"te", b"trailers"),
                (b"content-type", b"application/grpc"),
                *headers,
            )
        )
        self.windows[stream] = self.first_window
        self.send(HEADERS, flags, stream, block)

    async def send_body(self, stream: int, announced: int, num_bytes: int) -> int:
        """Send bytes of a message of the announced length, within the flow-control windows.

        Returns how many were sent when the stream ended or the server granted no more for 1 s.
        """
        message = b"\0" + struct.pack(">I", announced)
        left = num_bytes
        while left and stream not in self.ended and not self.is_closed:
            size = min(left, self.windows[stream], self.window, FRAME_BYTES)
            if size <= 0:
                self.changed.clear()
                try:
                    await asyncio.wait_for(self.changed.wait(), 1)
                except TimeoutError:
                    break
                continue
            chunk = (message + bytes(size))[:size]
            message = message[size:]
            self.send(DATA, 0, stream, chunk)
            self.windows[stream] -= size
            self.window -= size
            left -= size
            with suppress(ConnectionError):
                await self._writer.drain()
        return num_bytes - left

    async def until(self, *streams: int) -> None:
        """Wait for these streams' ends."""
        while not self.ended.issuperset(streams):
            assert not self.is_closed, "the connection ended first"
            self.changed.clear()
            await self.changed.wait()

    async def close(self) -> None:
        """Drop the connection."""
        self._writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await self._writer.wait_closed()
        await self._reading

    async def _read(self) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            while True:
                head = await self._reader.readexactly(9)
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
                self._take(kind, flags, stream, payload)
                self.changed.set()
        self.is_closed = True
        self.changed.set()
        self.greeted.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for number, value in struct.iter_unpack(">HI", payload):
                self.settings[number] = value
                if number == INITIAL_WINDOW_SIZE:
                    self.first_window = value
            self.send(SETTINGS, ACK, 0)
            self.greeted.set()
        elif kind == PING and not flags & ACK:
            self.send(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            (more,) = struct.unpack(">I", payload)
            if stream:
                self.windows[stream] += more
            else:
                self.window += more
        elif kind in (DATA, HEADERS):
            self.received[stream] += payload
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.ended.add(stream)


@asynccontextmanager
async def raw_client(
    address: str, context: ssl.SSLContext | None = None, source: str | None = None
) -> AsyncIterator[RawClient]:
    """A connection that has exchanged settings; `source` is the address it comes from."""
    host, _, port = address.rpartition(":")
    name = "localhost" if context else None
    reader, writer = await asyncio.open_connection(
        host,
        int(port),
        ssl=context,
        server_hostname=name,
        local_addr=(source, 0) if source else None,
    )
    client = RawClient(reader, writer)
    writer.write(PREFACE)
    client.send(SETTINGS, 0, 0)
    try:
        await client.greeted.wait()
        if client.is_closed:
            raise ConnectionResetError("closed before the server's settings came")
        yield client
    finally:
        await client.close()
