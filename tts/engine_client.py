"""The small interface between the front end (gRPC, command line) and the engine.

Only frozen values cross it, so that the engine can live in this process or in another one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from decoder import AudioEncoding, CodecSpec, StreamingOptions
from llm import EngineStats, FinishReason, Histogram, Request, RequestTimings, TokenChunk


@dataclass(frozen=True, slots=True)
class SpeechJob:
    """One language-model call whose tokens are speech, and how to turn them into audio.

    `carry` None means a fresh stream; a tuple (even empty) means the stream goes on from these
    codes, the first of them spoken `len(carry)` codes before `token_offset`. With `as_s16` blocks
    may be 16-bit, rounded as `decoder.to_s16` does.
    """

    request: Request
    streaming: StreamingOptions
    prompt_codes: tuple[int, ...] = ()
    carry: tuple[int, ...] | None = None
    token_offset: int = 0  # codes spoken before this job's first one
    as_s16: bool = False


class AudioBlock(NamedTuple):
    """Audio of one block, mono at the codec's rate: float32 in [-1, 1], or int16 as its job allows.

    Offsets count from the job's first sample and code. The last block of a job, and only it,
    has a `finish_reason`; it may be empty.
    """

    samples: np.ndarray  # [S]
    block_index: int
    first_sample: int
    first_code: int
    num_codes: int
    codes: tuple[int, ...] = ()  # that it was rendered from
    carry: tuple[int, ...] = ()  # last `buffer` codes, for a job that continues this one
    finish_reason: FinishReason | None = None
    error: str = ""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    timings: RequestTimings = RequestTimings()


@dataclass(frozen=True, slots=True)
class AudioFigures:
    """What the audio decoder did since the start."""

    decode_s: Histogram  # time of one call, which renders blocks of one or several streams
    blocks: Histogram  # blocks of one call
    audio_s: float  # rendered, all streams together
    buffered: int  # blocks and chunks of text that wait for their readers, now


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot for health, metrics and tests."""

    running: int
    waiting: int
    used_pages: int
    total_pages: int
    audio_streams: int  # decoder states alive
    preemptions: int
    prefix_hit_tokens: int
    is_alive: bool = True  # False: it has stopped, broke down or hangs, and nothing runs any more
    stats: EngineStats | None = None
    audio: AudioFigures | None = None
    linear_layers: tuple[tuple[str, int], ...] = ()  # how many compute with what


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What preparing requests needs to know about the loaded model; it never changes.

    `codec` is None for a text-only model; `raw_encoding` is what a request gets that names none.
    """

    codec: CodecSpec | None
    max_seq_len: int  # tokens of one sequence
    raw_encoding: AudioEncoding


class EngineClient(Protocol):
    """What a front end may ask of an engine."""

    @property
    def codec(self) -> CodecSpec | None:
        """The audio decoder's facts; None for a text-only model."""

    def generate(self, request: Request) -> AsyncIterator[TokenChunk]:
        """Stream a text request. Closing the iterator cancels it."""

    def speak(self, job: SpeechJob) -> AsyncIterator[AudioBlock]:
        """Stream a speech job. Closing the iterator cancels it.

        A consumer that stops reading pauses the job (bounded queue); nothing is dropped.
        """

    async def encode_prompt(self, samples: np.ndarray) -> tuple[int, ...]:
        """Codes of a reference clip: mono float32 at the codec's rate."""

    async def status(self) -> EngineStatus: ...

    async def close(self, drain_s: float = 0.0) -> None:
        """Finish what runs within `drain_s`, cancel the rest, stop."""
