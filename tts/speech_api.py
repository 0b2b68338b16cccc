"""SpeechService without gRPC: proto requests in, proto responses out.

The servicer puts calls, queue and timeouts around it; the command line uses it in process, so
both refuse and answer alike. `check*` is cheap and comes before a request may wait for its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from decoder import AudioEncoding
from tts.config import ServerConfig
from tts.errors import InvalidRequestError, ModelNotFoundError, Precondition, PreconditionError
from tts.proto_checks import Violations, fields_renamed, seconds
from tts.proto_events import (
    to_done,
    to_segment,
    to_session_response,
    to_started,
    to_stream_response,
    to_words,
)
from tts.proto_values import FIELD_PATHS, WireRules, read_config, read_text, voice_of
from tts.speech import SessionEvent, SpeechRequest
from tts.synthesizer import SessionTimes, StreamingSession, Synthesizer
from tts.utterance import closing
from tts.v1 import speech_pb2 as pb

MAX_FLUSH_ID = 128
UNARY_OVERHEAD_BYTES = 64 * 1024
SESSION_PATHS = {
    "config.audio_format": "config.synthesis.audio_format",
    "config.chunking": "config.synthesis.chunking",
    "pronunciations": "config.synthesis.pronunciations",
}

MAX_SAMPLE_BYTES = dict.fromkeys(AudioEncoding, 2.5) | {
    AudioEncoding.PCM_F32LE: 4.0,
    AudioEncoding.MULAW: 1.0,
    AudioEncoding.ALAW: 1.0,
}
"""Most bytes per output sample; compressing formats may grow a little, with short input."""

SynthesizeProto = pb.SynthesizeRequest | pb.SynthesizeStreamRequest


@dataclass(frozen=True, slots=True)
class CheckedSession:
    """A session's first message, checked; its voice is not made yet."""

    request: SpeechRequest
    voice: pb.VoiceSelection
    times: SessionTimes


@dataclass(frozen=True, slots=True)
class CheckedSpeech:
    """A request whose text is known, checked; its voice is not made yet."""

    request: SpeechRequest
    voice: pb.VoiceSelection


class SpeechApi:
    """What the wire contract says about speech, on a synthesizer (None: a text-only model)."""

    def __init__(self, synthesizer: Synthesizer | None, config: ServerConfig | None = None) -> None:
        self._synthesizer = synthesizer
        self._config = config or ServerConfig()

    @property
    def synthesizer(self) -> Synthesizer:
        """The synthesizer; PreconditionError when the model only writes text."""
        if self._synthesizer is None:
            raise PreconditionError(Precondition.SPEECH, "this model writes text only")
        return self._synthesizer

    def check(self, proto: SynthesizeProto, default_id: str = "") -> CheckedSpeech:
        """A unary or streamed request; `default_id` is for one without an id.

        Raises InvalidRequestError with every wrong field found, ModelNotFoundError,
        NotAvailableError or PreconditionError.
        """
        synthesizer = self.synthesizer
        self._check_model(proto.config)
        rules = WireRules(synthesizer.codec)
        with Violations() as wrong:
            text = ""
            try:
                text = read_text(proto.input, self._config.max_text_characters)
            except InvalidRequestError as error:
                wrong.found += error.violations
            request = read_config(proto.config, rules, text)
        return CheckedSpeech(_identified(request, default_id), proto.config.voice)

    async def stream(self, checked: CheckedSpeech) -> AsyncIterator[pb.SynthesizeStreamResponse]:
        """Started, audio, done. Closing the iterator cancels the request."""
        request = await self._with_voice(checked.request, checked.voice, "config.voice")
        with fields_renamed(FIELD_PATHS):
            async with closing(self.synthesizer.stream(request)) as events:
                async for event in events:
                    yield to_stream_response(event)

    async def whole(self, checked: CheckedSpeech) -> pb.SynthesizeResponse:
        """Everything in one message; audio that would not fit into one ends early (LENGTH)."""
        request = await self._with_voice(checked.request, checked.voice, "config.voice")
        longest_s = self._longest_whole_s(request)
        if request.max_audio_s is None or request.max_audio_s > longest_s:
            request = replace(request, max_audio_s=longest_s)
        with fields_renamed(FIELD_PATHS):
            speech = await self.synthesizer.synthesize(request)
        return pb.SynthesizeResponse(
            audio=speech.audio,
            started=to_started(speech.started),
            words=to_words(speech.words).words,
            segments=map(to_segment, speech.segments),
            done=to_done(speech.result),
        )

    def check_session(
        self, proto: pb.StreamingSynthesizeRequest | None, default_id: str = ""
    ) -> CheckedSession:
        """A streaming call's first message; raises as `check` does."""
        if proto is None or proto.WhichOneof("request") != "config":
            raise InvalidRequestError.of("config", "must be the first message of the call")
        config = proto.config
        synthesizer = self.synthesizer
        self._check_model(config.synthesis)
        rules = WireRules(synthesizer.codec, "config.synthesis")
        with Violations() as wrong:
            delay_s, idle_s = seconds(config, "max_text_delay"), seconds(config, "idle_timeout")
            wrong.require((delay_s or 0) >= 0, "config.max_text_delay", "must not be negative")
            is_positive = idle_s is None or idle_s > 0
            wrong.require(is_positive, "config.idle_timeout", "must be above 0")
            request = read_config(config.synthesis, rules)
        longest_s = self._config.idle_timeout_s
        times = SessionTimes(delay_s, longest_s if idle_s is None else min(idle_s, longest_s))
        request = _identified(request, default_id)
        return CheckedSession(request, config.synthesis.voice, times)

    async def converse(
        self, checked: CheckedSession, messages: AsyncIterator[pb.StreamingSynthesizeRequest]
    ) -> AsyncIterator[pb.StreamingSynthesizeResponse]:
        """Answers to the messages after the first; their end is flushed and finished.

        A message that is wrong ends the conversation with InvalidRequestError.
        """
        path = "config.synthesis.voice"
        request = await self._with_voice(checked.request, checked.voice, path)
        with fields_renamed(SESSION_PATHS):
            session = self.synthesizer.open_session(request, checked.times)
            feeding = asyncio.ensure_future(self._feed(session, messages))
            try:
                async with closing(_while_fed(session.events(), feeding)) as events:
                    async for event in events:
                        yield to_session_response(event)
            finally:
                feeding.cancel()
                await asyncio.wait((feeding,))

    async def _feed(
        self, session: StreamingSession, messages: AsyncIterator[pb.StreamingSynthesizeRequest]
    ) -> None:
        async for message in messages:
            match message.WhichOneof("request"):
                case "text":
                    self._check_fragment(message.text, session.num_characters)
                    session.feed(message.text)
                case "flush":
                    self._check_flush(message.flush)
                    session.flush(message.flush.flush_id)
                case "cancel":
                    session.cancel()
                case "config":
                    raise InvalidRequestError.of("config", "must be sent exactly once, at first")
                case _:
                    raise InvalidRequestError.of("request", "the message holds nothing")
        session.close()

    def _check_fragment(self, text: str, num_before: int) -> None:
        config = self._config
        together = num_before + len(text)
        if len(text) > config.max_fragment_characters:
            limit = f"a fragment may have {config.max_fragment_characters}"
            raise InvalidRequestError.of("text", f"has {len(text)} characters, {limit}")
        if together > config.max_stream_characters:
            limit = f"a call may have {config.max_stream_characters}"
            raise InvalidRequestError.of("text", f"{together} characters so far, {limit}")

    @staticmethod
    def _check_flush(flush: pb.Flush) -> None:
        if len(flush.flush_id) > MAX_FLUSH_ID:
            raise InvalidRequestError.of(
                "flush.flush_id", f"has more than {MAX_FLUSH_ID} characters"
            )

    def _check_model(self, config: pb.SynthesisConfig) -> None:
        model = self.synthesizer.settings.model
        if config.model not in ("", model):
            raise ModelNotFoundError(config.model, (model,))

    async def _with_voice(
        self, request: SpeechRequest, selection: pb.VoiceSelection, path: str
    ) -> SpeechRequest:
        return replace(request, voice=await voice_of(selection, self.synthesizer, path))

    def _longest_whole_s(self, request: SpeechRequest) -> float:
        """Seconds of audio whose bytes surely fit into one message."""
        rate = request.sample_rate or self.synthesizer.codec.sample_rate
        room = self._config.max_message_bytes - UNARY_OVERHEAD_BYTES
        return max(1.0, room / (rate * MAX_SAMPLE_BYTES[self.synthesizer.encoding_of(request)]))


def _identified(request: SpeechRequest, default_id: str) -> SpeechRequest:
    return request if request.request_id else replace(request, request_id=default_id)


async def _while_fed(
    events: AsyncIterator[SessionEvent], feeding: asyncio.Future[None]
) -> AsyncIterator[SessionEvent]:
    """The events, until they end or feeding the session fails; then what it raised."""
    async with closing(events):
        while True:
            step = asyncio.ensure_future(anext(events, None))
            try:
                if not feeding.done():
                    await asyncio.wait((step, feeding), return_when=asyncio.FIRST_COMPLETED)
                if feeding.done():
                    feeding.result()
                event = await step
            finally:
                step.cancel()
                await asyncio.wait((step,))
            if event is None:
                return
            yield event
