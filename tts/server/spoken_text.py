"""Calls whose text is spoken while it is generated, for the servicers of all protocols."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from llm import Request
from tts.engine.client import Hold
from tts.server.call import Call, note_event
from tts.server.context import ServerContext
from tts.server.speech_api import OpenSession
from tts.server.text_api import note_piece
from tts.speech.types import Done, SpeechEvent, SpeechUsage
from tts.textgen.generator import TextPiece
from tts.textgen.spoken import speak_text
from tts.v1 import text_pb2 as pb


@dataclass(frozen=True, slots=True)
class SpokenTextRequest:
    """Checked request for a text, and the function that opens the session of its speech."""

    text: Request
    stops: Sequence[str]
    open_session: OpenSession


async def check_spoken(
    host: ServerContext, call: Call, proto: pb.GenerateSpeechRequest, *, is_whole: bool = False
) -> SpokenTextRequest:
    """Return the checked request; raises as `TextApi.check` and `prepare` of the speaker do.

    `is_whole`: the audio fits into one message.
    """
    text = await host.text.check(call, proto)
    prepared = host.speaker.prepare(proto.synthesis, call.request_id, is_whole=is_whole)
    return SpokenTextRequest(text, proto.config.sampling.stop, prepared)


async def generate_spoken(
    host: ServerContext, call: Call, request: SpokenTextRequest
) -> AsyncGenerator[TextPiece | SpeechEvent, None]:
    """Yield the pieces of the text and the events of its speech, and record them in the call.

    The latency of the first audio counts from the first text. Closing the iterator cancels both.
    """
    session = await request.open_session()
    written, usage = TextPiece(""), SpeechUsage()
    hold = Hold()
    pieces = host.text.write(request.text, request.stops, hold)
    async with aclosing(speak_text(pieces, session, hold)) as events:
        async for event in events:
            if isinstance(event, TextPiece):
                written = event
                note_piece(call, event)
                if event.text and call.first_input is None:
                    call.first_input = time.monotonic()
            else:
                note_event(call, host.metrics, event)
                usage = event.result.usage if isinstance(event, Done) else usage
            yield event
    call.prompt_tokens = written.prompt_tokens + usage.prompt_tokens
    call.output_tokens = written.output_tokens + usage.output_tokens
