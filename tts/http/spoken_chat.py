"""Chats with `modalities` text and audio: the text is spoken while it is generated.

OpenAI's fields, in messages and in chunks of a stream: `audio` with `id`, `data`, `transcript` and
`expires_at`. `words` and `segments` are ours.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from contextlib import aclosing
from io import BytesIO
from typing import Any

from decoder import apply_patches, finalize_header
from llm import FinishReason
from tts.http.exchange import Exchange, data_event
from tts.http.responses import LAST_EVENT, ChatResponse, usage_fields
from tts.http.speech import segment_fields, words_fields
from tts.http.text_body import ChatAudio, ChatBody
from tts.server.spoken_text import check_spoken, generate_spoken
from tts.speech.types import (
    AudioChunk,
    Done,
    SegmentTime,
    SpeechEvent,
    SynthesisResult,
    WordTimes,
)
from tts.textgen.generator import TextPiece
from tts.v1 import text_pb2 as pb


async def speak_chat(
    exchange: Exchange, body: ChatBody, audio: ChatAudio, message: pb.GenerateRequest
) -> None:
    """Generate a text, speak it, and send both; nothing is sent before the first token."""
    host, call = exchange.host, exchange.call
    proto = pb.GenerateSpeechRequest(
        config=message.config,
        input=message.input,
        synthesis=audio.synthesis(host.speaker.names),
    )
    request = await check_spoken(host, call, proto, is_whole=not body.stream)
    response = SpokenChatResponse(exchange, body)
    if body.stream:
        exchange.begin_events()
    async with host.enter(call), aclosing(generate_spoken(host, call, request)) as events:
        async for event in events:
            if not body.stream:
                response.collect(event)
            elif data := b"".join(map(data_event, response.chunks(event))):
                await exchange.write(data)
    if body.stream:
        await exchange.finish(b"".join(map(data_event, response.closing())) + LAST_EVENT)
    else:
        await exchange.reply(response.whole())


class SpokenChatResponse(ChatResponse):
    """Response of a chat that is spoken. Every event goes to `collect` or, for a stream, to
    `chunks`, which `closing` ends.
    """

    def __init__(self, exchange: Exchange, body: ChatBody) -> None:
        super().__init__(exchange, body, body.logprobs)
        self._id = f"audio_{exchange.call.request_id}"
        self._data: list[bytes] = []
        self._num_samples = 0
        self._times: dict[str, list[dict[str, Any]]] = {}
        self._result: SynthesisResult | None = None

    def collect(self, event: TextPiece | SpeechEvent) -> None:
        """Collect the next event of a whole response."""
        match event:
            case TextPiece():
                self.add(event)
            case AudioChunk(data):
                self._data.append(data)
                self._num_samples += event.sample_count
            case Done(result):
                self._result = result
            case WordTimes() | SegmentTime():
                for name, times in _times(event).items():
                    self._times.setdefault(name, []).extend(times)

    def chunks(self, event: TextPiece | SpeechEvent) -> Iterator[dict[str, Any]]:
        """Yield the JSON of the chunks for the next event of a stream."""
        match event:
            case TextPiece():
                self._last = event
                yield from self._text_chunks(event)
            case AudioChunk(data) if data:
                yield self._audio_chunk(data=b64encode(data).decode())
            case Done(result):
                self._result = result
            case WordTimes() | SegmentTime():
                yield self._audio_chunk(**_times(event))

    def closing(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON of the last chunks, after the text and the audio have ended."""
        yield self._audio_chunk(expires_at=self._created)
        yield from self._last_chunks(self._last)

    def _message(self, text: str) -> dict[str, Any]:
        assert self._result is not None
        file = BytesIO(apply_patches(b"".join(self._data), self._result.header_patches))
        finalize_header(file, self._num_samples)  # a speech server sends no patches
        audio = {
            "id": self._id,
            "data": b64encode(file.getvalue()).decode(),
            "transcript": text,
            "expires_at": self._created,  # the server does not keep it
            **self._times,
        }
        message = {"role": "assistant", "content": None, "refusal": None, "audio": audio}
        return {"message": message}

    def _opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"audio": {"id": self._id, "transcript": text}} if text else {}}

    def _audio_chunk(self, **fields: Any) -> dict[str, Any]:
        return self._event({"delta": {"audio": {"id": self._id, **fields}}})

    def _reason(self, piece: TextPiece) -> str:
        """Return `length` if either the text or the audio has reached its limit."""
        assert self._result is not None
        is_cut = self._result.finish_reason is FinishReason.LENGTH
        return FinishReason.LENGTH.value if is_cut else super()._reason(piece)

    def _usage(self, piece: TextPiece) -> dict[str, Any]:
        assert self._result is not None
        spoken = self._result.usage.output_tokens
        usage = usage_fields(piece)
        for name in ("completion_tokens", "total_tokens"):
            usage[name] += spoken
        details = {"text_tokens": piece.output_tokens, "audio_tokens": spoken}
        return {**usage, "completion_tokens_details": details}


def _times(event: WordTimes | SegmentTime) -> dict[str, list[dict[str, Any]]]:
    if isinstance(event, WordTimes):
        return {"words": words_fields(event.words)}
    return {"segments": [segment_fields(event)]}
