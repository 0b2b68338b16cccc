"""The published client of Wyoming, `wyoming`, used as Home Assistant's integration uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence

import pytest
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.event import Event
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)

from tests.speech_server import Server, SpeechClient, serving
from tests.tts.serving import run

SEED = 7
ANSWER = ("The kitchen ", "light is on. ", "It is twenty ", "degrees outside.")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The built-in voice."""
    with serving(flags=["--wyoming-port", "0"]) as started:
        yield started


def connected(server: Server) -> AsyncTcpClient:
    assert server.wyoming is not None
    host, _, port = server.wyoming.rpartition(":")
    return AsyncTcpClient(host, int(port))


async def events(client: AsyncTcpClient) -> AsyncIterator[Event]:
    while (event := await client.read_event()) is not None:
        assert not Error.is_type(event.type), event
        yield event


def seeded(event: Event) -> Event:
    event.data["seed"] = SEED
    return event


async def described(server: Server) -> Info:
    async with connected(server) as client:
        await client.write_event(Describe().event())
        async for event in events(client):
            if Info.is_type(event.type):
                return Info.from_event(event)
    raise AssertionError("no information came")


async def whole_text(server: Server, text: str, voice: SynthesizeVoice | None) -> bytes:
    """Return the samples up to the first `audio-stop`."""
    samples = []
    async with connected(server) as client:
        await client.write_event(seeded(Synthesize(text=text, voice=voice).event()))
        async for event in events(client):
            if AudioStop.is_type(event.type):
                break
            if AudioChunk.is_type(event.type):
                chunk = AudioChunk.from_event(event)
                assert (chunk.width, chunk.channels) == (2, 1)
                samples.append(chunk.audio)
    return b"".join(samples)


async def write_chunks(
    client: AsyncTcpClient,
    texts: Sequence[str],
    voice: SynthesizeVoice,
    before_last: Awaitable[object],
) -> None:
    """Send the parts of a text, and the whole text, which servers without streaming speak."""
    await client.write_event(seeded(SynthesizeStart(voice=voice).event()))
    for text in texts[:-1]:
        await client.write_event(SynthesizeChunk(text=text).event())
    await before_last
    await client.write_event(SynthesizeChunk(text=texts[-1]).event())
    await client.write_event(Synthesize(text="".join(texts), voice=voice).event())
    await client.write_event(SynthesizeStop().event())


async def streamed_text(
    server: Server, texts: Sequence[str], voice: SynthesizeVoice, *, waits: bool
) -> tuple[bytes, int]:
    """Return the samples after `audio-start`, up to `synthesize-stopped`, and their rate.

    The last part is sent at once, or `waits` for audio of the first.
    """
    samples: list[bytes] = []
    rate, heard = 0, asyncio.Event()
    async with connected(server) as client:
        before_last = heard.wait() if waits else asyncio.sleep(0)
        writing = asyncio.create_task(write_chunks(client, texts, voice, before_last))
        async for event in events(client):
            if AudioStart.is_type(event.type):
                assert not rate
                rate = AudioStart.from_event(event).rate
            elif AudioChunk.is_type(event.type):
                assert rate
                samples.append(AudioChunk.from_event(event).audio)
                heard.set()
            elif SynthesizeStopped.is_type(event.type):
                break
        await writing
    return b"".join(samples), rate


def test_home_assistant_finds_the_voices(server: Server) -> None:
    info = run(described(server))
    (program,) = info.tts
    assert program.installed
    assert program.supports_synthesize_streaming
    assert program.attribution.name
    voices = {voice.name: voice for voice in program.voices if voice.installed}
    with SpeechClient(server.address) as client:
        assert set(voices) == set(client.voices())
    assert all(voice.languages for voice in voices.values())
    assert [*info.asr, *info.wake, *info.handle, *info.intent, *info.mic, *info.snd] == []


def test_a_whole_text_has_the_audio_of_grpc(server: Server) -> None:
    text = "".join(ANSWER)
    with SpeechClient(server.address) as client:
        for name in client.voices()[:2]:
            expected = client.synthesize(text, voice=name, seed=SEED).pcm
            assert run(whole_text(server, text, SynthesizeVoice(name=name))) == expected
        default = client.synthesize(text, seed=SEED).pcm
    assert run(whole_text(server, text, None)) == default


def test_a_text_in_chunks_has_the_audio_of_grpc(server: Server) -> None:
    with SpeechClient(server.address) as client:
        name = client.voices()[1]
        expected = client.synthesize("".join(ANSWER), voice=name, seed=SEED)
    spoken = run(streamed_text(server, ANSWER, SynthesizeVoice(name=name), waits=False))
    assert spoken == (expected.pcm, expected.sample_rate)


def test_audio_comes_before_the_end_of_the_text(server: Server) -> None:
    pcm, rate = run(streamed_text(server, ANSWER, SynthesizeVoice(), waits=True))
    assert len(pcm) / 2 / rate > 1.0


def test_a_ping_and_an_error(server: Server) -> None:
    async def ask() -> tuple[Pong, Error]:
        async with connected(server) as client:
            await client.write_event(Ping("here").event())
            pong = await client.read_event()
            await client.write_event(Synthesize("Hi.", SynthesizeVoice("ghost")).event())
            error = await client.read_event()
            assert pong
            assert error
            assert await client.read_event() is None
            return Pong.from_event(pong), Error.from_event(error)

    pong, error = run(ask())
    assert pong.text == "here"
    assert error.code == "VOICE_NOT_FOUND"
    assert "no voice 'ghost'; there are: " in error.text
