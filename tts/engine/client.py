"""Interface between a front end (gRPC, command line) and the engine.

Only frozen values cross it, so that the engine can run in this process or in another one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from decoder import AudioEncoding, CodecSpec, StreamingOptions
from llm import FinishReason, Request, TokenChunk
from tts.observe.engine_status import EngineStatus


@dataclass(frozen=True, slots=True)
class SpeechJob:
    """Request for speech tokens and their decoding to audio, by one language-model call.

    `carry` None means a new stream; with a tuple (even an empty one) the stream continues from
    these codes, the first of them spoken `len(carry)` codes before `token_offset`. With `as_s16`
    blocks may be 16-bit, rounded as by `decoder.to_s16`. `pitch`, in semitones, is for codecs with
    `can_shift_pitch`.
    """

    request: Request
    streaming: StreamingOptions
    prompt_codes: tuple[int, ...] = ()
    carry: tuple[int, ...] | None = None
    token_offset: int = 0  # number of codes before this job's first one
    as_s16: bool = False
    pitch: float = 0.0


class AudioBlock(NamedTuple):
    """Audio of one block, mono at the codec's rate: float32 in [-1, 1], or int16 if allowed.

    Offsets count from the job's first sample and code. Only the last block of a job has a
    `finish_reason`; it may be empty.
    """

    samples: np.ndarray  # [S]
    first_sample: int
    first_code: int
    num_codes: int
    codes: tuple[int, ...] = ()  # of this audio
    carry: tuple[int, ...] = ()  # last `buffer` codes, for a job that continues this one
    finish_reason: FinishReason | None = None
    error: str = ""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    queue_s: float | None = None  # as in `TokenChunk`
    prefill_s: float | None = None
    total_s: float = 0.0


class EncodedClip(NamedTuple):
    """A reference clip as the model hears it: its codes, and the vector of its speaker, as
    little-endian float32 (b"": the model reads none).
    """

    codes: tuple[int, ...]
    vector: bytes = b""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Constant properties of the loaded model, for the preparation of requests.

    `codec` is None for a text-only model; `raw_encoding` is the encoding of requests without one.
    `voice_codec` is the codec's identity, which is stored with created voices; empty where no
    voice outlives the server.
    """

    codec: CodecSpec | None
    max_seq_len: int  # in tokens
    raw_encoding: AudioEncoding
    voice_codec: str = ""


class Hold:
    """Switch of one text request: while it is set, the engine generates no tokens for it.

    `on_change` is set by the engine's client; until then a change has no effect.
    """

    def __init__(self) -> None:
        self.is_set = False
        self.on_change: Callable[[], None] = _ignore

    def set(self, *, is_set: bool) -> None:
        """Hold the request, or let it continue."""
        if is_set != self.is_set:
            self.is_set = is_set
            self.on_change()


def _ignore() -> None:
    pass


class EngineClient(Protocol):
    """Interface of an engine for front ends."""

    @property
    def codec(self) -> CodecSpec | None:
        """Specification of the codec; None for a text-only model."""

    def generate(
        self, request: Request, hold: Hold | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream a text request, which `hold` may interrupt. Closing the iterator cancels it."""

    def speak(self, job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        """Stream a speech job. Closing the iterator cancels it.

        A consumer that stops reading pauses the job (bounded queue); nothing is dropped.
        """

    async def encode_prompt(self, samples: np.ndarray) -> EncodedClip:
        """Encode a reference clip: float32 [S], mono at the codec's rate."""

    async def status(self) -> EngineStatus: ...

    async def close(self, drain_s: float = 0.0) -> None:
        """Wait up to `drain_s` for running requests, cancel the rest, and stop."""


Speak = Callable[[SpeechJob], AsyncGenerator[AudioBlock, None]]
"""Streams a speech job, as `EngineClient.speak` does."""


class Slot(Protocol):
    """Slot of a call among the running ones, which the call may not hold yet."""

    def speak_behind(self, client: EngineClient) -> Speak | None:
        """Return how to send this engine jobs at once, which wait there for the slot.

        None: the engine does not know the slot, and jobs are sent when it is held.
        """

    async def held(self) -> None:
        """Wait until the call holds it; one task at a time.

        Raises StreamLimitError or ServerBusyError when a limit is reached, and EngineLostError.
        """
