"""One request's speech across its segments: a language-model call each, one unbroken code stream.

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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from decoder import AudioFormat, CodecSpec, StreamingOptions
from llm import FinishReason, Request, RequestTimings, SamplingParams
from tts.aligner import Aligner
from tts.audio import AudioOutput, AudioShape, EncodedAudio
from tts.engine_client import AudioBlock, EngineClient, SpeechJob
from tts.errors import SynthesisError
from tts.prompt import PromptBuilder
from tts.speech import (
    AudioChunk,
    SegmentTime,
    SpeechTimings,
    SpeechUsage,
    SpokenEvent,
    SynthesisResult,
    WordTime,
    WordTimes,
)
from tts.text import TextSegment
from tts.voices import Voice, VoicePrompt
from tts.word_times import WordSpan, WordTimer

Item = TypeVar("Item")

LONGEST_START_S = 2.0  # a segment may speak this long, and
LONGEST_S_PER_CHARACTER = 0.25  # this much longer for each character of its text
SHORTEST_S_PER_CHARACTER = 0.02  # faster than anybody reads: ending earlier skips text

_job_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class SpeechPlan:
    """A request with everything decided."""

    request_id: str
    voice: Voice
    audio_format: AudioFormat
    shape: AudioShape
    streaming: StreamingOptions
    sampling: SamplingParams  # how a token is chosen; lengths and seed are set per segment
    seed: int
    min_tokens: int = 0  # of the whole request
    max_tokens: int | None = None  # of the whole request
    max_audio_s: float = math.inf  # of the whole request, as it is sent
    max_segment_codes: int = 500
    min_segment_codes: int = 1
    invents_voices: bool = False  # the speaker of the first segment is the later ones' prompt
    max_seq_len: int | None = None
    priority: int = 0
    lora: str = ""
    carry: tuple[int, ...] | None = None
    token_offset: int = 0
    times_segments: bool = False
    aligner: Aligner | None = None  # None: words are not timed


@asynccontextmanager
async def closing(stream: AsyncIterator[Item]) -> AsyncIterator[AsyncIterator[Item]]:
    """Close an asynchronous iterator at the end, also when it is left early."""
    try:
        yield stream
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()


def segment_seed(seed: int, index: int) -> int:
    """The seed of one segment: segments of one request must not repeat each other's draws."""
    key = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class _Budget:
    """How many codes one segment may have, and whether the request's own end sets that bound."""

    min_codes: int
    max_codes: int
    is_last: bool


class SpeechStream:
    """Speaks segments in order. One at a time; a segment left early leaves the stream usable."""

    def __init__(
        self, client: EngineClient, prompts: PromptBuilder, spec: CodecSpec, plan: SpeechPlan
    ) -> None:
        self._client, self._prompts, self._spec, self._plan = client, prompts, spec, plan
        assert prompts.vocabulary is not None
        self._vocabulary = prompts.vocabulary
        self._output = AudioOutput(spec.sample_rate, plan.audio_format, plan.shape)
        self._voice = plan.voice
        self._segment_codes: list[int] = []
        self._carry = plan.carry
        self._is_fresh = True  # the next segment starts with the first, small chunk sizes
        self._num_codes = 0
        self._num_chunks = 0
        self.num_segments = 0
        self._unsent_codes = 0  # of blocks that have not led to bytes yet
        self._segment = TextSegment(0, "", 0, 0)
        self._usage = SpeechUsage()
        self._timings: RequestTimings | None = None
        self._started_s = time.monotonic()
        self._first_audio_s: float | None = None
        self._warnings: dict[str, None] = {}  # in order, each once
        self.finish_reason = FinishReason.STOP
        self.is_exhausted = False
        """Whether the request's own limits leave no more audio."""

    @property
    def num_samples(self) -> int:
        """Samples sent so far, at the output rate."""
        return self._output.num_samples

    def warn(self, message: str) -> None:
        """Add to the result's warnings."""
        self._warnings[message] = None

    def warn_of_lost(self, num_letters: int) -> None:
        """Warn when letters had to be left out."""
        if num_letters:
            self.warn(f"{num_letters} letter(s) that this voice cannot read were left out")

    def restart(self) -> None:
        """A listener waits anew: begin the next segment with the first chunk sizes."""
        self._is_fresh = True

    def drop(self) -> None:
        """The utterance was cancelled: what is held back is forgotten, the next starts afresh."""
        self._output.drop()
        self._carry, self._unsent_codes = None, 0
        self.restart()

    async def speak(self, segment: TextSegment) -> AsyncIterator[SpokenEvent]:
        """One segment's audio, and its words or its own time where they are asked for.

        Raises SynthesisError when the engine fails.
        """
        budget = self._budget(segment)
        self.num_segments += 1
        self._segment = segment
        if budget.max_codes < 1:
            self._hit_cap(budget)
            return
        job = self._job(segment, budget)
        self._is_fresh, self._segment_codes = False, []
        self._output.begin_segment()
        timer = self._timer(segment)
        last = None
        try:
            async with closing(self._client.speak(job)) as blocks:
                async for last in blocks:
                    self._note(last)
                    for piece in self._output.write(last.samples):
                        yield self._chunk(piece)
                        await asyncio.sleep(0)  # other streams' turn
                    if timer is not None and (spans := timer.push(last.codes)):
                        yield self._word_times(spans)
        finally:
            self._count(last)
        if timer is not None:
            is_whole = last is not None and last.finish_reason is FinishReason.STOP
            if spans := timer.finish(is_whole=is_whole):
                yield self._word_times(spans)
        if self._plan.times_segments:
            yield self._segment_time()
        self._end_segment(last, budget)

    def _timer(self, segment: TextSegment) -> WordTimer | None:
        aligner = self._plan.aligner
        if aligner is None:
            return None
        return WordTimer(aligner, segment.words, 1 / self._spec.codes_per_second)

    def _word_times(self, spans: Sequence[WordSpan]) -> WordTimes:
        """Where the segment's words are in the output."""
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

    async def flush(self) -> AsyncIterator[AudioChunk]:
        """What is held back, so that everything spoken has been sent. The stream goes on."""
        for piece in self._output.flush():
            yield self._chunk(piece)

    async def finish(self) -> AsyncIterator[AudioChunk]:
        """The rest of the audio and the container's end."""
        for piece in self._output.finish():
            yield self._chunk(piece)

    def result(self, num_characters: int) -> SynthesisResult:
        """How it went; after `finish`."""
        timings = self._timings or RequestTimings()
        audio_s = self.num_samples / self._plan.audio_format.sample_rate
        return SynthesisResult(
            finish_reason=self.finish_reason,
            usage=replace(self._usage, input_characters=num_characters, audio_s=audio_s),
            timings=SpeechTimings(
                queue_s=timings.queue_s,
                prefill_s=timings.prefill_s,
                first_audio_s=self._first_audio_s,
                total_s=time.monotonic() - self._started_s,
            ),
            warnings=tuple(self._warnings),
            header_patches=self._output.header_patches,
        )

    def _budget(self, segment: TextSegment) -> _Budget:
        plan, rate, length = self._plan, self._spec.codes_per_second, len(segment.text)
        own = min(
            plan.max_segment_codes,
            math.ceil(rate * (LONGEST_START_S + LONGEST_S_PER_CHARACTER * length)),
        )
        own = self._vocabulary.whole_frames(own)
        left = own
        if plan.max_tokens is not None:
            left = min(left, plan.max_tokens - self._num_codes)
        if plan.max_audio_s < math.inf:
            total = math.floor(plan.max_audio_s * plan.shape.speaking_rate * rate)
            left = min(left, total - self._num_codes)
        left = self._vocabulary.whole_frames(left)
        shortest = math.floor(rate * SHORTEST_S_PER_CHARACTER * length)
        wanted = max(shortest, plan.min_tokens - self._num_codes, plan.min_segment_codes)
        return _Budget(min(wanted, max(left, 1)), left, is_last=left < own)

    def _job(self, segment: TextSegment, budget: _Budget) -> SpeechJob:
        plan, vocabulary = self._plan, self._vocabulary
        prompt_ids = self._prompts.speech_prompt(segment.text, self._voice)
        max_codes = budget.max_codes
        if plan.max_seq_len is not None:
            room = vocabulary.whole_frames(plan.max_seq_len - len(prompt_ids))
            max_codes = max(vocabulary.codes_per_frame, min(max_codes, room))
        sampling = replace(
            vocabulary.constrain(plan.sampling),
            seed=segment_seed(plan.seed, self.num_segments - 1),
            max_tokens=max_codes,
            min_tokens=min(budget.min_codes, max_codes),
        )
        # A request id of the client's is not unique among those that run.
        request_id = f"{plan.request_id}#{next(_job_numbers)}"
        return SpeechJob(
            request=Request(
                request_id, prompt_ids, sampling, priority=plan.priority, lora=plan.lora
            ),
            streaming=self._streaming(),
            prompt_codes=self._voice.prompt.codes if self._voice.prompt else (),
            carry=self._carry,
            token_offset=self._plan.token_offset + self._num_codes,
            as_s16=self._output.takes_s16,
        )

    def _streaming(self) -> StreamingOptions:
        options = self._plan.streaming
        if self._is_fresh or options.chunk_sizes is None:
            return options
        return replace(options, chunk_sizes=options.chunk_sizes[-1:])

    def _note(self, block: AudioBlock) -> None:
        if block.finish_reason is FinishReason.ERROR:
            raise SynthesisError(f"request {self._plan.request_id}: {block.error}")
        self._timings = self._timings or block.timings
        self._num_codes += block.num_codes
        self._unsent_codes += block.num_codes
        self._segment_codes += block.codes
        self._carry = block.carry

    def _chunk(self, piece: EncodedAudio) -> AudioChunk:
        if self._first_audio_s is None:
            self._first_audio_s = time.monotonic() - self._started_s
        num_codes, self._unsent_codes = self._unsent_codes, 0
        self._num_chunks += 1
        return AudioChunk(
            data=piece.data,
            sequence=self._num_chunks - 1,
            sample_offset=piece.first_sample,
            sample_count=piece.num_samples,
            segment_index=self._segment.index,
            text_start=self._segment.start,
            text_end=self._segment.end,
            token_offset=self._num_codes - num_codes,
            token_count=num_codes,
            carry=self._carry or (),
            next_token_offset=self._plan.token_offset + self._num_codes,
        )

    def _count(self, block: AudioBlock | None) -> None:
        """Add a segment's cost, as of its last block."""
        if block is None:
            return
        self._usage = replace(
            self._usage,
            prompt_tokens=self._usage.prompt_tokens + block.prompt_tokens,
            cached_prompt_tokens=self._usage.cached_prompt_tokens + block.cached_prompt_tokens,
            output_tokens=self._usage.output_tokens + block.output_tokens,
        )

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
        """Make a speaker whom the model made up the prompt of what follows, if that leaves room."""
        plan, prompt = self._plan, VoicePrompt(tuple(self._segment_codes), self._segment.text)
        if not plan.invents_voices or self._voice.prompt is not None:
            return
        voice = replace(self._voice, prompt=prompt)
        length = len(self._prompts.speech_prompt(self._segment.text, voice))
        if plan.max_seq_len is None or length + plan.max_segment_codes <= plan.max_seq_len:
            self._voice = voice

    def _hit_cap(self, budget: _Budget) -> None:
        self.finish_reason = FinishReason.LENGTH
        self.is_exhausted = budget.is_last
        self.warn(f"segment {self._segment.index} hit the audio cap")
