"""HTTP/2 frames, valid and invalid, for a real server; other clients must not be affected."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from tests.fuzz.base import Case, Target
from tests.fuzz.mutation import mutated
from tests.fuzz.rpcs import methods
from tests.fuzz.server import GENEROUS_S, Served, served
from tests.tts.server.raw_http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    field,
)

PRIORITY, PUSH_PROMISE, CONTINUATION = 2, 5, 9
PADDED, WITH_PRIORITY = 8, 32
LONGEST_FLOOD = 2000
READ_S = 0.02
PATHS = tuple(method.path.encode() for method in methods())
ODD_PATHS = (b"/\xff", b"", b"/", b"x", b"/" * 100, b"/tts.v1.SpeechService/None", b"/a\0b", b"//")


def frame(
    kind: int, flags: int, stream: int, payload: bytes = b"", size: int | None = None
) -> bytes:
    """Return one frame; `size` states another length than the payload has."""
    stated = struct.pack(">I", len(payload) if size is None else size)[1:]
    return stated + struct.pack(">BBI", kind & 255, flags & 255, stream & 0xFFFFFFFF) + payload


def request_headers(chance: Random) -> bytes:
    """Return the header block of a gRPC call, in which about one header of eight is invalid or
    absent.
    """
    headers = [
        (b":method", b"POST", (b"GET", b"", b"post", b"PUT")),
        (b":scheme", b"http", (b"https", b"", b"\xff")),
        (b":path", chance.choice(PATHS), ODD_PATHS),
        (b":authority", b"localhost", (b"", b"\xff", b"a" * 120)),
        (b"te", b"trailers", (b"gzip", b"")),
        (b"content-type", b"application/grpc", (b"text/html", b"application/grpc+json", b"")),
        (b"grpc-timeout", b"1S", (b"-1S", b"99999999H", b"x", b"0n", b"1", b"123456789012S")),
        (b"grpc-encoding", b"identity", (b"gzip", b"deflate", b"none", b"\xff")),
        (b"authorization", b"Bearer x", (b"\xff\xfe", b"\xc3", b"Bearer", b"\x80" * 100)),
        (b"x-data-bin", b"AAAA", (b"!", b"=", b"\xff")),
        (b"traceparent", b"00", (b"\xff\xff", b"00-" + b"0" * 50)),
    ]
    kept = [(n, chance.choice(odd) if chance.random() < 0.12 else v) for n, v, odd in headers]
    kept = [pair for pair in kept if chance.random() > 0.03]
    if chance.random() < 0.1:
        chance.shuffle(kept)
    if chance.random() < 0.1:
        kept.append(chance.choice(kept or [(b"a", b"b")]))
    if chance.random() < 0.05:
        kept.append((b"x-many", b"v" * 100))
        kept += [(b"x-%d" % i, b"v" * 100) for i in range(chance.choice((5, 100, 300)))]
    block = b"".join(field(name, value) for name, value in kept)
    return mutated(block, chance) if chance.random() < 0.15 else block


def _call(chance: Random) -> bytes:
    """Return a call whose message is complete, cut off, too long, or marked as compressed."""
    stream = chance.choice((1, 1, 1, 3, 2, 0, 2**31 - 1))
    body = chance.randbytes(chance.choice((0, 3, 60)))
    size = chance.choice((len(body), len(body), len(body) + 5, 2**32 - 1, 0))
    message = bytes((chance.choice((0, 0, 0, 1, 255)),)) + struct.pack(">I", size) + body
    message = chance.choice((message, message, message[:3], message * 3))
    flags = chance.choice((END_STREAM, END_STREAM, 0, PADDED))
    data = frame(DATA, flags, stream, message)
    end = frame(RST_STREAM, 0, stream, struct.pack(">I", chance.choice((0, 8, 99))))
    tail = chance.choice((b"", b"", end, data, data[: len(data) // 2]))
    return frame(HEADERS, END_HEADERS, stream, request_headers(chance)) + data + tail


def _random_frames(chance: Random) -> bytes:
    return b"".join(_random_frame(chance) for _ in range(chance.choice((1, 3, 20))))


def _random_frame(chance: Random) -> bytes:
    kind = chance.choice((*range(10), chance.randrange(256)))
    flags = chance.choice((0, ACK, END_HEADERS, END_HEADERS | END_STREAM, chance.randrange(256)))
    stream = chance.choice((0, 1, 1, 2, 3, 2**31 - 1, 2**32 - 1))
    payload = chance.randbytes(chance.choice((0, 1, 4, 5, 6, 8, 9, 12, 300)))
    if kind == HEADERS and chance.random() < 0.7:
        payload = request_headers(chance)
    size = chance.choice((0, 1, 16_385, 2**24 - 1)) if chance.random() < 0.1 else None
    return frame(kind, flags, stream, payload, size)


def _flood(chance: Random) -> bytes:
    """Return many repetitions of one small frame."""
    count = chance.choice((10, 200, LONGEST_FLOOD))
    setting = struct.pack(
        ">HI", chance.randrange(1, 9), chance.choice((0, 1, 2**14, 2**31, 2**32 - 1))
    )
    one = chance.choice(
        (
            frame(SETTINGS, 0, 0, setting),
            frame(SETTINGS, 0, 0, setting * 20),
            frame(SETTINGS, ACK, 0),
            frame(PING, 0, 0, bytes(8)),
            frame(PING, ACK, 0, bytes(8)),
            frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", chance.choice((0, 1, 2**31 - 1)))),
            frame(PRIORITY, 0, 1, struct.pack(">IB", 1, 1)),
            frame(DATA, 0, 1),
            frame(GOAWAY, 0, 0, bytes(8)),
            frame(PUSH_PROMISE, END_HEADERS, 1, bytes(8)),
        )
    )
    return one * count


def _resets(chance: Random) -> bytes:
    """Return calls that are reset at once, on one stream after the other."""
    block = request_headers(chance)
    streams = range(1, 2 * chance.choice((5, 100, 400)), 2)
    reset = struct.pack(">I", 8)
    flags = chance.choice((END_HEADERS, END_HEADERS | END_STREAM))
    return b"".join(
        frame(HEADERS, flags, stream, block) + frame(RST_STREAM, 0, stream, reset)
        for stream in streams
    )


def _endless_headers(chance: Random) -> bytes:
    """Return a header block without an end, in frames that may be empty."""
    part = chance.choice((b"", field(b"x-a", b"b" * 100), b"\x82", chance.randbytes(20)))
    first = frame(HEADERS, chance.choice((0, END_STREAM)), 1, request_headers(chance))
    more = frame(CONTINUATION, 0, chance.choice((1, 1, 1, 3)), part)
    return first + more * chance.choice((1, 50, LONGEST_FLOOD))


def _padded(chance: Random) -> bytes:
    block = bytes((chance.choice((0, 5, 255)),)) + request_headers(chance)
    flags = END_HEADERS | chance.choice((PADDED, WITH_PRIORITY, PADDED | WITH_PRIORITY))
    return frame(HEADERS, flags, 1, block)


def _garbage(chance: Random) -> bytes:
    return chance.randbytes(chance.choice((1, 24, 3000)))


PARTS: tuple[Callable[[Random], bytes], ...] = (
    *(_call, _call, _call, _random_frames, _random_frames),
    *(_flood, _resets, _endless_headers, _padded, _garbage),
)


def connection(chance: Random) -> bytes:
    """Return everything that one client sends."""
    begin = PREFACE + frame(SETTINGS, 0, 0)
    begin = (
        chance.choice((b"", PREFACE, PREFACE[:10], begin * 2, b"GET / HTTP/1.1\r\n\r\n"))
        if (chance.random() < 0.08)
        else begin
    )
    parts = [chance.choice(PARTS)(chance) for _ in range(chance.choice((1, 1, 2, 4)))]
    data = begin + b"".join(parts)
    if chance.random() < 0.1:
        data = mutated(data, chance)
    return data[: chance.randrange(len(data) + 1)] if chance.random() < 0.2 else data


def send(address: str, data: bytes, chance: Random) -> None:
    """Open a connection, send as far as the server accepts it, read or not, end regularly or
    not.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), GENEROUS_S) as client:
        with suppress(OSError):
            client.settimeout(1)
            at = chance.randrange(len(data) + 1)
            client.sendall(data[:at])
            client.sendall(data[at:])
            client.settimeout(READ_S)
            for _ in range(chance.choice((0, 1, 1, 3))):
                client.recv(65_536)
        if chance.random() < 0.3:  # a reset in place of an end
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Sender:
    """Opens connections to one server."""

    def __init__(self, server: Served) -> None:
        self._server = server

    def try_one(self, chance: Random) -> None:
        """Open one connection, send, close it; then check the server."""
        data = connection(chance)
        with suppress(ConnectionRefusedError, ConnectionResetError):  # the listener is replaced
            send(self._server.server.address, data, chance)
        self._server.check()


@contextmanager
def _opened(folder: Path) -> Iterator[Case]:
    with served(folder) as server:
        yield Sender(server).try_one
        server.check_at_end()


FRAMES = Target("frames", _opened)
