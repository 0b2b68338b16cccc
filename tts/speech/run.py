"""Synthesis of one request: a language-model call per segment, one continuous code stream.

segment 0 ── job: chunk sizes from the first ──┐ carry, token offset
segment 1 ── job: the last chunk size ─────────┤
…                                              └─▶ AudioOutput ─▶ AudioChunk…
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import secrets
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import numpy as np

from decoder import (
    AudioEncoding,
    AudioFormat,
    AudioFormatError,
    CodecSpec,
    DecoderConfigError,
    StreamingOptions,
    Watermark,
    check_output_format,
    nearest_rate,
    supported_encodings,
    validate_streaming,
)
from llm import FinishReason, Request, SamplingParams, Token
from tts.engine.client import AudioBlock, EngineClient, Speak, SpeechJob
from tts.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    NotAvailableError,
    SynthesisError,
)
from tts.families.base import FamilyTraits, with_texts
from tts.families.prompt import PromptBuilder
from tts.speech.aligner import Aligner
from tts.speech.check import SOUND, CheckResult, Verdict, check_segment
from tts.speech.cloning import CloningLimits
from tts.speech.emphasis import EmphasisedWords, Timeline
from tts.speech.output import AudioOutput, Loudness
from tts.speech.pauses import without_last_pause
from tts.speech.script import Pause, Step, Turn, without_pitch
from tts.speech.types import (
    AudioChunk,
    MarkTime,
    SegmentTime,
    SpeechRequest,
    SpeechTimings,
    SpeechUsage,
    SpokenEvent,
    Started,
    SynthesisResult,
    TimestampGranularity,
    WordTime,
    WordTimes,
    overridden,
)
from tts.speech.word_times import WordSpan, WordTimer
from tts.text.lexicon.entries import Pronunciation
from tts.text.markup.document import Mark
from tts.text.segmenter import TextSegment
from tts.voices.types import Voice, VoicePrompt

LONGEST_START_S = 2.0  # maximum length of a segment: this, and
LONGEST_S_PER_CHARACTER = 0.25  # this for each character of its text
SHORTEST_S_PER_CHARACTER = 0.02  # faster than any speaker: an earlier end has skipped text
MAX_PRONUNCIATIONS = 200  # that a result reports
MAX_ATTEMPTS = 3  # of a segment that is checked

_job_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class SynthesisSettings:
    """Settings of the server for all requests.

    `traits` are the speech family's limits of one language-model call; `max_seq_len` is the
    model's context in tokens; `max_audio_s` bounds the audio of one RPC; `raw_encoding` is the
    encoding of requests without one.
    """

    model: str = ""
    streaming: StreamingOptions = field(default_factory=StreamingOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    traits: FamilyTraits = field(default_factory=FamilyTraits)
    max_seq_len: int | None = None
    max_audio_s: float = 600.0
    raw_encoding: AudioEncoding = AudioEncoding.PCM_S16LE
    cloning: CloningLimits = field(default_factory=CloningLimits)
    adapters: tuple[str, ...] = ()  # names for requests
    aligner: Path | None = None  # folder of the word aligner
    watermark: Watermark | None = None  # of all audio


def segment_seed(seed: int, index: int) -> int:
    """Return the seed of one segment; the segments of a request need different random numbers."""
    key = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


class SynthesisRun:
    """Synthesis of segments in order, one at a time; a cancelled segment leaves the run usable."""

    def __init__(
        self,
        client: EngineClient,
        prompts: PromptBuilder,
        settings: SynthesisSettings,
        request: SpeechRequest,
        aligner: Callable[[], Aligner] | None = None,
        speak: Speak | None = None,
    ) -> None:
        """Resolve the defaults of a request, which has its voice; `aligner` None: there is none.

        `speak` takes the jobs; None: the client's own.
        Raises InvalidRequestError, NotAvailableError and AdapterNotFoundError.
        """
        assert client.codec is not None
        assert prompts.family is not None
        assert prompts.vocabulary is not None
        assert request.voice is not None
        if request.pitch or request.lora:
            _check_abilities(request, settings, client.codec)
        self._family, self._settings, self._send = prompts.family, settings, speak or client.speak
        self._request, self._voice, self._aligner = request, request.voice, aligner
        self._turn: SpeechRequest | Turn = request  # until the first turn of a document
        self._turn_codes, self._spent_s = 0, 0.0  # codes and seconds before this turn, or break
        self._kept: dict[str, Voice] = {}  # by name: voices with the model's random speaker
        self._opening: VoicePrompt | None = None  # of that speaker, from a sentence's beginning
        self._spec, self._vocabulary = client.codec, prompts.vocabulary
        request_id, seed = request.request_id or uuid4().hex, request.sampling.seed
        self._seed = secrets.randbits(64) if seed is None else seed
        self._sampling = overridden(settings.sampling, request.sampling.given())
        self._max_audio_s = min(request.max_audio_s or math.inf, settings.max_audio_s)
        self._streaming, self._warnings = settings.streaming, dict[str, None]()  # an ordered set
        if request.chunking is not None:
            self._streaming = request.chunking.over(settings.streaming)
            self.warn(*_chunking_warnings(self._streaming, request, self._spec))
        self._audio_format = _audio_format(request, settings, self._spec)
        self._output = _output(request, settings, self._spec, self._audio_format)
        has_marks = request.markup is not None and request.markup.has_marks
        self._needs_times = has_marks or request.timestamps is TimestampGranularity.WORD
        self._marks, self._checks = MarkQueue(), list[tuple[CheckResult, ...]]()
        self._segment_codes: list[int] = []
        self._said: tuple[int, ...] = ()  # codes of the sentence before this segment
        self._timeline: Timeline | None = None  # of the segment, if parts of it are stretched
        self._carry, self._is_fresh = request.carry, True  # fresh: the first chunk sizes follow
        self._num_chunks = self._num_samples = 0  # sent
        self.num_segments = self._num_codes = 0
        self._unsent_codes = 0  # of blocks without output bytes so far
        self._segment = TextSegment(0, "", 0, 0)
        self._spoken: list[str] = []  # texts of the segments
        self._pronunciations: dict[Pronunciation, None] = {}  # an ordered set: those applied
        self._prompt_tokens = self._cached_prompt_tokens = self._output_tokens = 0
        self._queue_s: float | None = None
        self._prefill_s: float | None = None
        self._started_s = time.monotonic()
        self._first_audio_s: float | None = None
        self.started = Started(request_id, settings.model, self._audio_format, self._seed)
        """First event of the request."""
        self.finish_reason = FinishReason.STOP
        self.is_exhausted = False
        """Whether the request's limits allow no more audio."""

    @property
    def num_samples(self) -> int:
        """Number of samples sent so far, at the output rate."""
        return self._output.num_samples

    def warn(self, *messages: str) -> None:
        """Add warnings to the result."""
        self._warnings |= dict.fromkeys(messages)

    def warn_of_lost(self, num_letters: int) -> None:
        """Add a warning if letters were removed from the text."""
        if num_letters:
            self.warn(f"{num_letters} letter(s) that this voice cannot read were left out")

    def restart(self) -> None:
        """Begin the next segment with the first chunk sizes, for low latency."""
        self._is_fresh = True

    def drop(self) -> None:
        """Discard buffered audio; the next utterance starts without history."""
        self._output.drop()
        self._carry, self._unsent_codes = None, 0
        self.restart()

    async def perform(self, step: Step) -> AsyncGenerator[SpokenEvent | MarkTime, None]:
        """Yield the events of a segment of a document, or of what comes between two segments."""
        match step:
            case TextSegment():
                events = self._speak_marked(step)
            case Turn():
                events = self._begin(step)
            case Pause():
                events = self._pause(step)
            case Mark():
                self._marks.append(step)
                return
        async with aclosing(events):
            async for event in events:
                yield event

    async def _speak_marked(
        self, segment: TextSegment
    ) -> AsyncGenerator[SpokenEvent | MarkTime, None]:
        """Yield a segment's events, and the marks in front of it and of its words."""
        if segment.words:
            for mark in self._marks.reached(self._output.end_s, segment.words[0].start):
                yield mark
        async with aclosing(self.speak(segment)) as events:
            async for event in events:
                if isinstance(event, WordTimes):
                    for word in event.words:
                        for mark in self._marks.reached(word.start_s, word.text_start):
                            yield mark
                    if self._request.timestamps is not TimestampGranularity.WORD:
                        continue
                yield event
        for mark in self.last_marks():
            yield mark

    def last_marks(self) -> Iterator[MarkTime]:
        """Yield the marks in front of the next audio; none if there is no more audio to come."""
        if not self.is_exhausted:
            yield from self._marks.reached(self._output.end_s)

    async def _begin(self, turn: Turn) -> AsyncGenerator[SpokenEvent, None]:
        """Begin a turn: a voice without history, or the same voice in another way."""
        before, self._turn = self._turn, turn
        self._spend(before, 0.0)
        if turn.voice != before.voice:
            self._voice = self._kept.get(turn.voice.name, turn.voice)
            self._carry = None
        if (turn.speaking_rate, turn.gain_db) != (before.speaking_rate, before.gain_db):
            for data in self._output.change(turn.speaking_rate, turn.gain_db):
                yield self._chunk(data)

    async def _pause(self, pause: Pause) -> AsyncGenerator[SpokenEvent | MarkTime, None]:
        """Yield silence, as far as the request's longest audio allows."""
        async for chunk in self.flush():
            yield chunk
        for mark in self.last_marks():
            yield mark
        self._spend(self._turn, 0.0)
        left_s = max(0.0, self._max_audio_s - self._spent_s)
        self._spend(self._turn, min(pause.seconds, left_s))
        self._segment = replace(self._segment, start=pause.start, end=pause.end)
        for data in self._output.pause(min(pause.seconds, left_s)):
            yield self._chunk(data)
            await asyncio.sleep(0)  # let other streams run
        if left_s < pause.seconds:
            self.finish_reason, self.is_exhausted = FinishReason.LENGTH, True
            self.warn("a break hit the audio cap")

    def _spend(self, turn: SpeechRequest | Turn, seconds: float) -> None:
        """Count the audio of the codes since the last call, and of a break."""
        num_codes, self._turn_codes = self._num_codes - self._turn_codes, self._num_codes
        spoken_s = num_codes / self._spec.codes_per_second / turn.speaking_rate
        self._spent_s += spoken_s + seconds

    async def speak(self, segment: TextSegment) -> AsyncGenerator[SpokenEvent, None]:
        """Yield one segment's audio, with its word times or its own time if requested.

        A segment that is checked, or has emphasised words, is held back until it is whole; one that
        fails the check is spoken again with another seed. Raises SynthesisError when the engine
        fails.
        """
        longest = self._longest(segment)
        max_codes = self._vocabulary.whole_frames(min(longest, self._codes_left()))
        is_last = max_codes < longest
        self.num_segments += 1
        self._segment = segment
        if max_codes < 1:
            self._hit_cap(is_last=is_last)
            return
        self._spoken.append(segment.text)
        self._pronunciations |= dict.fromkeys(segment.pronunciations)
        self._said = tuple(self._segment_codes) if segment.sentence else ()
        self._segment_codes = []
        self._output.begin_segment()
        timer = self._timer(segment) if self._needs_times else None
        last = None
        try:
            async with aclosing(self._source(segment, max_codes, is_last=is_last)) as blocks:
                async for last in blocks:
                    self._note(last)
                    for data in self._output.write(last.samples):
                        yield self._chunk(data)
                        await asyncio.sleep(0)  # let other streams run
                    if timer is not None and (spans := self._heard(timer.push(last.codes))):
                        yield self._word_times(spans)
        finally:
            self._count(last)
        if timer is not None:
            is_whole = last is not None and last.finish_reason is FinishReason.STOP
            if spans := self._heard(timer.finish(is_whole=is_whole)):
                yield self._word_times(spans)
        if self._request.timestamps is TimestampGranularity.SEGMENT:
            yield self._segment_time()
        self._end_segment(last, is_last=is_last)

    def _source(
        self, segment: TextSegment, max_codes: int, *, is_last: bool
    ) -> AsyncGenerator[AudioBlock, None]:
        """Return a segment's blocks; `is_last`: the request's limits may cut it."""
        job = self._job(segment, max_codes)
        self._is_fresh, self._timeline = False, None
        emphasis = None
        if self._request.markup is not None and self._aligner is not None:
            emphasis = EmphasisedWords.of(segment, self._request.markup)
        if emphasis:
            job = replace(job, as_s16=False)  # to be stretched
        checks = self._request.check
        blocks = self._checked(segment, job, is_last=is_last) if checks else self._send(job)
        if segment.is_open:
            blocks = without_last_pause(blocks)
        return self._emphasised(segment, blocks, emphasis) if emphasis else blocks

    def _timer(self, segment: TextSegment) -> WordTimer | None:
        """Return a timer of a segment's words, if the model has one."""
        if self._aligner is None:
            return None
        return WordTimer(self._aligner(), segment.words, 1 / self._spec.codes_per_second)

    async def _emphasised(
        self,
        segment: TextSegment,
        blocks: AsyncGenerator[AudioBlock, None],
        emphasis: EmphasisedWords,
    ) -> AsyncGenerator[AudioBlock, None]:
        """Yield a segment's blocks with its words emphasised, when all of them have come.

        Their samples end where the longest audio ends.
        """
        async with aclosing(blocks):
            held = [block async for block in blocks]
        if not held:
            return
        rate = self._spec.sample_rate
        samples, timeline = await asyncio.to_thread(self._stretched, segment, held, emphasis)
        num_codes = self._num_codes - self._turn_codes + sum(block.num_codes for block in held)
        left_s = (self._max_audio_s - self._spent_s) * self._turn.speaking_rate
        left_s -= num_codes / self._spec.codes_per_second
        if timeline.added_s > left_s:
            timeline.cut(timeline.end_s - timeline.added_s + left_s)
            self._hit_cap(is_last=True)
        self._timeline = timeline
        self._spent_s += timeline.added_s / self._turn.speaking_rate
        before = place = 0
        for block in held:
            before += len(block.samples)
            end = round(timeline(before / rate) * rate)
            yield block._replace(samples=samples[place:end])
            place = end

    def _stretched(
        self, segment: TextSegment, blocks: Sequence[AudioBlock], emphasis: EmphasisedWords
    ) -> tuple[np.ndarray, Timeline]:
        """Return a segment's samples with its words emphasised; callable from any thread."""
        timer = self._timer(segment)
        assert timer is not None
        spans = [span for block in blocks for span in timer.push(block.codes)]
        spans += timer.finish(is_whole=blocks[-1].finish_reason is FinishReason.STOP)
        samples = np.concatenate([block.samples for block in blocks])
        return emphasis.applied(samples, spans, self._spec.sample_rate)

    async def _checked(
        self, segment: TextSegment, job: SpeechJob, *, is_last: bool
    ) -> AsyncGenerator[AudioBlock, None]:
        """Yield the blocks of the first sound attempt, else of that with the fewest faults;
        `is_last`: the request's limits may cut the segment.
        """
        attempts: list[tuple[Verdict, list[AudioBlock]]] = []
        for attempt in _attempts(job):
            async with aclosing(self._send(attempt)) as spoken:
                blocks = [block async for block in spoken]
            verdict = await asyncio.to_thread(self._verdict, segment, blocks, is_last)
            attempts.append((verdict, blocks))
            if verdict.result is CheckResult.SOUND:
                break
        verdict, best = min(attempts, key=lambda attempt: attempt[0].num_words)
        for _, blocks in attempts:
            if blocks is not best:
                self._count(blocks[-1])
        if verdict.result is not CheckResult.SOUND:
            self.warn(f"segment {segment.index} differs from its text: {verdict.result.value}")
        self._checks.append(tuple(verdict.result for verdict, _ in attempts))
        for block in best:
            yield block

    def _verdict(
        self, segment: TextSegment, blocks: Sequence[AudioBlock], is_last: bool
    ) -> Verdict:
        """Return the verdict on an attempt; callable from any thread.

        What failed, or was cut by the request's limits, is not judged.
        """
        reason = blocks[-1].finish_reason if blocks else None
        is_cut = reason is FinishReason.LENGTH
        if (is_cut and is_last) or not (is_cut or reason is FinishReason.STOP):
            return SOUND
        codes = tuple(code for block in blocks for code in block.codes)
        seconds = len(codes) / self._spec.codes_per_second
        letters = self._aligner().letters(codes) if self._aligner is not None and codes else None
        return check_segment(segment, seconds, is_cut=is_cut, letters=letters)

    def _heard(self, spans: Sequence[WordSpan]) -> Sequence[WordSpan]:
        """Return the words that begin before stretched audio is cut."""
        timeline = self._timeline
        if timeline is None:
            return spans
        return [span for span in spans if timeline(span.start_s) < timeline.end_s]

    def _word_times(self, spans: Sequence[WordSpan]) -> WordTimes:
        """Return the times of a segment's words in the output."""
        time_s = self._output_time_s
        return WordTimes(
            tuple(
                WordTime(
                    span.word.text,
                    time_s(span.start_s),
                    time_s(span.end_s),
                    span.word.start,
                    span.word.end,
                )
                for span in spans
            )
        )

    def _output_time_s(self, spoken_s: float) -> float:
        """Return the time in the output of a time in the segment as it was decoded."""
        played_s = spoken_s if self._timeline is None else self._timeline(spoken_s)
        return self._output.output_time_s(played_s)

    def _segment_time(self) -> SegmentTime:
        output, segment = self._output, self._segment
        start_s = self._output_time_s(0.0)
        spoken_s = len(self._segment_codes) / self._spec.codes_per_second
        end_s = max(
            start_s, self._output_time_s(spoken_s) - output.silent_s / self._turn.speaking_rate
        )
        return SegmentTime(segment.index, start_s, end_s, segment.start, segment.end)

    async def flush(self) -> AsyncGenerator[AudioChunk, None]:
        """Yield buffered audio, so that everything spoken is sent. The stream continues."""
        for data in self._output.flush():
            yield self._chunk(data)

    async def finish(self) -> AsyncGenerator[AudioChunk, None]:
        """Yield the rest of the audio and the container's end."""
        for data in self._output.finish():
            yield self._chunk(data)

    def result(self, num_characters: int) -> SynthesisResult:
        """Return the result of the request; call it after `finish`."""
        audio_s = self.num_samples / self._audio_format.sample_rate
        return SynthesisResult(
            finish_reason=self.finish_reason,
            usage=SpeechUsage(
                input_characters=num_characters,
                prompt_tokens=self._prompt_tokens,
                cached_prompt_tokens=self._cached_prompt_tokens,
                output_tokens=self._output_tokens,
                audio_s=audio_s,
            ),
            timings=SpeechTimings(
                queue_s=self._queue_s,
                prefill_s=self._prefill_s,
                first_audio_s=self._first_audio_s,
                total_s=time.monotonic() - self._started_s,
            ),
            warnings=tuple(self._warnings),
            header_patches=self._output.header_patches,
            spoken_text=" ".join(self._spoken),
            pronunciations=tuple(itertools.islice(self._pronunciations, MAX_PRONUNCIATIONS)),
            checks=tuple(self._checks),
            num_retried_segments=sum(len(results) > 1 for results in self._checks),
        )

    def _longest(self, segment: TextSegment) -> int:
        """Return the maximum number of codes of a segment of such a length."""
        longest_s = LONGEST_START_S + LONGEST_S_PER_CHARACTER * len(segment.text)
        num_codes = math.ceil(self._spec.codes_per_second * longest_s)
        return self._vocabulary.whole_frames(min(self._settings.traits.max_codes, num_codes))

    def _shortest(self, segment: TextSegment) -> int:
        """Return the minimum number of codes of a segment, by its text and by the request."""
        wanted = (self._request.sampling.min_tokens or 0) - self._num_codes
        shortest_s = SHORTEST_S_PER_CHARACTER * len(segment.text)
        spoken = math.floor(self._spec.codes_per_second * shortest_s)
        return max(spoken, wanted, self._settings.traits.min_codes - len(self._said))

    def _codes_left(self) -> int:
        """Return how many codes the request's limits still allow."""
        left = sys.maxsize
        if self._request.sampling.max_tokens is not None:
            left = self._request.sampling.max_tokens - self._num_codes
        if self._max_audio_s < math.inf:
            spoken_s = (self._max_audio_s - self._spent_s) * self._turn.speaking_rate
            fitting = math.floor(spoken_s * self._spec.codes_per_second)
            left = min(left, fitting - (self._num_codes - self._turn_codes))
        return left

    def _job(self, segment: TextSegment, max_codes: int) -> SpeechJob:
        request, vocabulary = self._request, self._vocabulary
        prompt_ids, texts = self._prompt(segment, max_codes)
        per_token = vocabulary.codes_per_token
        if self._settings.max_seq_len is not None:
            room = self._settings.max_seq_len - len(prompt_ids) - vocabulary.last_delay
            room *= per_token
            room = vocabulary.whole_frames(room)
            max_codes = max(vocabulary.codes_per_frame, min(max_codes, room))
        sampling = vocabulary.constrain(
            self._sampling,
            seed=segment_seed(self._seed, self.num_segments - 1),
            max_tokens=max_codes // per_token + vocabulary.last_delay,
            min_tokens=-(-min(self._shortest(segment), max_codes) // per_token)
            + vocabulary.first_delay,
            frame_texts=texts,
        )
        streaming = self._streaming
        if (sizes := streaming.chunk_sizes) is not None:
            if segment.is_open:
                streaming = replace(streaming, chunk_sizes=sizes[:1])  # to drop most of its pause
            elif not self._is_fresh:
                streaming = replace(streaming, chunk_sizes=sizes[-1:])
        # A client's request id is not unique among running requests.
        request_id = f"{self.started.request_id}#{next(_job_numbers)}"
        return SpeechJob(
            request=Request(
                request_id, prompt_ids, sampling, priority=request.priority, lora=request.lora
            ),
            streaming=streaming,
            prompt_codes=self._voice.prompt.codes if self._voice.prompt else (),
            carry=self._carry,
            token_offset=request.token_offset + self._num_codes,
            as_s16=self._output.takes_s16,
            pitch=self._turn.pitch,
        )

    def _prompt(
        self, segment: TextSegment, max_codes: int
    ) -> tuple[tuple[Token, ...], tuple[int, ...]]:
        """Return the prompt of a segment, and the text ids of the frames behind it.

        To continue a sentence, the model gets its text and what it has said of it, if there is room
        for both. All families' prompts end where their codes begin. A rest that is spoken by itself
        has the beginning's speaker.
        """
        opening, self._opening = self._opening, None
        can_continue = self._vocabulary.can_continue and self._settings.traits.takes_codes
        if segment.sentence and can_continue:
            prompt_ids = self._family.prompt(self._vocabulary, segment.sentence, self._voice)
            texts = self._family.frame_texts(segment.sentence, self._voice)
            said = with_texts(self._vocabulary.token_ids(self._said), texts)
            prompt_ids += said
            most = self._settings.max_seq_len
            num_tokens = len(prompt_ids) + max_codes // self._vocabulary.codes_per_token
            if most is None or num_tokens <= most:
                return prompt_ids, texts[len(said) :]
        if opening is not None:
            self._keep_voice(opening)
        text, voice = segment.text, self._voice
        return self._family.prompt(self._vocabulary, text, voice), self._family.frame_texts(
            text, voice
        )

    def _note(self, block: AudioBlock) -> None:
        if block.finish_reason is FinishReason.ERROR:
            raise SynthesisError(f"request {self.started.request_id}: {block.error}")
        if self._queue_s is None:
            self._queue_s, self._prefill_s = block.queue_s, block.prefill_s
        self._num_codes += block.num_codes
        self._unsent_codes += block.num_codes
        self._segment_codes += block.codes
        self._carry = block.carry

    def _chunk(self, data: bytes) -> AudioChunk:
        if self._first_audio_s is None:
            self._first_audio_s = time.monotonic() - self._started_s
        num_codes, self._unsent_codes = self._unsent_codes, 0
        first_sample, self._num_samples = self._num_samples, self._output.num_samples
        self._num_chunks += 1
        return AudioChunk(
            data=data,
            sequence=self._num_chunks - 1,
            sample_offset=first_sample,
            sample_count=self._num_samples - first_sample,
            segment_index=self._segment.index,
            text_start=self._segment.start,
            text_end=self._segment.end,
            token_offset=self._num_codes - num_codes,
            token_count=num_codes,
            carry=self._carry or (),
            next_token_offset=self._request.token_offset + self._num_codes,
        )

    def _count(self, block: AudioBlock | None) -> None:
        """Add a segment's usage, from its last block."""
        if block is None:
            return
        self._prompt_tokens += block.prompt_tokens
        self._cached_prompt_tokens += block.cached_prompt_tokens
        num_tokens = max(block.output_tokens - self._vocabulary.last_delay, 0)
        self._output_tokens += num_tokens * self._vocabulary.codes_per_token

    def _end_segment(self, block: AudioBlock | None, *, is_last: bool) -> None:
        if block is None:
            raise SynthesisError(f"request {self.started.request_id}: the engine sent nothing")
        if block.finish_reason is FinishReason.STOP:
            self._end_voice()
        elif block.finish_reason is FinishReason.LENGTH:
            self._hit_cap(is_last=is_last)
        else:
            self.finish_reason, self.is_exhausted = FinishReason.CANCELLED, True

    def _end_voice(self) -> None:
        """Keep the model's random speaker, or that of a sentence's beginning until its rest."""
        if not self._settings.traits.invents_voices or self._voice.prompt is not None:
            return
        segment, codes = self._segment, (*self._said, *self._segment_codes)
        prompt = VoicePrompt(codes, segment.sentence or segment.text)
        if segment.is_open:
            self._opening = prompt
        else:
            self._keep_voice(prompt)

    def _keep_voice(self, prompt: VoicePrompt) -> None:
        """Use a prompt for the voice of later segments, if it fits."""
        settings, voice = self._settings, replace(self._voice, prompt=prompt)
        length = len(self._family.prompt(self._vocabulary, prompt.transcript, voice))
        most = settings.max_seq_len
        longest = settings.traits.max_codes // self._vocabulary.codes_per_token
        if most is None or length + longest <= most:
            self._voice = self._kept[voice.name] = voice

    def _hit_cap(self, *, is_last: bool) -> None:
        """Note a segment that was cut; `is_last`: by the request's limits."""
        self.finish_reason = FinishReason.LENGTH
        self.is_exhausted = is_last
        self.warn(f"segment {self._segment.index} hit the audio cap")


class MarkQueue(deque[Mark]):
    """Marks whose time is not known yet, in the order of the text. Their times never decrease."""

    last_s = 0.0

    def reached(self, time_s: float, position: float = math.inf) -> Iterator[MarkTime]:
        """Yield the marks in front of a position of the text, whose audio begins at `time_s`."""
        while self and self[0].start <= position:
            mark, self.last_s = self.popleft(), max(self.last_s, time_s)
            yield MarkTime(mark.kind, mark.name, self.last_s, mark.start, mark.end)


def _attempts(job: SpeechJob) -> Iterator[SpeechJob]:
    """Iterate over a job and its repetitions with other seeds; there are none for argmax."""
    yield job
    request, sampling = job.request, job.request.sampling
    if sampling.temperature <= 0 or sampling.seed is None:
        return
    for attempt in range(1, MAX_ATTEMPTS):
        other = replace(sampling, seed=segment_seed(sampling.seed, attempt))
        request_id = f"{request.request_id}.{attempt}"
        yield replace(job, request=replace(request, request_id=request_id, sampling=other))


def _check_abilities(request: SpeechRequest, settings: SynthesisSettings, spec: CodecSpec) -> None:
    """Raise InvalidRequestError or AdapterNotFoundError for what this model does not have."""
    if request.pitch and not spec.can_shift_pitch:
        raise InvalidRequestError.of(f"{request.path}.pitch", without_pitch(spec))
    if request.lora and request.lora not in settings.adapters:
        raise AdapterNotFoundError(request.lora, settings.adapters)


def _chunking_warnings(
    streaming: StreamingOptions, request: SpeechRequest, spec: CodecSpec
) -> list[str]:
    """Return warnings about a request's chunking; raise InvalidRequestError if it is invalid."""
    try:
        return validate_streaming(streaming, spec)
    except DecoderConfigError as error:
        raise InvalidRequestError.of(f"{request.path}.chunking", str(error)) from error


def _audio_format(
    request: SpeechRequest, settings: SynthesisSettings, spec: CodecSpec
) -> AudioFormat:
    """Return the encoding and sample rate of a request's audio."""
    encoding = request.encoding or settings.raw_encoding
    if encoding not in supported_encodings():
        raise NotAvailableError(f"this server cannot encode {encoding.value}")
    rate = request.sample_rate or nearest_rate(encoding, spec.sample_rate)
    audio_format = AudioFormat(encoding, rate)
    try:
        check_output_format(audio_format)
    except AudioFormatError as error:
        raise InvalidRequestError.of(f"{request.path}.audio_format", str(error)) from error
    return audio_format


def _output(
    request: SpeechRequest,
    settings: SynthesisSettings,
    spec: CodecSpec,
    audio_format: AudioFormat,
) -> AudioOutput:
    """Return the output of a request."""
    loudness = Loudness.STEADY if settings.traits.steady_loudness else Loudness.UNCHANGED
    if request.markup is not None and request.markup.has_voices:
        loudness = Loudness.MATCHED
    return AudioOutput(
        spec.sample_rate,
        audio_format,
        speaking_rate=request.speaking_rate,
        gain_db=request.gain_db,
        trim_silence=request.trim_silence,
        loudness=loudness,
        watermark=settings.watermark,
    )
