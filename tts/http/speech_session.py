"""WebSocket /v1/audio/speech/stream: text in as it is written, audio and times out.

The path is that of gRPC's StreamingSynthesize: the same messages, checks, limits and events.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.routing import BaseRoute

from tts.errors import InvalidRequestError
from tts.http.endpoint import Shared
from tts.http.exchange import JsonBody, parsed, validated
from tts.http.session import Session, session_route
from tts.http.speech import result_fields, segment_fields, words_fields
from tts.http.speech_body import SESSION_NAMES, SessionFrame, to_session
from tts.server.call import note_event, note_input
from tts.speech.types import (
    AudioChunk,
    Done,
    FlushDone,
    SegmentTime,
    SessionEvent,
    Started,
    UtteranceCancelled,
    WordTimes,
)
from tts.v1 import speech_pb2 as pb

PATH = "/v1/audio/speech/stream"
MAX_IGNORED, MAX_NAME = 10, 40  # names that are told, and characters of each

Request = pb.StreamingSynthesizeRequest


class Frame(JsonBody):
    """JSON of any message."""

    type: str


class TextFrame(Frame):
    """JSON of a piece of text."""

    text: str


class FlushFrame(Frame):
    """JSON of a flush."""

    id: str = ""


FRAMES: Mapping[str, type[Frame]] = {
    "text": TextFrame,
    "flush": FlushFrame,
    "cancel": Frame,
    "end": Frame,
    "config": Frame,
}
"""Types of messages; `config` is refused after the first."""


def routes(shared: Shared) -> list[BaseRoute]:
    """Return the routes of this module."""
    return [session_route(shared, PATH, converse, SESSION_NAMES)]


async def converse(session: Session) -> None:
    """Synthesize the text of a session."""
    host, call = session.host, session.call
    frame = await parsed(SessionFrame, session.first.encode())
    first = to_session(frame, host.speech.synthesizer)
    request, times = host.speech.check_session(first, call.request_id)
    async with aclosing(_requests(session)) as requests:
        events = host.speech.converse(request, times, requests)
        writer = EventWriter(session, frame, frame.ignored_by(host.speech.synthesizer))
        async with host.enter(call), aclosing(events):
            async for event in events:
                note_event(call, host.metrics, event)
                await writer.write(event)


async def _requests(session: Session) -> AsyncGenerator[Request, None]:
    """Yield the messages of the wire contract for the client's, until its input ends."""
    async with aclosing(session.messages()) as messages:
        async for text in messages:
            request = await _request(text)
            if request is None:
                return
            note_input(session.call, request.text)
            yield request


async def _request(text: str) -> Request | None:
    """Return a message of the wire contract; None at the end of the input."""
    values = await parsed(Frame, text.encode())
    if values.type not in FRAMES:
        raise InvalidRequestError.of("type", f"must be one of {', '.join(FRAMES)}")
    frame = validated(FRAMES[values.type], {"type": values.type, **(values.model_extra or {})})
    match frame:
        case TextFrame():
            return Request(text=frame.text)
        case FlushFrame():
            return Request(flush=pb.Flush(flush_id=frame.id))
        case Frame(type="cancel"):
            return Request(cancel=pb.CancelUtterance())
        case Frame(type="config"):
            return Request(config=pb.StreamingSynthesizeConfig())
        case _:
            return None


class EventWriter:
    """Writer of a session's events as messages."""

    def __init__(self, session: Session, frame: SessionFrame, ignored: Sequence[str]) -> None:
        self._session, self._frame = session, frame
        self._ignored = [name[:MAX_NAME] for name in ignored[:MAX_IGNORED]]
        self._rate = 1  # Hz; set by the first event

    async def write(self, event: SessionEvent) -> None:
        """Send the message of an event; none for audio without bytes."""
        if isinstance(event, Started):
            self._rate = event.audio_format.sample_rate
        if not isinstance(event, AudioChunk):
            await self._session.write(self._fields(event))
        elif event.data and self._frame.audio == "binary":
            await self._session.write_bytes(event.data)
        elif event.data:
            audio = b64encode(event.data).decode()
            await self._session.write({"type": "audio", "audio": audio})

    def _fields(
        self,
        event: Started | WordTimes | SegmentTime | FlushDone | UtteranceCancelled | Done,
    ) -> dict[str, Any]:
        match event:
            case Started():
                return self._started(event)
            case WordTimes(words):
                return {"type": "words", "words": words_fields(words)}
            case SegmentTime():
                return {"type": "segment", **segment_fields(event)}
            case FlushDone(flush_id, offset):
                return {"type": "flushed", "id": flush_id, "time": self._seconds(offset)}
            case UtteranceCancelled(offset):
                return {"type": "cancelled", "time": self._seconds(offset)}
            case Done(result):
                return {"type": "done", **result_fields(result)}

    def _started(self, event: Started) -> dict[str, Any]:
        return {
            "type": "started",
            "request_id": event.request_id,
            "model": event.model,
            "media_type": self._frame.media_type,
            "sample_rate": self._rate,
            "seed": event.seed,
            "ignored": self._ignored,
        }

    def _seconds(self, num_samples: int) -> float:
        return round(num_samples / self._rate, 4)
