"""Random requests and connections for a real server's HTTP port."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.base import Case, InvariantError, Target
from tests.fuzz.clips import valid_clips
from tests.fuzz.frames import send
from tests.fuzz.mutation import changed_json, json_text, mutated, some_text
from tests.fuzz.server import GENEROUS_S, Served, served
from tts.server.call import REQUEST_ID_KEY

SPEECH, SESSION, VOICES = "/v1/audio/speech", "/v1/audio/speech/stream", "/v1/audio/voices"
CLIP = base64.b64encode(valid_clips(1.2)[0]).decode()
NUM_VOICES = 4  # names that are created and deleted
SETTINGS = {
    "model": "tts-1",
    "voice": "alloy",
    "response_format": "pcm",
    "speed": 1.0,
    "seed": 7,
    "language": "en-US",
    "sample_rate": 16_000,
    "chunk_size": [3, 5],
    "ref_audio": CLIP,
    "ref_text": "hello",
    "instructions": "softly",
}
SAMPLING = {"max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "seed": 7, "stop": ["x"]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
MORE = {"stream": True, "stream_options": {"include_usage": True}, "response_format": SCHEMA}
TURNS = [{"role": "system", "content": "Hi."}, {"role": "user", "content": [{"type": "text"}]}]
TALK = [{"voice": "owen", "text": "Hi."}, {"ref_audio": CLIP, "ref_text": "hello", "text": "Oh."}]
BODIES: Mapping[str, Mapping[str, Any]] = {
    SPEECH: {"input": "Hello.", **SETTINGS, "stream_format": "sse", "timestamps": "segment"},
    "/v1/completions": {"prompt": "once", **SAMPLING, **MORE, "logprobs": 2, "priority": 1},
    "/v1/chat/completions": {"messages": TURNS, **SAMPLING, **MORE, "top_logprobs": 2},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "float"},
    VOICES: {"name": "v", "audio_sample": CLIP, "ref_text": "hello", "consent": "mine"},
}
"""Paths with a body, and one with all its fields."""

FORMATS = ("mp3", "opus", "flac", "wav", "pcm")
PATHS = ("/", "/app.js", "/health", "/metrics", "/v1/models", "/v1/models/x", VOICES, "/none")
ODD_PATHS = (
    "/v1/models/%ff%00",
    "/v1/models/" + "a" * 4000,
    "//",
    "/%2e%2e/x",
    VOICES + "/../x",
    "*",
)
METHODS = ("GET", "GET", "GET", "HEAD", "OPTIONS", "DELETE", "PUT", "BREW")
HEADERS: Mapping[str, tuple[str, ...]] = {
    "authorization": ("Bearer x", "Bearer", "Basic \xff", ""),
    "origin": ("http://localhost", "null", "http://[::1", "https://evil.example", "\xff", ""),
    "x-request-id": ("mine", "a b", "x" * 3000, "\xff"),
    "content-type": ("application/json", "multipart/form-data", "text/plain; charset=utf-7", ""),
    "content-encoding": ("gzip", "identity"),
    "traceparent": ("00-" + "0" * 32 + "-" + "f" * 16 + "-01", "\xff"),
    "expect": ("100-continue", "none"),
    "range": ("bytes=0-1",),
    "if-none-match": ("*", "\xff"),
    "connection": ("close", "keep-alive", "x"),
}
CHARSETS = ("", "", "; charset=utf-8", "; charset=idna", "; charset=undefined", "; charset=\xff")
LONGEST_READ = 300_000
NO_BUGS = frozenset({200, 304, 400, 401, 403, 404, 405, 408, 409, 413, 429})


@dataclass(frozen=True, slots=True)
class Request:
    """One request, valid as HTTP."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None


def some_request(chance: Random) -> Request:
    """Return a request: with a JSON body, with a form, or without a body."""
    kind = chance.random()
    headers = {name: chance.choice(HEADERS[name]) for name in HEADERS if chance.random() < 0.05}
    if kind < 0.7:
        path = chance.choice((SPEECH, *BODIES))
        return Request("POST", path, headers, json_body(path, chance))
    if kind < 0.85:
        head, body = form(chance)
        return Request("POST", VOICES, {**headers, "content-type": head}, body)
    if kind < 0.9:
        return Request("DELETE", f"{VOICES}/{voice_name(chance)}", headers)
    path = chance.choice(PATHS if chance.random() < 0.8 else ODD_PATHS)
    return Request(chance.choice(METHODS), path, headers)


def json_body(path: str, chance: Random) -> bytes:
    """Return some of a path's fields with changes; one of ten bodies is damaged as bytes."""
    value = some_fields(BODIES[path], chance)
    if path == VOICES:
        value["name"] = voice_name(chance)
    if "response_format" in value and path == SPEECH:
        value["response_format"] = chance.choice(FORMATS)
    if path == SPEECH and chance.random() < 0.2:
        del value["input"]
        value |= {"turns": TALK, "pause": 0.1}
    if path == SPEECH:
        value["stream_format"] = chance.choice(("audio", "sse", "json"))
    if chance.random() < 0.6:
        value = changed_json(value, chance)
    data = json_text(value, chance).encode("utf-8", "surrogatepass")
    return mutated(data, chance) if chance.random() < 0.1 else data


def some_fields(fields: Mapping[str, Any], chance: Random) -> dict[str, Any]:
    """Return the first field, which is required, and some of the others."""
    density = chance.choice((0.1, 0.4, 0.9))
    return {
        name: value
        for index, (name, value) in enumerate(fields.items())
        if not index or chance.random() < density or name == "audio_sample"
    }


def voice_name(chance: Random) -> str:
    """Return one of few names, so that they are created, used and deleted."""
    return f"fuzz{chance.randrange(NUM_VOICES)}"


def form(chance: Random) -> tuple[str, bytes]:
    """Return the content type and the bytes of a form, damaged or not."""
    mark = chance.choice(("b", "b" * 70, "-", "b c"))
    names = ("name", "ref_text", "consent", "language", some_text(chance)[:50])
    values = {name: voice_name(chance) if name == "name" else some_text(chance) for name in names}
    parts = [
        f'name="{name}"\r\n\r\n{value}' for name, value in values.items() if chance.random() < 0.7
    ]
    clip = chance.choice(valid_clips(1.2))
    file = b'name="audio_sample"; filename="x"\r\n\r\n' + clip
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts] + [file]
    chance.shuffle(encoded)
    begin = f"--{mark}\r\ncontent-disposition: form-data; ".encode()
    body = b"".join(begin + part + b"\r\n" for part in encoded) + f"--{mark}--\r\n".encode()
    if chance.random() < 0.4:
        body = mutated(body, chance, (begin, mark.encode(), b"\r\n--"))
    return f'multipart/form-data; boundary="{mark}"{chance.choice(CHARSETS)}', body


class Poster:
    """Sends valid HTTP to one server and checks the responses."""

    def __init__(self, server: Served) -> None:
        self._server = server

    def try_one(self, chance: Random) -> None:
        """Send one request, read the response or some of it, and check the server."""
        request = some_request(chance)
        limit = 0 if chance.random() < 0.05 else LONGEST_READ
        assert self._server.server.http is not None
        connection = HTTPConnection(self._server.server.http, timeout=GENEROUS_S)
        try:
            connection.putrequest(request.method, request.path, skip_accept_encoding=True)
            for name, value in request.headers.items():
                connection.putheader(name, value.encode("latin-1"))
            if request.body is not None:
                connection.putheader("content-length", str(len(request.body)))
            connection.endheaders(request.body)
            response = connection.getresponse()
            data = response.read(limit)
        finally:
            connection.close()
        self._server.check()
        self._check(request, response, data)

    def _check(self, request: Request, response: HTTPResponse, data: bytes) -> None:
        place = f"{request.method} {request.path}: {response.status}"
        if response.status not in NO_BUGS:
            raise InvariantError(f"{place}: {data[:500]!r}")
        if response.status < 400 or request.method == "HEAD" or not data:
            return
        if json.loads(data)["error"].keys() != {"message", "type", "param", "code"}:
            raise InvariantError(f"{place}: {data[:500]!r}")
        request_id = response.getheader(REQUEST_ID_KEY)
        if request_id is not None and request_id not in {name for name, _ in self._server.ended}:
            raise InvariantError(f"{place}: {request_id} was not logged")


# --- connections


TEXTS: tuple[dict[str, Any], ...] = (
    {"type": "text", "text": "Hello there. "},
    {"type": "text", "text": "and on it went " * 20},
    {"type": "flush", "id": "a"},
    {"type": "cancel"},
    {"type": "end"},
    {"type": "config"},
)
CONFIG = {
    "type": "config",
    **SETTINGS,
    "audio": "base64",
    "max_text_delay": 0.1,
    "idle_timeout": 1,
    "eager": 2,
}
OPCODES = (0, 1, 2, 8, 9, 10, 3, 15)


def head(method: str, path: str, *lines: str) -> bytes:
    """Return the head of a request."""
    return "\r\n".join((f"{method} {path} HTTP/1.1", "host: x", *lines, "", "")).encode("latin-1")


def frame(chance: Random, opcode: int, data: bytes) -> bytes:
    """Return a client's frame; one of twenty has a wrong length, no mask or reserved bits."""
    first, size, masked = 128 | opcode, len(data), 128
    if chance.random() < 0.05:
        first ^= chance.choice((128, 64, 32, 16))
        size = chance.choice((size, 0, 126, 2**16, 2**62, 2**63))
        masked = chance.choice((0, 128))
    if size < 126:
        return struct.pack(">BB", first, masked | size) + bytes(4) + data
    wide = struct.pack(">BBH", first, masked | 126, size) if size < 2**16 else b""
    return (wide or struct.pack(">BBQ", first, masked | 127, size)) + bytes(4) + data


def session(chance: Random) -> bytes:
    """Return a handshake and messages of a session, of which some are wrong."""
    handshake = head(
        "GET",
        SESSION,
        "upgrade: websocket",
        chance.choice(("connection: upgrade",) * 9 + ("connection: x",)),
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
        f"sec-websocket-version: {chance.choice(('13',) * 9 + ('12',))}",
    )
    config = some_fields(CONFIG, chance)
    values = [config, *(chance.choice(TEXTS) for _ in range(chance.choice((1, 3, 10, 300))))]
    wrong = chance.choice((0.0, 0.05, 0.5))
    texts = [
        json_text(changed_json(v, chance) if chance.random() < wrong else v, chance) for v in values
    ]
    opcodes = [1 if chance.random() < 0.97 else chance.choice(OPCODES) for _ in texts]
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return handshake + b"".join(map(lambda o, t: frame(chance, o, t), opcodes, encoded))


def _posted(chance: Random) -> bytes:
    path = chance.choice((SPEECH, *BODIES))
    body = json_body(path, chance)
    length = len(body) if chance.random() < 0.8 else chance.choice((0, 1, len(body) + 9, 2**40))
    return head("POST", path, f"content-length: {length}") + body


def _chunked(chance: Random) -> bytes:
    body = json_body(SPEECH, chance)
    size = chance.choice((1, 7, 1000))
    parts = [body[at : at + size] for at in range(0, len(body), size)][:20_000]
    wrong = chance.choice(("", "", "", ";a=b", "z", "-", "f" * 20))
    chunks = b"".join(f"{len(part):x}{wrong}\r\n".encode() + part + b"\r\n" for part in parts)
    return head("POST", SPEECH, "transfer-encoding: chunked") + chunks + b"0\r\n\r\n"


def _plain(chance: Random) -> bytes:
    lines = [f"{name}: {chance.choice(HEADERS[name])}" for name in HEADERS if chance.random() < 0.1]
    if chance.random() < 0.1:
        lines += ["x: " + "y" * chance.choice((10, 100))] * chance.choice((1, 100, 1000))
    one = head(chance.choice(METHODS), chance.choice((*PATHS, *ODD_PATHS)), *lines)
    return one * chance.choice((1, 1, 2, 300))


def _garbage(chance: Random) -> bytes:
    return chance.randbytes(chance.choice((1, 24, 3000)))


PARTS: tuple[Callable[[Random], bytes], ...] = (
    *(session, session, session, _posted, _posted, _chunked, _plain, _plain, _garbage),
)


def connection(chance: Random) -> bytes:
    """Return everything that one client sends."""
    parts = [chance.choice(PARTS)(chance) for _ in range(chance.choice((1, 1, 2, 4)))]
    data = b"".join(parts)
    if chance.random() < 0.2:
        data = mutated(data, chance)
    return data[: chance.randrange(len(data) + 1)] if chance.random() < 0.2 else data


class Breaker:
    """Opens connections to the HTTP port of one server."""

    def __init__(self, server: Served) -> None:
        self._server = server

    def try_one(self, chance: Random) -> None:
        """Open one connection, send, close it; then check the server."""
        assert self._server.server.http is not None
        with suppress(ConnectionResetError):
            send(self._server.server.http, connection(chance), chance)
        self._server.check()


@contextmanager
def _requests(folder: Path) -> Iterator[Case]:
    with served(folder) as server:
        yield Poster(server).try_one
        server.check_at_end()


@contextmanager
def _connections(folder: Path) -> Iterator[Case]:
    with served(folder) as server:
        yield Breaker(server).try_one
        server.check_at_end()


HTTP = Target("http", _requests)
HTTP_CONNECTIONS = Target("http_connections", _connections)
