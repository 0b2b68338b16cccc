"""`LoadedVoice`: speaks texts in this process, for callers with and without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import numpy as np

from tts.api.audio import Speech, SpeechPart
from tts.api.loop import RemoteIterator, wait
from tts.api.request import CheckedRequest, SpeechOptions
from tts.api.running import RunningService
from tts.errors import InvalidRequestError
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import (
    AudioChunk,
    Done,
    MarkTime,
    SegmentTime,
    SpeechRequest,
    Started,
    WordTimes,
)
from tts.text.markup.dialogue import DialogueTurn, voice_of_turn
from tts.voices.types import Voice

NO_SAMPLES = np.zeros(0, dtype=np.float32)


Turns = Sequence[tuple["str | LoadedVoice", str] | tuple["str | LoadedVoice", str, str]]
"""Turns of a dialogue: of each the voice, "" for that of the call, the text, and instructions if
they are not those of the call.
"""


class LoadedVoice:
    """A model in this process and the voice that it speaks with. `tts.load` makes one.

    The methods may be called from any thread and from any event loop, also at the same time: texts
    that are spoken together share the model's steps. `with load() as voice:` closes it at the end.
    """

    def __init__(self, service: RunningService, voice: Voice | None = None) -> None:
        self._service, self._voice = service, voice

    def __repr__(self) -> str:
        return f"<LoadedVoice of {self._service.model}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of the voices that the model brings, for the option `voice`."""
        return tuple(voice.name for voice in self._synthesizer.voices.voices())

    @property
    def sample_rate(self) -> int:
        """Samples per second of the model's audio, in Hz."""
        return self._synthesizer.codec.sample_rate

    def say(self, text: str | Turns, **options: Unpack[SpeechOptions]) -> Speech:
        """Speak a text, or the turns of a dialogue, and return all of its audio.

        A turn is a voice by its name, or as `clone` returns it, and what it says; a third element
        is how, in words.
        Raises `InvalidRequestError` for a text or an option that cannot be used,
        `VoiceNotFoundError` for an unknown voice, `PreconditionError` for what this model cannot
        do, `TypeError` for an unknown option, and `RuntimeError` after `close`.
        """
        return wait(self._service.submit(self._say(self._checked(text, options))))

    async def asay(self, text: str | Turns, **options: Unpack[SpeechOptions]) -> Speech:
        """Speak a text without blocking the event loop; otherwise as `say`."""
        work = self._service.submit(self._say(self._checked(text, options)))
        return await asyncio.wrap_future(work)

    def stream(self, text: str | Turns, **options: Unpack[SpeechOptions]) -> Iterator[SpeechPart]:
        """Speak a text or a dialogue and yield its audio as it is made.

        Leaving the iterator early cancels the rest. Raises as `say` does.
        """
        return self._stream(self._checked(text, options))

    def astream(
        self, text: str | Turns, **options: Unpack[SpeechOptions]
    ) -> AsyncIterator[SpeechPart]:
        """Speak a text or a dialogue; as `stream`, without blocking the event loop."""
        return self._astream(self._checked(text, options))

    def clone(self, clip: str | Path | bytes, transcript: str = "") -> LoadedVoice:
        """Return a voice that imitates a recording, on the same model.

        `clip` is a WAV, FLAC or Ogg file of 1 to 30 seconds, by its path or as its bytes;
        `transcript` is what is said in it, which most models need. Closing either voice closes the
        model. Raises `InvalidRequestError` for a clip or a transcript that cannot be used,
        `PreconditionError` for a model that does not clone, and `OSError` when the file cannot be
        read.
        """
        return wait(self._service.submit(self._clone(clip, transcript)))

    async def aclone(self, clip: str | Path | bytes, transcript: str = "") -> LoadedVoice:
        """Return a voice that imitates a recording; as `clone`, without blocking."""
        return await asyncio.wrap_future(self._service.submit(self._clone(clip, transcript)))

    def close(self) -> None:
        """Cancel what is being spoken and release the model. Calling it again is harmless."""
        self._service.close()

    async def aclose(self) -> None:
        """Release the model without blocking the event loop; as `close`."""
        await asyncio.to_thread(self.close)

    @property
    def _synthesizer(self) -> Synthesizer:
        return self._service.synthesizer

    def _checked(self, text: str | Turns, options: SpeechOptions) -> CheckedRequest:
        """Return the request for a text, or for turns with the voices of their own."""
        if isinstance(text, str):
            return CheckedRequest.read(text, options)
        styles = [turn[2] if len(turn) == 3 else "" for turn in text]
        own = {n for n, style in enumerate(styles) if style or text[n][0]}
        turns = [
            DialogueTurn(voice_of_turn(index) if index in own else "", turn[1])
            for index, turn in enumerate(text)
        ]
        checked = CheckedRequest.read(turns, options)
        cast = {
            voice_of_turn(index): self._voice_of(checked, index, turn[0], styles[index])
            for index, turn in enumerate(text)
            if index in own
        }
        return replace(checked, request=replace(checked.request, cast=cast))

    def _voice_of(
        self, checked: CheckedRequest, index: int, voice: str | LoadedVoice, instructions: str
    ) -> Voice:
        """Return the voice of a turn, by its name or as `clone` returned it, with its style."""
        path = f"input.dialogue.turns[{index}]"
        if not voice:
            found = self._chosen(checked)
        elif isinstance(voice, str):
            found = self._synthesizer.voices.choose(voice)
        elif voice._service is not self._service:
            text = "is a voice of another model; clone it on this one"
            raise InvalidRequestError.of(f"{path}.voice", text)
        else:
            found = voice._voice or self._synthesizer.voices.default
        self._synthesizer.check_instructions(instructions, f"{path}.instructions")
        return replace(found, instructions=instructions) if instructions else found

    def _chosen(self, checked: CheckedRequest) -> Voice:
        """Return the voice of a request."""
        if self._voice is not None and not checked.voice:
            return replace(self._voice, language=checked.language or self._voice.language)
        return self._synthesizer.voices.choose(checked.voice, checked.language)

    def _with_voice(self, checked: CheckedRequest) -> SpeechRequest:
        self._synthesizer.check_instructions(checked.instructions, "instructions")
        voice = replace(self._chosen(checked), instructions=checked.instructions)
        return replace(checked.request, voice=voice)

    async def _say(self, checked: CheckedRequest) -> Speech:
        found = await self._synthesizer.synthesize(self._with_voice(checked))
        return Speech(
            samples=np.frombuffer(found.audio, dtype="<f4").copy(),
            sample_rate=found.started.audio_format.sample_rate,
            seed=found.started.seed,
            finish_reason=found.result.finish_reason,
            warnings=found.result.warnings,
            words=found.words,
            segments=found.segments,
            marks=found.marks,
            pronunciations=found.result.pronunciations,
            num_retried_segments=found.result.num_retried_segments,
        )

    def _stream(self, checked: CheckedRequest) -> Iterator[SpeechPart]:
        parts = RemoteIterator(self._service.loop, self._parts(checked))
        try:
            while (part := wait(parts.next())) is not None:
                yield part
        finally:
            parts.discard()

    async def _astream(self, checked: CheckedRequest) -> AsyncIterator[SpeechPart]:
        parts = RemoteIterator(self._service.loop, self._parts(checked))
        try:
            while (part := await asyncio.wrap_future(parts.next())) is not None:
                yield part
        finally:
            await asyncio.wrap_future(parts.close())

    async def _parts(self, checked: CheckedRequest) -> AsyncGenerator[SpeechPart, None]:
        """Runs on the loop's thread."""
        rate, offset = self.sample_rate, 0
        async with aclosing(self._synthesizer.stream(self._with_voice(checked))) as events:
            async for event in events:
                match event:
                    case Started():
                        rate = event.audio_format.sample_rate
                    case AudioChunk():
                        samples = np.frombuffer(event.data, dtype="<f4").copy()
                        span = event.text_start, event.text_end
                        offset = event.sample_offset + len(samples)
                        yield SpeechPart(samples, rate, event.sample_offset, *span)
                    case WordTimes(words):
                        span = words[0].text_start, words[-1].text_end
                        yield SpeechPart(NO_SAMPLES, rate, offset, *span, words=words)
                    case SegmentTime():
                        span = event.text_start, event.text_end
                        yield SpeechPart(NO_SAMPLES, rate, offset, *span, segments=(event,))
                    case MarkTime():
                        span = event.text_start, event.text_end
                        yield SpeechPart(NO_SAMPLES, rate, offset, *span, marks=(event,))
                    case Done(result) if result.warnings or result.pronunciations:
                        span = len(checked.request.text), len(checked.request.text)
                        end = SpeechPart(NO_SAMPLES, rate, offset, *span)
                        said = result.pronunciations
                        yield replace(end, warnings=result.warnings, pronunciations=said)

    async def _clone(self, clip: str | Path | bytes, transcript: str) -> LoadedVoice:
        data = clip if isinstance(clip, bytes) else await asyncio.to_thread(Path(clip).read_bytes)
        prompt = await self._synthesizer.cloner.from_clip(data, None, transcript)
        return LoadedVoice(self._service, Voice("prompt", prompt=prompt))
