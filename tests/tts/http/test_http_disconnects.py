"""A hundred clients that disconnect over HTTP at random moments; nothing of them is left."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from websockets.client import ClientProtocol
from websockets.uri import parse_uri

from tests.fakes import wait_until_idle
from tests.tts.http.http_serving import (
    HttpServing,
    RawConnection,
    post,
    raw_connection,
    run_with_http,
)
from tests.tts.http.test_http_websocket import CONFIG, HANDSHAKE, LONG
from tests.tts.serving import hum, wav
from tts.factory import Service

SEED = 5
NUM_CLIENTS, AT_ONCE = 100, 10
LONGEST_S = 0.3  # in which a request of the tiny model runs; most clients leave earlier
CLIP = base64.b64encode(wav(hum(1.5))).decode()


def speech_of(draw: random.Random) -> bytes:
    """Return a request for speech of any format, or of a recorded voice."""
    formats = [("audio", name) for name in ("mp3", "opus", "flac", "wav", "pcm")]
    stream_format, encoding = draw.choice(
        [*formats, ("sse", "pcm"), ("sse", "mp3"), ("json", "wav")]
    )
    values = {"input": LONG, "stream_format": stream_format, "response_format": encoding}
    voice = draw.choice(({}, {}, {"ref_audio": CLIP, "ref_text": "hello"}))
    return post(json.dumps({**values, **voice}).encode())


def completion_of(draw: random.Random) -> bytes:
    """Return a request for text."""
    values = {"prompt": "once upon a time", "max_tokens": 200, "stream": draw.random() < 0.5}
    return post(json.dumps({**values, "ignore_eos": True}).encode(), "/v1/completions")


def voice_of(draw: random.Random) -> bytes:
    """Return a request for a new voice whose name is not valid, or whose body is cut off."""
    values = {"name": "mine", "audio_sample": CLIP, "ref_text": "hello", "language": "?"}
    body = json.dumps(values).encode()
    return post(body, "/v1/audio/voices", len(body) + draw.choice((0, 9)))


def session_of(draw: random.Random) -> bytes:
    """Return the opening handshake and the messages of a session, cut anywhere by its caller."""
    config = {**CONFIG, "response_format": draw.choice(("pcm", "mp3", "opus"))}
    texts = [{"type": "text", "text": LONG}, {"type": "flush"}, {"type": "text", "text": LONG}]
    last = draw.choice(({"type": "cancel"}, {"type": "end"}, {"type": "text", "text": "More."}))
    return HANDSHAKE + frames(config, *texts, last)


def frames(*messages: dict[str, Any]) -> bytes:
    """Return the frames of a client's messages."""
    client = ClientProtocol(parse_uri("ws://x/"))
    client.state = client.state.OPEN
    for message in messages:
        client.send_text(json.dumps(message).encode())
    return b"".join(client.data_to_send())


REQUESTS: tuple[Callable[[random.Random], bytes], ...] = (
    speech_of,
    speech_of,
    session_of,
    session_of,
    completion_of,
    voice_of,
)


async def disconnect(served: HttpServing, draw: random.Random) -> None:
    """Send a request or the beginning of one, read some of the response, and disconnect."""
    data = draw.choice(REQUESTS)(draw)
    is_cut = draw.random() < 0.2
    async with raw_connection(served) as raw:
        await raw.send(data[: draw.randrange(len(data))] if is_cut else data)
        match draw.randrange(4):
            case 0:
                pass  # at once, perhaps in the queue
            case 1:
                await asyncio.sleep(draw.uniform(0, LONGEST_S))
            case 2 if not is_cut:
                await read(raw, draw.choice((1, 300, 3000, 30_000)))
            case _:
                raw.writer.write_eof()
                await asyncio.sleep(draw.uniform(0, 0.05))


async def read(raw: RawConnection, num_bytes: int) -> None:
    """Read so many bytes, or those that come soon."""
    with suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
        await asyncio.wait_for(raw.reader.readexactly(num_bytes), LONGEST_S)


def held() -> Counter[str]:
    """Return what this process holds: tasks by their coroutine, threads, open files.

    Executors, whose threads are named with a number, keep them.
    """
    tasks = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
    threads = [thread.name for thread in threading.enumerate()]
    own = [name for name in threads if not re.search(r"_\d+$", name)]
    return Counter((*tasks, *own, *(["file"] * len(os.listdir("/proc/self/fd")))))


async def is_idle(served: HttpServing, service: Service) -> None:
    """Wait until the server has nothing of a client: connections, calls, pages, audio streams."""
    host = served.grpc.server.host
    async with asyncio.timeout(60):
        while served.http.num_connections > 1:  # that of `served.client`
            await asyncio.sleep(0.005)
    assert await host.calls.wait_idle(60)
    await wait_until_idle(service.client)
    served.grpc.server.access.slots.check_integrity()
    host.admission.check_integrity()
    assert (host.admission.running, host.admission.waiting) == (0, 0)


def num_calls(served: HttpServing, code: str) -> float:
    """Return the number of calls over HTTP that ended with a code."""
    samples = served.grpc.server.host.metrics.handled.collect()[0].samples
    return sum(
        s.value for s in samples if s.name.endswith("_total") and s.labels["grpc_code"] == code
    )


def test_a_hundred_clients_disconnect(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(SEED)

    async def ask(served: HttpServing) -> None:
        expected = (await served.speak()).content
        for number in range(NUM_CLIENTS // AT_ONCE):
            await asyncio.gather(*(disconnect(served, draw) for _ in range(AT_ONCE)))
            await is_idle(served, service)
            if not number:
                before = held()  # after libraries have opened what they keep
        assert held() == before
        assert (await served.speak()).content == expected
        assert num_calls(served, "CANCELLED") > NUM_CLIENTS / 3
        assert num_calls(served, "INTERNAL") == 0

    with caplog.at_level(logging.WARNING):
        run_with_http(service, ask, max_concurrent_requests=4, max_queued_requests=8)
    assert caplog.records == []
