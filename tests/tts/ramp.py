"""A small real `EngineClient` without a language model, and functions that collect its events.

Codes follow from prompt and seed, audio from the ramp codec; the code stream and the decoder are
the true ones, so what arrives is cut, windowed and offset as by the real engine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from decoder import (
    CodecSpec,
    DecodeRequest,
    DecoderStream,
    DecodeWindow,
    MaskPolicy,
    StreamingOptions,
    render,
    sample_index,
)
from decoder.codecs.ramp import RampDecoder, ramp_spec
from llm import FinishReason, Request, TokenChunk
from tests.deadlines import HANG_S
from tts.engine.client import AudioBlock, EncodedClip, Hold, SpeechJob
from tts.families.prompt import PromptBuilder
from tts.observe.engine_status import EngineStatus
from tts.speech.run import SynthesisSettings
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import (
    AudioChunk,
    Done,
    SamplingOverrides,
    SpeechEvent,
    SpeechRequest,
    Started,
    SynthesisResult,
)
from tts.text.lexicon.files import load_lexicon
from tts.text.lexicon.watched import WatchedLexicons
from tts.voices.registry import VoiceRegistry

RATE = 16_000
CODES_PER_PROMPT_TOKEN = 2
SAMPLES_PER_CODE = 640
TEXT = "The first sentence is here. A second one follows it! And is there a third? Yes."
SEEDED = SamplingOverrides(seed=7)
STREAMING = StreamingOptions(chunk_sizes=(2, 4, 8), buffer=3)

Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(work, HANG_S))


@dataclass(frozen=True)
class SpeechEvents:
    """Events of one request, by kind."""

    started: Started
    chunks: tuple[AudioChunk, ...]
    result: SynthesisResult

    @property
    def data(self) -> bytes:
        return b"".join(chunk.data for chunk in self.chunks)

    @property
    def num_samples(self) -> int:
        return sum(chunk.sample_count for chunk in self.chunks)


def grouped(events: list[SpeechEvent]) -> SpeechEvents:
    started, *chunks, done = events
    assert isinstance(started, Started)
    assert isinstance(done, Done)
    return SpeechEvents(started, tuple(c for c in chunks if isinstance(c, AudioChunk)), done.result)


def build(
    client: RampClient, folder: Path, lexicons: Sequence[Path] = (), **settings: Any
) -> Synthesizer:
    prompts = PromptBuilder.load(folder, client.codec)
    assert prompts.family is not None
    values: dict[str, Any] = {
        "model": "tiny",
        "streaming": STREAMING,
        "traits": prompts.family.traits,
        **settings,
    }
    return Synthesizer(
        client,
        prompts,
        VoiceRegistry.load(folder / "voices.json"),
        SynthesisSettings(**values),
        WatchedLexicons(
            lexicons,
            partial(
                load_lexicon,
                adapt=prompts.pronounced,
                ascii_only=prompts.family.traits.ascii_only,
            ),
        ),
    )


def collect_speech(synthesizer: Synthesizer, text: str = TEXT, **values: Any) -> SpeechEvents:
    request = SpeechRequest(text, **{"sampling": SEEDED, **values})

    async def listen() -> list[SpeechEvent]:
        return [event async for event in synthesizer.stream(request)]

    return grouped(run(listen()))


def ramp_of(client: RampClient, codes: list[int]) -> np.ndarray:
    """All codes rendered as one stream from position 0."""
    window = DecodeWindow(
        codes=tuple(codes),
        positions=tuple(range(len(codes))),
        block_ids=(0,) * len(codes),
        prompt_len=0,
        history_len=0,
        masks=MaskPolicy(),
        skip_samples=0,
        first_sample=0,
        num_samples=sample_index(len(codes), client.decoder.spec.samples_per_code),
    )
    return client.decoder.decode([window])[0].numpy()


class RampClient:
    """Speaks two codes per prompt token, unless `is_endless`: then until the job's cap.

    While `gate` is clear, no further block comes out. `ends_with` replaces the next job's end.
    """

    def __init__(self, codebook_size: int = 64) -> None:
        self.decoder = RampDecoder(ramp_spec({"codebook_size": codebook_size}))
        self.jobs: list[SpeechJob] = []
        self.spoken: list[int] = []  # all codes of all jobs, as far as they were delivered
        self.num_open = 0
        self.is_endless = False
        self.ends_with: FinishReason | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def codec(self) -> CodecSpec | None:
        return self.decoder.spec

    def codes_of(self, request: Request) -> list[int]:
        """Return a request's codes; one more than its cap if the cap ends it."""
        natural = CODES_PER_PROMPT_TOKEN * len(request.prompt_ids)
        count = 10**9 if self.is_endless else natural
        draw = random.Random(f"{request.prompt_ids} {request.sampling.seed}")
        size = self.decoder.spec.codebook_size
        return [draw.randrange(size) for _ in range(min(count, request.sampling.max_tokens + 1))]

    async def speak(self, job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        self.jobs.append(job)
        self.num_open += 1
        stream = DecoderStream(
            self.decoder.spec,
            job.streaming,
            prompt_codes=job.prompt_codes,
            carry=job.carry,
            token_offset=job.token_offset,
        )
        try:
            for window, reason in self._windows(job, stream):
                await self.gate.wait()
                await asyncio.sleep(0)
                self.spoken += window.block
                yield self._block(job, window, reason)
        finally:
            self.num_open -= 1

    def _windows(
        self, job: SpeechJob, stream: DecoderStream
    ) -> list[tuple[DecodeWindow, FinishReason | None]]:
        codes, limit = self.codes_of(job.request), job.request.sampling.max_tokens
        reason = FinishReason.LENGTH if len(codes) > limit else FinishReason.STOP
        windows = [*stream.push(codes[:limit]), *stream.finish()]
        if self.ends_with is not None:
            reason, self.ends_with = self.ends_with, None
        return [(window, None if window is not windows[-1] else reason) for window in windows]

    def _block(
        self, job: SpeechJob, window: DecodeWindow, reason: FinishReason | None
    ) -> AudioBlock:
        first_code = window.positions[-len(window.block) - window.future_len] - job.token_offset
        (samples,) = render(self.decoder, [DecodeRequest(window)])
        return AudioBlock(
            samples=samples,
            first_sample=window.first_sample,
            first_code=first_code,
            num_codes=len(window.block),
            codes=window.block,
            carry=window.carry(job.streaming.buffer),
            finish_reason=reason,
            error="the pages burnt" if reason is FinishReason.ERROR else "",
            prompt_tokens=len(job.request.prompt_ids),
            cached_prompt_tokens=1,
            output_tokens=first_code + len(window.block),
            queue_s=0.25,
            prefill_s=0.5,
        )

    async def generate(
        self, request: Request, hold: Hold | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(request.request_id, finish_reason=FinishReason.STOP)

    async def encode_prompt(self, samples: np.ndarray) -> EncodedClip:
        return EncodedClip(self.decoder.encode(samples))

    async def status(self) -> EngineStatus:
        return EngineStatus(self.num_open, 0, 0, 0, self.num_open, 0, 0)

    async def close(self, drain_s: float = 0.0) -> None:
        """Do nothing: the client has no background task."""
