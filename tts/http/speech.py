"""POST /v1/audio/speech: audio streamed as it is, as server-sent events, or whole in JSON."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any

from starlette.routing import BaseRoute

from tts.http.endpoint import Shared
from tts.http.exchange import Exchange, event
from tts.http.speech_body import NAMES, SpeechBody, to_request
from tts.server.call import note_event, note_result
from tts.speech.types import (
    AudioChunk,
    Done,
    MarkTime,
    SegmentTime,
    SpeechEvent,
    SpeechRequest,
    Started,
    SynthesisResult,
    WordTime,
    WordTimes,
)


def routes(shared: Shared) -> list[BaseRoute]:
    """Return the routes of this module."""
    return [shared.route("POST", "/v1/audio/speech", speak, has_body=True, names=NAMES)]


async def speak(exchange: Exchange) -> None:
    """Synthesize the text of a request."""
    body = await exchange.json(SpeechBody)
    speech, call = exchange.host.speech, exchange.call
    message = to_request(body, speech.synthesizer)
    request = speech.check(message, call.request_id)
    call.note_text(request.text)
    exchange.name_ignored(body.ignored_by(speech.synthesizer))
    match body.stream_format:
        case "audio":
            exchange.headers["content-type"] = body.media_type
            await _stream(exchange, request, _audio)
        case "sse":
            exchange.begin_events()
            await _stream(exchange, request, _event)
        case "json":
            await _whole(exchange, request, body.media_type)


async def _stream(
    exchange: Exchange, request: SpeechRequest, encode: Callable[[SpeechEvent], bytes]
) -> None:
    """Send what `encode` makes of each event; nothing is sent before the first audio."""
    host, call = exchange.host, exchange.call
    stream = host.speech.synthesizer.stream
    async with host.request(call) as slot, aclosing(stream(request, slot)) as events:
        async for found in events:
            note_event(call, host.metrics, found)
            data = encode(found)
            if data:
                await exchange.write(data)
    await exchange.finish()


def _audio(found: SpeechEvent) -> bytes:
    return found.data if isinstance(found, AudioChunk) else b""


def _event(found: SpeechEvent) -> bytes:
    """Return an event of a synthesis as a server-sent event; b"" for none."""
    match found:
        case AudioChunk(data) if data:
            return event("speech.audio.delta", {"audio": b64encode(data).decode()})
        case WordTimes(words):
            return event("speech.audio.words", {"words": words_fields(words)})
        case SegmentTime():
            return event("speech.audio.segment", segment_fields(found))
        case MarkTime():
            return event("speech.audio.mark", mark_fields(found))
        case Done(result):
            return event("speech.audio.done", result_fields(result))
        case Started() | AudioChunk():
            return b""


async def _whole(exchange: Exchange, request: SpeechRequest, media_type: str) -> None:
    host, call = exchange.host, exchange.call
    async with host.enter(call):
        spoken = await host.speech.whole(request)
    call.audio_s = spoken.result.usage.audio_s
    note_result(call, spoken.result)
    await exchange.reply(
        {
            "audio": b64encode(spoken.audio).decode(),
            "media_type": media_type,
            "sample_rate": spoken.started.audio_format.sample_rate,
            "seed": spoken.started.seed,
            "words": words_fields(spoken.words),
            "segments": [segment_fields(segment) for segment in spoken.segments],
            "marks": [mark_fields(mark) for mark in spoken.marks],
            **result_fields(spoken.result),
        }
    )


def words_fields(words: Iterable[WordTime]) -> list[dict[str, Any]]:
    """Return the JSON of word times; all times are seconds."""
    return [
        {
            "word": word.word,
            "start": round(word.start_s, 4),
            "end": round(word.end_s, 4),
            "text_start": word.text_start,
            "text_end": word.text_end,
        }
        for word in words
    ]


def segment_fields(segment: SegmentTime) -> dict[str, Any]:
    """Return the JSON of a segment's time."""
    return {
        "index": segment.index,
        "start": round(segment.start_s, 4),
        "end": round(segment.end_s, 4),
        "text_start": segment.text_start,
        "text_end": segment.text_end,
    }


def mark_fields(mark: MarkTime) -> dict[str, Any]:
    """Return the JSON of a mark's time, which names one sample: six digits of a second."""
    return {
        "kind": mark.kind.value,
        "name": mark.name,
        "time": round(mark.time_s, 6),
        "text_start": mark.text_start,
        "text_end": mark.text_end,
    }


def result_fields(result: SynthesisResult) -> dict[str, Any]:
    """Return the JSON of a result: usage, reason of the end, warnings, pronunciations."""
    usage = result.usage
    return {
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.output_tokens,
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
            "audio_seconds": round(usage.audio_s, 4),
        },
        "finish_reason": result.finish_reason.value,
        "warnings": list(result.warnings),
        "pronunciations": [
            {"phrase": said.phrase, "spoken": said.spoken, "alphabet": said.alphabet.value}
            for said in result.pronunciations
        ],
        "retried_segments": result.num_retried_segments,
    }
