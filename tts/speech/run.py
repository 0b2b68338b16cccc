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
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

from decoder import AudioEncoding, AudioFormat, CodecSpec, StreamingOptions
from llm import FinishReason, Request, SamplingParams
from tts.engine.client import AudioBlock, EngineClient, SpeechJob
from tts.errors import SynthesisError
from tts.families.base import FamilyTraits
from tts.families.prompt import PromptBuilder
from tts.speech.aligner import Aligner
from tts.speech.cloning import CloningLimits
from tts.speech.output import AudioOutput
from tts.speech.types import (
    AudioChunk,
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
)
from tts.speech.word_times import WordSpan, WordTimer
from tts.text.segmenter import TextSegment
from tts.voices.types import Voice, VoicePrompt

LONGEST_START_S = 2.0  # maximum length of a segment: this, and
LONGEST_S_PER_CHARACTER = 0.25  # this for each character of its text
SHORTEST_S_PER_CHARACTER = 0.02  # faster than any speaker: an earlier end has skipped text

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


@dataclass(frozen=True, slots=True)
class SpeechPlan:
    """Request with all defaults resolved."""

    request: SpeechRequest
    settings: SynthesisSettings
    request_id: str
    voice: Voice
    audio_format: AudioFormat
    streaming: StreamingOptions
    sampling: SamplingParams  # lengths and seed are set per segment
    seed: int
    max_audio_s: float  # of the whole request's output
    aligner: Aligner | None = None  # None: no word times
    warnings: tuple[str, ...] = ()


def segment_seed(seed: int, index: int) -> int:
    """Return the seed of one segment; the segments of a request need different random numbers."""
    key = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class _Budget:
    """Maximum number of codes of one segment, and whether the request's limit determines it."""

    min_codes: int
    max_codes: int
    is_last: bool


class SynthesisRun:
    """Synthesis of segments in order, one at a time; a cancelled segment leaves the run usable."""

    def __init__(
        self, client: EngineClient, prompts: PromptBuilder, spec: CodecSpec, plan: SpeechPlan
    ) -> None:
        self._client, self._prompts, self._spec, self._plan = client, prompts, spec, plan
        assert prompts.vocabulary is not None
        self._vocabulary = prompts.vocabulary
        self._output = AudioOutput(
            spec.sample_rate,
            plan.audio_format,
            speaking_rate=plan.request.speaking_rate,
            gain_db=plan.request.gain_db,
            trim_silence=plan.request.trim_silence,
            steady_loudness=plan.settings.traits.steady_loudness,
        )
        self._voice = plan.voice
        self._segment_codes: list[int] = []
        self._carry = plan.request.carry
        self._is_fresh = True  # the next segment starts with the first chunk sizes
        self._num_codes = 0
        self._num_chunks = self._num_samples = 0  # sent
        self.num_segments = 0
        self._unsent_codes = 0  # codes of blocks without output bytes so far
        self._segment = TextSegment(0, "", 0, 0)
        self._spoken: list[str] = []  # texts of the segments
        self._prompt_tokens = self._cached_prompt_tokens = self._output_tokens = 0
        self._queue_s: float | None = None
        self._prefill_s: float | None = None
        self._started_s = time.monotonic()
        self._first_audio_s: float | None = None
        self._warnings = dict.fromkeys(plan.warnings)  # an ordered set
        self.started = Started(plan.request_id, plan.settings.model, plan.audio_format, plan.seed)
        self.finish_reason = FinishReason.STOP
        self.is_exhausted = False
        """Whether the request's limits allow no more audio."""

    @property
    def num_samples(self) -> int:
        """Number of samples sent so far, at the output rate."""
        return self._output.num_samples

    def warn(self, message: str) -> None:
        """Add a warning to the result."""
        self._warnings[message] = None

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

    async def speak(self, segment: TextSegment) -> AsyncGenerator[SpokenEvent, None]:
        """Yield one segment's audio, with its word times or its own time if requested.

        Raises SynthesisError when the engine fails.
        """
        budget = self._budget(segment)
        self.num_segments += 1
        self._segment = segment
        if budget.max_codes < 1:
            self._hit_cap(budget)
            return
        self._spoken.append(segment.text)
        job = self._job(segment, budget)
        self._is_fresh, self._segment_codes = False, []
        self._output.begin_segment()
        timer = None
        if self._plan.aligner is not None:
            codes_per_second = self._spec.codes_per_second
            timer = WordTimer(self._plan.aligner, segment.words, 1 / codes_per_second)
        last = None
        try:
            async with aclosing(self._client.speak(job)) as blocks:
                async for last in blocks:
                    self._note(last)
                    for data in self._output.write(last.samples):
                        yield self._chunk(data)
                        await asyncio.sleep(0)  # let other streams run
                    if timer is not None and (spans := timer.push(last.codes)):
                        yield self._word_times(spans)
        finally:
            self._count(last)
        if timer is not None:
            is_whole = last is not None and last.finish_reason is FinishReason.STOP
            if spans := timer.finish(is_whole=is_whole):
                yield self._word_times(spans)
        if self._plan.request.timestamps is TimestampGranularity.SEGMENT:
            yield self._segment_time()
        self._end_segment(last, budget)

    def _word_times(self, spans: Sequence[WordSpan]) -> WordTimes:
        """Return the times of a segment's words in the output."""
        heard_s = self._output.heard_s
        return WordTimes(
            tuple(
                WordTime(
                    span.word.text,
                    heard_s(span.start_s),
                    heard_s(span.end_s),
                    span.word.start,
                    span.word.end,
                )
                for span in spans
            )
        )

    def _segment_time(self) -> SegmentTime:
        output, segment = self._output, self._segment
        start_s = output.heard_s(0.0)
        spoken_s = len(self._segment_codes) / self._spec.codes_per_second
        end_s = max(start_s, output.heard_s(spoken_s - output.silent_s))
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
        audio_s = self.num_samples / self._plan.audio_format.sample_rate
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
        )

    def _budget(self, segment: TextSegment) -> _Budget:
        plan, rate, length = self._plan, self._spec.codes_per_second, len(segment.text)
        sampling, traits = plan.request.sampling, plan.settings.traits
        own = min(
            traits.max_codes,
            math.ceil(rate * (LONGEST_START_S + LONGEST_S_PER_CHARACTER * length)),
        )
        own = self._vocabulary.whole_frames(own)
        left = own
        if sampling.max_tokens is not None:
            left = min(left, sampling.max_tokens - self._num_codes)
        if plan.max_audio_s < math.inf:
            total = math.floor(plan.max_audio_s * plan.request.speaking_rate * rate)
            left = min(left, total - self._num_codes)
        left = self._vocabulary.whole_frames(left)
        shortest = math.floor(rate * SHORTEST_S_PER_CHARACTER * length)
        wanted = max(shortest, (sampling.min_tokens or 0) - self._num_codes, traits.min_codes)
        return _Budget(min(wanted, max(left, 1)), left, is_last=left < own)

    def _job(self, segment: TextSegment, budget: _Budget) -> SpeechJob:
        plan, vocabulary = self._plan, self._vocabulary
        request, max_seq_len = plan.request, plan.settings.max_seq_len
        prompt_ids = self._prompts.speech_prompt(segment.text, self._voice)
        max_codes = budget.max_codes
        if max_seq_len is not None:
            room = vocabulary.whole_frames(max_seq_len - len(prompt_ids))
            max_codes = max(vocabulary.codes_per_frame, min(max_codes, room))
        sampling = replace(
            vocabulary.constrain(plan.sampling),
            seed=segment_seed(plan.seed, self.num_segments - 1),
            max_tokens=max_codes,
            min_tokens=min(budget.min_codes, max_codes),
        )
        streaming = plan.streaming
        if not self._is_fresh and streaming.chunk_sizes is not None:
            streaming = replace(streaming, chunk_sizes=streaming.chunk_sizes[-1:])
        # A client's request id is not unique among running requests.
        request_id = f"{plan.request_id}#{next(_job_numbers)}"
        return SpeechJob(
            request=Request(
                request_id, prompt_ids, sampling, priority=request.priority, lora=request.lora
            ),
            streaming=streaming,
            prompt_codes=self._voice.prompt.codes if self._voice.prompt else (),
            carry=self._carry,
            token_offset=request.token_offset + self._num_codes,
            as_s16=self._output.takes_s16,
        )

    def _note(self, block: AudioBlock) -> None:
        if block.finish_reason is FinishReason.ERROR:
            raise SynthesisError(f"request {self._plan.request_id}: {block.error}")
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
            next_token_offset=self._plan.request.token_offset + self._num_codes,
        )

    def _count(self, block: AudioBlock | None) -> None:
        """Add a segment's usage, from its last block."""
        if block is None:
            return
        self._prompt_tokens += block.prompt_tokens
        self._cached_prompt_tokens += block.cached_prompt_tokens
        self._output_tokens += block.output_tokens

    def _end_segment(self, block: AudioBlock | None, budget: _Budget) -> None:
        if block is None:
            raise SynthesisError(f"request {self._plan.request_id}: the engine sent nothing")
        if block.finish_reason is FinishReason.STOP:
            self._keep_voice()
        elif block.finish_reason is FinishReason.LENGTH:
            self._hit_cap(budget)
        else:
            self.finish_reason, self.is_exhausted = FinishReason.CANCELLED, True

    def _keep_voice(self) -> None:
        """Use the model's random speaker as the voice prompt of later segments, if it fits."""
        settings, traits = self._plan.settings, self._plan.settings.traits
        prompt = VoicePrompt(tuple(self._segment_codes), self._segment.text)
        if not traits.invents_voices or self._voice.prompt is not None:
            return
        voice = replace(self._voice, prompt=prompt)
        length = len(self._prompts.speech_prompt(self._segment.text, voice))
        most = settings.max_seq_len
        if most is None or length + traits.max_codes <= most:
            self._voice = voice

    def _hit_cap(self, budget: _Budget) -> None:
        self.finish_reason = FinishReason.LENGTH
        self.is_exhausted = budget.is_last
        self.warn(f"segment {self._segment.index} hit the audio cap")
