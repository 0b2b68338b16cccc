"""Wyoming over a real connection: voices, whole texts, texts in chunks, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import tiny_config
from tests.tts.serving import TEXT, config, grouped, run, run_conversation, say, session_config
from tests.tts.wyoming.client import Client, WyomingServing, frame, pcm, wyoming_server
from tts import __version__
from tts.config.server import ServerConfig
from tts.factory import Service, create_service
from tts.server.server import SpeechServer
from tts.v1 import speech_pb2 as pb
from tts.voices.types import Voice
from tts.wyoming.connection import MAX_REQUESTS
from tts.wyoming.server import WyomingServer
from tts.wyoming.wire import to_info

RATE = 16_000
SHORT = "Hello."

Body = Callable[[WyomingServing], Awaitable[None]]


def with_server(service: Service, body: Body, **values: Any) -> None:
    async def scenario() -> None:
        async with wyoming_server(service, **values) as served:
            await body(served)

    run(scenario())


async def over_grpc(served: WyomingServing, text: str, seed: int = 7, **values: Any) -> bytes:
    request = pb.SynthesizeStreamRequest(
        config=config(seed, None, **values), input=pb.SynthesisInput(text=text)
    )
    return grouped([r async for r in served.grpc.speech.SynthesizeStream(request)]).data


def test_the_voices_are_described(service: Service) -> None:
    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            await client.send("describe")
            (info,) = await client.until("info")
            (program,) = info.data["tts"]
            assert program["name"] == "sonant"
            assert program["supports_synthesize_streaming"] is True
            assert program["installed"] is True
            assert program["version"] == __version__
            assert [voice["name"] for voice in program["voices"]] == ["hazel", "owen", "edith"]
            first = program["voices"][0]
            assert first["languages"] == ["en-US"]
            assert first["description"] == "Hazel"
            assert first["installed"] is True
            assert set(first["attribution"]) == {"name", "url"}
            assert [info.data[kind] for kind in ("asr", "wake", "intent")] == [[], [], []]

    with_server(service, body)


@pytest.mark.parametrize(
    ("codes", "languages"),
    [
        ([("en-US", "de"), ()], [["en-US", "de"], ["en-US", "de"]]),
        ([("fr",), ("de",), ()], [["fr"], ["de"], ["fr", "de"]]),
        ([()], [["en"]]),
        ([], []),
    ],
)
def test_every_voice_has_a_language(
    codes: list[tuple[str, ...]], languages: list[list[str]]
) -> None:
    voices = [Voice(f"v{number}", language_codes=own) for number, own in enumerate(codes)]
    info = json.loads(to_info(voices, "model").partition(b"\n")[2])
    listed = info["tts"][0]["voices"]
    assert [voice["languages"] for voice in listed] == languages
    assert [voice["description"] for voice in listed] == [voice.name for voice in voices]


def test_a_text_is_spoken_as_over_grpc(service: Service) -> None:
    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            await client.send("synthesize", text=TEXT, voice={"name": "owen"}, seed=7)
            events = await client.until("audio-stop")
            expected = await over_grpc(served, TEXT, voice=pb.VoiceSelection(name="owen"))
            assert pcm(events) == expected
            assert events[0].type == "audio-start"
            audio_format = {"rate": RATE, "width": 2, "channels": 1}
            assert events[0].data == {**audio_format, "timestamp": 0}
            sent = 0
            for chunk in events[1:-1]:
                assert chunk.data == {**audio_format, "timestamp": sent * 1000 // RATE}
                assert len(chunk.payload) % 2 == 0
                sent += len(chunk.payload) // 2
            assert events[-1].data == {"timestamp": round(sent * 1000 / RATE)}
            handled = {"grpc_service": "wyoming", "grpc_method": "synthesize", "grpc_code": "OK"}
            assert served.grpc.metric("grpc_server_handled_total", **handled) == 1

    with_server(service, body)


def test_ssml_is_spoken(service: Service) -> None:
    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            document = "<speak>Hello <break time='1s'/> there.</speak>"
            await client.send("synthesize", text=document, text_format="ssml", seed=7)
            marked = pcm(await client.until("audio-stop"))
            plain = [await over_grpc(served, text) for text in ("Hello",)]
            assert marked[: len(plain[0])] == plain[0]
            assert not any(marked[len(plain[0]) : len(plain[0]) + 2 * RATE])

    with_server(service, body)


@pytest.mark.parametrize(
    ("voice", "selected"),
    [
        (None, {}),
        ({}, {}),
        ({"name": "edith", "language": "de"}, {"name": "edith"}),  # a name overrides the language
        ({"language": "en_US"}, {"language_code": "en-US"}),
    ],
)
def test_voices_are_selected(
    service: Service, voice: dict[str, str] | None, selected: dict[str, str]
) -> None:
    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            await client.send("synthesize", text=SHORT, voice=voice, seed=3)
            events = await client.until("audio-stop")
            selection = pb.VoiceSelection(**selected)
            assert pcm(events) == await over_grpc(served, SHORT, 3, voice=selection)

    with_server(service, body)


def test_text_in_chunks_is_spoken_as_over_grpc(service: Service) -> None:
    """The whole text, which Home Assistant sends for servers without streaming, is not spoken."""

    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            await client.send("synthesize-start", voice={"name": "owen"}, seed=7)
            for start in range(0, len(TEXT), 3):
                await client.send("synthesize-chunk", text=TEXT[start : start + 3])
            await client.send("synthesize", text=TEXT, voice={"name": "owen"})
            await client.send("synthesize-stop")
            events = await client.until("synthesize-stopped")
            kinds = [event.type for event in events]
            chunks = ["audio-chunk"] * (len(kinds) - 3)
            assert kinds == ["audio-start", *chunks, "audio-stop", "synthesize-stopped"]
            first = session_config(max_tokens=None, voice=pb.VoiceSelection(name="owen"))
            spoken = grouped(await run_conversation(served.grpc, first, say(TEXT)))
            assert pcm(events) == spoken.data
            assert spoken.data
            await client.send("synthesize", text=SHORT, seed=3)
            assert pcm(await client.until("audio-stop")) == await over_grpc(served, SHORT, 3)

    with_server(service, body)


def test_audio_of_the_first_sentence_does_not_wait_for_the_second(service: Service) -> None:
    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            await client.send("synthesize-start")
            await client.send("synthesize-chunk", text="One sentence is here. And")
            assert (await client.until("audio-chunk"))[-1].payload
            await client.send("synthesize-chunk", text=" another.")
            await client.send("synthesize-stop")
            await client.until("synthesize-stopped")

    with_server(service, body)


def test_the_chunk_that_is_a_whole_text_is_cut_into_fragments(service: Service) -> None:
    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            await client.send("synthesize-start", seed=7)
            await client.send("synthesize-chunk", text=TEXT)
            await client.send("synthesize-stop")
            events = await client.until("synthesize-stopped")
            assert pcm(events) == await over_grpc(served, TEXT)

    with_server(service, body, max_fragment_characters=8)


def test_requests_of_one_connection_are_spoken_in_order(service: Service) -> None:
    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            await client.send("synthesize", text=TEXT, seed=1)
            await client.send("synthesize-start", seed=2)
            await client.send("synthesize-chunk", text=SHORT)
            await client.send("synthesize-stop")
            await client.send("synthesize", text=SHORT, seed=3)
            spoken = [pcm(await client.until("audio-stop")) for _ in range(3)]
            expected = [await over_grpc(served, t, s) for t, s in ((TEXT, 1), (SHORT, 2))]
            assert spoken == [*expected, await over_grpc(served, SHORT, 3)]

    with_server(service, body)


def test_the_limit_of_open_requests_is_not_one_of_requests_in_all(service: Service) -> None:
    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            for _ in range(MAX_REQUESTS + 1):
                await client.send("synthesize", text="...")
                await client.until("audio-stop")
            for _ in range(2):
                await client.send("synthesize-start")
                await client.send("synthesize-chunk", text="........")
                await client.send("synthesize-stop")
                await client.until("synthesize-stopped")

    with_server(service, body, max_stream_characters=10)


def test_a_ping_is_answered_while_a_text_is_spoken(service: Service) -> None:
    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            await client.send("synthesize", text=" ".join([TEXT] * 20))
            await client.until("audio-chunk")
            await client.send("ping", text="hello")
            events = await client.until("pong")
            assert events[-1].data == {"text": "hello"}
            assert "audio-stop" not in [event.type for event in events]

    with_server(service, body)


def test_unknown_events_and_payloads_are_skipped(service: Service) -> None:
    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            client.writer.write(b'{"type": "audio-chunk", "payload_length": 100000}\n')
            client.writer.write(bytes(100_000))
            client.writer.write(b'{"type": "select-program", "data": {"name": "x"}}\n')
            client.writer.write(b'{"type": "unknown", "data_length": 3}\n\xff\xff\xff')
            client.writer.write(b'{"type": "ping", "data": {"text": "here"}, "version": "9"}\n')
            assert (await client.until("pong"))[0].data == {"text": "here"}

    with_server(service, body)


def test_a_closed_sending_side_still_gets_its_information(service: Service) -> None:
    """Scripts check a server with one line through nc, which closes its side first."""

    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            client.writer.write(b'{"type": "describe"}\n')
            client.writer.write_eof()
            assert (await client.until("info"))[0].data["tts"]
            assert await client.read() is None

    with_server(service, body)


@pytest.mark.parametrize(
    ("request_data", "code", "text"),
    [
        ({"text": ""}, "INVALID_REQUEST", "is empty"),
        ({"text": "x" * 10_001}, "INVALID_REQUEST", "10001 characters, the limit is 10000"),
        ({"text": 7}, "INVALID_REQUEST", "Expected `str`, got `int` - at `$.text`"),
        ({}, "INVALID_REQUEST", "missing required field `text`"),
        ({"text": "a\0b"}, "INVALID_REQUEST", "input.text"),
        ({"text": SHORT, "voice": {"name": "ghost"}}, "VOICE_NOT_FOUND", "there are: edith, hazel"),
        ({"text": SHORT, "voice": {"name": "../x"}}, "INVALID_REQUEST", "is no voice name"),
        ({"text": SHORT, "voice": {"language": "fr"}}, "VOICE_NOT_FOUND", "language fr"),
        ({"text": SHORT, "voice": {"name": "hazel", "speaker": "2"}}, "INVALID_REQUEST", "speaker"),
        ({"text": SHORT, "voice": "hazel"}, "INVALID_REQUEST", "got `str` - at `$.voice`"),
        ({"text": SHORT, "text_format": "ssml"}, "INVALID_REQUEST", "input.ssml: line 1, column 1"),
        ({"text": SHORT, "text_format": "markdown"}, "INVALID_REQUEST", "must be text or ssml"),
        ({"text": SHORT, "seed": -1}, "INVALID_REQUEST", "seed"),
        ({"text": SHORT, "seed": 2**64}, "INVALID_REQUEST", "seed"),
    ],
)
def test_a_wrong_request_ends_the_connection_with_an_error(
    service: Service, request_data: dict[str, Any], code: str, text: str
) -> None:
    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            await client.send("synthesize", **request_data)
            error = await client.last()
            assert error.type == "error"
            assert error.data["code"] == code
            assert text in error.data["text"]

    with_server(service, body)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([frame("synthesize-chunk", text="a")], "synthesize-chunk: send synthesize-start first"),
        ([frame("synthesize-stop")], "synthesize-stop: send synthesize-start first"),
        ([frame("synthesize-start")] * 2, "synthesize-start: a text stream is open already"),
        ([frame("synthesize-start", text_format="ssml")], "text_format: must be text"),
        ([frame("synthesize-start"), frame("synthesize-chunk")], "missing required field `text`"),
        ([frame("synthesize-start"), frame("synthesize-chunk", text="a\0")], "text"),
        (
            [frame("synthesize-start"), *[frame("synthesize-chunk", text="a" * 9_000)] * 12],
            "100000",
        ),
        ([frame("synthesize", text=SHORT)] * (MAX_REQUESTS + 1), f"has {MAX_REQUESTS} requests"),
        ([frame("synthesize", text="a " * 4_900)] * 11, "more than 100000 characters wait"),
        ([frame("ping", text=3)], "Expected `str | null`"),
    ],
)
def test_events_out_of_order_end_the_connection_with_an_error(
    service: Service, frames: list[bytes], text: str
) -> None:
    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            client.writer.write(b"".join(frames))
            error = await client.last()
            assert error.type == "error"
            assert text in error.data["text"]

    with_server(service, body)


def test_calls_are_refused_while_the_model_is_loading_and_when_it_drains(
    service: Service,
) -> None:
    async def code_of(client: Client) -> str:
        await client.send("describe")
        return str((await client.last()).data["code"])

    async def scenario() -> None:
        server = SpeechServer(ServerConfig(port=0, wyoming_port=0))
        wyoming = WyomingServer(server.host.config, server.host, server.access)
        await server.start()
        await wyoming.start()
        try:
            for prepare, code in ((None, "LOADING"), (server.host.drain, "DRAINING")):
                if prepare is not None:
                    server.host.serve(service)
                    prepare()
                client = Client(*await asyncio.open_connection("127.0.0.1", wyoming.port))
                assert await code_of(client) == code
                await client.close()
        finally:
            await wyoming.stop()
            await server.stop()

    run(scenario())


def test_a_model_without_speech_is_reported(text_checkpoint: Path) -> None:
    async def scenario() -> None:
        service = create_service(tiny_config(text_checkpoint))
        server = SpeechServer(ServerConfig(port=0, wyoming_port=0))
        wyoming = WyomingServer(server.host.config, server.host, server.access)
        await server.start()
        await wyoming.start()
        await server.serve(service)
        try:
            client = Client(*await asyncio.open_connection("127.0.0.1", wyoming.port))
            await client.send("describe")
            assert (await client.last()).data["code"] == "SPEECH_UNAVAILABLE"
            await client.close()
        finally:
            await wyoming.stop()
            await server.stop()
            await service.client.close()

    run(scenario())


def test_a_text_stream_ends_at_the_longest_audio(tiny_checkpoint: Path) -> None:
    """The rest of its text is dropped, and the next request of the connection is spoken."""

    async def body(served: WyomingServing) -> None:
        async with served.client() as client:
            await client.send("synthesize-start")
            await client.send("synthesize-chunk", text=" ".join([TEXT] * 5))
            events = await client.until("synthesize-stopped")
            assert len(pcm(events)) == RATE * 2
            for _ in range(10):
                await client.send("synthesize-chunk", text=TEXT)
            await client.send("synthesize", text=TEXT)
            await client.send("synthesize-stop")
            await client.send("synthesize", text=SHORT)
            kinds = [event.type for event in await client.until("audio-stop")]
            assert kinds.count("audio-start") == 1

    limit = ServerConfig(max_audio_duration_s=1.0)
    service = create_service(tiny_config(tiny_checkpoint), limit)

    async def scenario() -> None:
        async with wyoming_server(service, max_stream_characters=6 * len(TEXT)) as served:
            await body(served)
        await service.client.close()

    run(scenario())
