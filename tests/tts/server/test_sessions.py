"""StreamingSynthesize over a real connection: text that arrives over time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.fakes import tiny_config
from tests.tts.serving import (
    CANCEL,
    TEXT,
    Serving,
    collect_speech,
    error_of,
    error_of_reading,
    fields_of,
    flush,
    grouped,
    reason_of,
    run_conversation,
    run_with_server,
    say,
    session_config,
)
from tts.config.server import ServerConfig
from tts.factory import Service, create_service
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb

RATE = 16_000
LONGER_TEXT = " ".join([TEXT] * 30)


def test_streamed_text_gives_the_audio_of_the_whole_text(service: Service) -> None:
    """The audio does not depend on how the text is split."""

    async def ask(served: Serving) -> None:
        parts = [say(TEXT[i : i + 3]) for i in range(0, len(TEXT), 3)]
        spoken = grouped(await run_conversation(served, session_config(max_tokens=90), *parts))
        assert spoken.started.seed == 7
        assert spoken.data == (await collect_speech(served, max_tokens=90)).data
        assert spoken.done.usage.input_characters == len(TEXT)

    run_with_server(service, ask)


def test_a_flush_synthesizes_the_buffered_text(service: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.StreamingSynthesize()
        await call.write(session_config(max_tokens=200))
        await call.write(say("no end in sight"))
        await call.write(flush("f1"))
        kinds, samples = [], 0
        while kinds[-1:] != ["flush_done"]:
            response = await call.read()
            kinds.append(response.WhichOneof("event"))
            samples += response.audio.sample_count
        assert kinds[:2] == ["started", "audio"]
        assert response.flush_done == pb.FlushDone(flush_id="f1", sample_offset=samples)
        await call.write(say("and on"))
        await call.done_writing()
        rest = [response async for response in _responses(call)]
        assert rest[-1].WhichOneof("event") == "done"
        assert rest[0].audio.sample_offset == samples

    run_with_server(service, ask)


async def _responses(call: Any) -> Any:
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response


def test_a_cancellation_drops_text_and_keeps_the_conversation(service: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.StreamingSynthesize()
        await call.write(session_config(max_tokens=None))
        await call.write(say(LONGER_TEXT))
        sequence = []
        while "audio" not in sequence:
            sequence.append((await call.read()).WhichOneof("event"))
        await call.write(CANCEL)
        response = await call.read()
        while response.WhichOneof("event") == "audio":
            response = await call.read()
        dropped_at = response.cancelled.sample_offset
        assert response.WhichOneof("event") == "cancelled"
        await call.write(say("Something else."))
        await call.done_writing()
        rest = [response async for response in _responses(call)]
        assert rest[0].audio.sample_offset == dropped_at
        assert rest[0].audio.text_start >= len(LONGER_TEXT) - 1
        assert rest[-1].WhichOneof("event") == "done"

    run_with_server(service, ask)


def test_buffered_text_is_synthesized_after_the_requested_delay(service: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.StreamingSynthesize()
        await call.write(session_config(max_text_delay=Duration(nanos=50_000_000)))
        await call.write(say("no end in sight"))
        assert (await call.read()).WhichOneof("event") == "started"
        assert (await call.read()).audio.sample_count > 0
        await call.done_writing()
        assert [r async for r in _responses(call)][-1].WhichOneof("event") == "done"

    run_with_server(service, ask)


@pytest.mark.parametrize("eager", [1, 2])
def test_an_eager_call_speaks_before_its_sentence_ends(service: Service, eager: int) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.StreamingSynthesize()
        await call.write(session_config(eager=eager, max_tokens=None))
        await call.write(say("When the weather is fine again, we go "))
        heard = [await call.read(), await call.read()]
        assert [event.WhichOneof("event") for event in heard] == ["started", "audio"]
        await call.write(say("to the sea."))
        await call.done_writing()
        rest = [response async for response in _responses(call)]
        assert rest[-1].WhichOneof("event") == "done"
        assert rest[-2].audio.text_end == len("When the weather is fine again, we go to the sea.")

    run_with_server(service, ask)


@pytest.mark.parametrize("first", [None, session_config(idle_timeout=Duration(nanos=100_000_000))])
def test_idle_conversations_end(
    service: Service, first: pb.StreamingSynthesizeRequest | None
) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.StreamingSynthesize()
        if first is not None:
            await call.write(first)
        error = await error_of_reading(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason_of(error) == "IDLE_TIMEOUT"

    run_with_server(service, ask, idle_timeout_s=0.2 if first is None else 60)


SESSION_FAULTS: list[tuple[list[pb.StreamingSynthesizeRequest], str]] = [
    ([], "config"),
    ([say("hello")], "config"),
    ([pb.StreamingSynthesizeRequest()], "config"),
    ([session_config(), session_config()], "config"),
    ([session_config(), say("Hello. "), session_config()], "config"),
    ([session_config(), pb.StreamingSynthesizeRequest()], "request"),
    ([session_config(), say("x" * 2_001)], "text"),
    ([session_config(), say("a\0b")], "text"),
    ([session_config(), *[say("x" * 500)] * 3], "text"),
    ([session_config(), flush("x" * 129)], "flush.flush_id"),
    ([session_config(speaking_rate=9)], "config.synthesis.speaking_rate"),
    ([session_config(voice=pb.VoiceSelection(name="A B"))], "config.synthesis.voice.name"),
    ([session_config(idle_timeout=Duration())], "config.idle_timeout"),
    ([session_config(max_text_delay=Duration(seconds=-1))], "config.max_text_delay"),
    ([session_config(eager=3)], "config.eager"),
    ([session_config(eager=-1)], "config.eager"),
    ([session_config(eager=1, segment_mode=pb.SEGMENT_MODE_NONE)], "config.eager"),
]


def test_wrong_messages_end_the_conversation(service: Service) -> None:
    async def ask(served: Serving) -> None:
        for messages, field in SESSION_FAULTS:
            call = served.speech.StreamingSynthesize(iter(messages))
            assert fields_of(await error_of(call)) == [field], messages
        assert await run_conversation(served, session_config(), say("Fine."))

    run_with_server(service, ask, max_stream_characters=1_200)


def test_the_audio_of_a_call_is_limited_by_the_server(tiny_checkpoint: Path) -> None:
    """The limit holds for any number of flushes and any requested limit."""
    limit = ServerConfig(max_audio_duration_s=1.0)
    limited = create_service(tiny_config(tiny_checkpoint), limit)

    async def ask(served: Serving) -> None:
        asked = {"max_tokens": 10_000, "max_audio_duration": Duration(seconds=30)}
        texts = [message for _ in range(20) for message in (say(TEXT), flush())]
        answers = await run_conversation(served, session_config(**asked), *texts)
        assert sum(answer.audio.sample_count for answer in answers) <= RATE
        assert answers[-1].done.finish_reason == common_pb2.FINISH_REASON_LENGTH

    run_with_server(limited, ask)
    asyncio.run(limited.client.close())
