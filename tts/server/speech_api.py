"""SpeechService without gRPC: protocol messages in, events of `tts.speech.types` out.

The servicer adds calls, queue and timeouts; the command line uses it in process, so both accept
the same requests and return the same results. `check*` is cheap and runs before a request waits
in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from decoder import AudioEncoding
from tts.config.server import ServerConfig
from tts.errors import InvalidRequestError, ModelNotFoundError, Precondition, PreconditionError
from tts.server.wire.common import Violations, optional
from tts.server.wire.dialogue import read_cast, read_turns
from tts.server.wire.speech import read_config, read_input, read_voice
from tts.speech.session import SessionTimes, StreamingSession
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import SessionEvent, SpeechRequest, SynthesizedSpeech
from tts.text.segmenter import MAX_EAGER, SegmentMode
from tts.textgen.spoken import SpokenSession
from tts.v1 import speech_pb2 as pb

MAX_FLUSH_ID = 128
UNARY_OVERHEAD_BYTES = 64 * 1024
MAX_SAMPLE_BYTES = dict.fromkeys(AudioEncoding, 2.5) | {
    AudioEncoding.PCM_F32LE: 4.0,
    AudioEncoding.MULAW: 1.0,
    AudioEncoding.ALAW: 1.0,
}
"""Maximum number of bytes per output sample; compressed formats can grow for short input."""

OpenSession = Callable[[], Awaitable[SpokenSession]]
SynthesizeProto = pb.SynthesizeRequest | pb.SynthesizeStreamRequest


class SpeechApi:
    """Implementation of SpeechService's messages on a synthesizer (None: a text-only model)."""

    def __init__(self, synthesizer: Synthesizer | None, config: ServerConfig | None = None) -> None:
        self._synthesizer = synthesizer
        self._config = config or ServerConfig()

    @property
    def synthesizer(self) -> Synthesizer:
        """Return the synthesizer. Raises PreconditionError for a text-only model."""
        if self._synthesizer is None:
            message = "this model writes text only"
            if self._config.speech_server is not None:
                message += "; the speech server speaks what it generates (GenerateSpeech, chats)"
            raise PreconditionError(Precondition.SPEECH, message)
        return self._synthesizer

    def check(self, proto: SynthesizeProto, default_id: str = "") -> SpeechRequest:
        """Return the checked request of a unary or server-streaming call.

        `default_id` is used for a request without an id.

        Raises InvalidRequestError with every wrong field found, ModelNotFoundError,
        VoiceNotFoundError, NotAvailableError or PreconditionError.
        """
        synthesizer = self._checked_model(proto.config)
        with Violations() as wrong:
            limit, has_turns = self._config.max_text_characters, proto.input.HasField("dialogue")
            if has_turns:
                text, markup = read_turns(proto.input.dialogue, limit, wrong)
            else:
                text, markup = read_input(proto.input, limit, wrong)
            request = read_config(
                proto.config, synthesizer.codec, "config", wrong, text=text, default_id=default_id
            )
        request = self._with_voice(request, proto.config)
        if markup is None:
            return request
        assert request.voice is not None
        cast = read_cast(proto.input.dialogue, synthesizer, request.voice) if has_turns else {}
        return replace(request, markup=markup, cast=cast)

    async def whole(self, request: SpeechRequest) -> SynthesizedSpeech:
        """Return the whole synthesis; audio too long for one message ends early (LENGTH)."""
        return await self.synthesizer.synthesize(self.within_message(request))

    def within_message(self, request: SpeechRequest) -> SpeechRequest:
        """Return the request with audio that fits into one message, if it is not shorter."""
        longest_s = self._longest_whole_s(request)
        if request.max_audio_s is None or request.max_audio_s > longest_s:
            return replace(request, max_audio_s=longest_s)
        return request

    def check_session(
        self, proto: pb.StreamingSynthesizeRequest | None, default_id: str = ""
    ) -> tuple[SpeechRequest, SessionTimes]:
        """Return a streaming call's first message and its times; raises as `check` does."""
        if proto is None or proto.WhichOneof("request") != "config":
            raise InvalidRequestError.of("config", "must be the first message of the call")
        config = proto.config
        codec = self._checked_model(config.synthesis).codec
        with Violations() as wrong:
            delay_s, idle_s = optional(config, "max_text_delay"), optional(config, "idle_timeout")
            wrong.require((delay_s or 0) >= 0, "config.max_text_delay", "must not be negative")
            is_positive = idle_s is None or idle_s > 0
            wrong.require(is_positive, "config.idle_timeout", "must be above 0")
            wrong.require(
                0 <= config.eager <= MAX_EAGER, "config.eager", f"must be in [0, {MAX_EAGER}]"
            )
            request = read_config(
                config.synthesis, codec, "config.synthesis", wrong, default_id=default_id
            )
            is_split = request.segment_mode is not SegmentMode.NONE
            unsplit = "needs a segment mode that splits the text"
            wrong.require(is_split or not config.eager, "config.eager", unsplit)
            request = replace(request, eager=config.eager)
        longest_s = self._config.idle_timeout_s
        times = SessionTimes(delay_s, longest_s if idle_s is None else min(idle_s, longest_s))
        return self._with_voice(request, config.synthesis), times

    @property
    def names(self) -> Synthesizer:
        """The component that knows the names of models and voices; see `synthesizer`."""
        return self.synthesizer

    def prepare(
        self, config: pb.SynthesisConfig, request_id: str, *, is_whole: bool = False
    ) -> OpenSession:
        """Return the function that opens a session for the speech of a generated text.

        Without a segment mode clauses are spoken, for the lowest latency. `is_whole`: the audio
        fits into one message. Raises as `check` does.
        """
        codec = self._checked_model(config).codec
        with Violations() as wrong:
            request = read_config(config, codec, "synthesis", wrong, default_id=request_id)
        if not config.segment_mode:
            request = replace(request, segment_mode=SegmentMode.CLAUSE)
        request = self._with_voice(request, config)
        return partial(self.open_session, self.within_message(request) if is_whole else request)

    async def open_session(
        self, request: SpeechRequest, times: SessionTimes | None = None
    ) -> StreamingSession:
        """Return a session for a checked request; the voice of a recording is read first."""
        synthesizer = self.synthesizer
        voice = await synthesizer.cloner.ready(request.voice or synthesizer.voices.default)
        return synthesizer.open_session(replace(request, voice=voice), times)

    async def converse(
        self,
        request: SpeechRequest,
        times: SessionTimes,
        messages: AsyncIterator[pb.StreamingSynthesizeRequest],
    ) -> AsyncGenerator[SessionEvent, None]:
        """Yield the events for the messages after the first; flush and finish after the last.

        An invalid message ends the session with InvalidRequestError.
        """
        session = await self.open_session(request, times)
        feeding = asyncio.ensure_future(self._feed(session, messages))
        try:
            async with aclosing(_while_fed(session.events(), feeding)) as events:
                async for event in events:
                    yield event
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
                    raise InvalidRequestError.of("config", "must be in the first message only")
                case _:
                    raise InvalidRequestError.of("request", "the message is empty")
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

    def _checked_model(self, config: pb.SynthesisConfig) -> Synthesizer:
        """Return the synthesizer; raise ModelNotFoundError when the config names another model."""
        synthesizer = self.synthesizer
        model = synthesizer.settings.model
        if config.model not in ("", model):
            raise ModelNotFoundError(config.model, (model,))
        return synthesizer

    def _with_voice(self, request: SpeechRequest, config: pb.SynthesisConfig) -> SpeechRequest:
        path, instructions = request.path, config.instructions
        self.synthesizer.check_instructions(instructions, f"{path}.instructions")
        voice = read_voice(config.voice, self.synthesizer, f"{path}.voice")
        if instructions != voice.instructions:
            voice = replace(voice, instructions=instructions)
        return replace(request, voice=voice)

    def _longest_whole_s(self, request: SpeechRequest) -> float:
        """Return the seconds of audio that are certain to fit into one message."""
        rate = request.sample_rate or self.synthesizer.codec.sample_rate
        encoding = request.encoding or self.synthesizer.settings.raw_encoding
        return longest_whole_s(self._config.max_message_bytes, rate, encoding)


def longest_whole_s(max_message_bytes: int, sample_rate: int, encoding: AudioEncoding) -> float:
    """Return the seconds of audio that are certain to fit into a message of this size."""
    room = max_message_bytes - UNARY_OVERHEAD_BYTES
    return max(1.0, room / (sample_rate * MAX_SAMPLE_BYTES[encoding]))


async def _while_fed(
    events: AsyncGenerator[SessionEvent, None], feeding: asyncio.Future[None]
) -> AsyncGenerator[SessionEvent, None]:
    """Yield the events until they end; raise the error of the feeding task when it fails."""
    async with aclosing(events):
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
