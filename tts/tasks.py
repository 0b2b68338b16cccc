"""One stream's work between the engine and its reader: speech jobs and text requests.

A task lives on the engine's thread. Tokens come in through `on_tokens` (the engine's sink), items
leave through the stream's bounded queue; the last item says why the stream ended.

    TokenChunk ──▶ SpeechTask: codes ──▶ fired blocks ──▶ rendered by AudioWorker ──▶ queue
    TokenChunk ──▶ TextTask ────────────────────────────────────────────────────────▶ queue
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from decoder import CodecSpec, DecoderStream, DecodeWindow, SpeechChunk, StreamState
from llm import FinishReason, TokenChunk
from tts.chunker import SpeechChunker
from tts.engine_client import AudioBlock, SpeechJob
from tts.stream import StreamQueue

NOT_STARTED = -math.inf
NO_SAMPLES = np.zeros(0, dtype=np.float32)


class CodeMap(Protocol):
    """Which of a language model's token ids are speech, and which codes they stand for."""

    def codes(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Codes of the speech tokens among `token_ids`, in order; other ids are left out."""


@dataclass(frozen=True, slots=True)
class SpeechSetup:
    """What all speech tasks of one engine share."""

    spec: CodecSpec
    code_map: CodeMap
    max_codes_ahead: int  # fired and not yet rendered codes, at which a sequence is paused


class FiredBlock(NamedTuple):
    """A block that can be rendered; without a window it is an end without audio.

    `tokens` is the chunk it fired with; `is_last` was decided then (semantics B.2, rule 3), so a
    stream's messages do not depend on how fast they are rendered or read.
    """

    chunk: SpeechChunk
    window: DecodeWindow | None
    carry: tuple[int, ...]
    tokens: TokenChunk
    is_last: bool


class StreamTask(ABC):
    """What the worker knows about any stream. It tells of what may ask for work, nothing else."""

    def __init__(self, request_id: str, queue: StreamQueue[Any]) -> None:
        self._tell: Callable[[StreamTask], None] = _ignore
        self.request_id = request_id
        self.queue = queue
        self.is_abandoned = False  # set by the reader, in any thread
        self.is_paused = False  # the engine was asked not to schedule it
        self.is_generating = True  # the engine has not sent the last chunk
        self.is_done = False  # the last item is in the queue

    def __repr__(self) -> str:
        states = ("abandoned", "paused", "generating", "done")
        named = [state for state in states if getattr(self, f"is_{state}")]
        return f"{type(self).__name__}({self.request_id!r}, {' '.join(named)}, {self.queue!r})"

    def connect(self, tell: Callable[[StreamTask], None]) -> None:
        """Say who is told of changes, on the thread that makes them."""
        self._tell = tell

    @abstractmethod
    def on_tokens(self, chunk: TokenChunk) -> None:
        """Take what the engine generated; on the engine's thread, once per step at most."""

    @abstractmethod
    def end(self, reason: FinishReason, error: str = "") -> None:
        """Drop what is not in the queue yet and end the stream; once it is done, nothing."""

    @property
    @abstractmethod
    def is_ahead(self) -> bool:
        """Whether so much is generated and not read that no more should be."""


class TextTask(StreamTask):
    """A text request: chunks pass through."""

    queue: StreamQueue[TokenChunk]

    @property
    def is_ahead(self) -> bool:
        return self.queue.is_full

    def on_tokens(self, chunk: TokenChunk) -> None:
        if self.is_done:
            return
        self.is_generating = chunk.finish_reason is None
        self.is_done = not self.is_generating
        self.queue.put(chunk)
        if self.is_done or self.queue.is_full:
            self._tell(self)

    def end(self, reason: FinishReason, error: str = "") -> None:
        self.on_tokens(TokenChunk(self.request_id, finish_reason=reason, error=error))


class SpeechTask(StreamTask):
    """A speech job: cuts codes into blocks, keeps fired blocks until they are rendered.

    `plays_until_s` estimates when the client's audio runs out, if it plays it as it comes. Who
    wants the whole clip at once, or goes on from an earlier job, does not sit in silence: there
    the clock starts with the job.
    Raises CodeRangeError for prompt or carried codes outside the codebook.
    """

    queue: StreamQueue[AudioBlock]

    def __init__(self, job: SpeechJob, voice: SpeechSetup, queue: StreamQueue[AudioBlock]) -> None:
        super().__init__(job.request.request_id, queue)
        spec = voice.spec
        is_awaited = job.streaming.chunk_sizes is not None and job.carry is None
        self.plays_until_s = NOT_STARTED if is_awaited else time.monotonic()
        self.as_s16 = job.as_s16
        self._sample_rate = spec.sample_rate
        self._code_map = voice.code_map
        self._max_codes_ahead = voice.max_codes_ahead
        self._chunker = SpeechChunker(
            job.streaming.chunk_sizes,
            look_ahead=job.streaming.look_ahead,
            first_look_ahead=None if job.carry else job.streaming.first_look_ahead,
            codes_per_frame=spec.codes_per_frame,
        )
        self._stream = DecoderStream(
            spec,
            job.streaming,
            prompt_codes=job.prompt_codes,
            carry=job.carry,
            token_offset=job.token_offset,
        )
        self.state = StreamState()
        self._waiting: deque[FiredBlock] = deque()
        self._num_launched = 0  # of those, from the oldest: a decoder is at them
        self._samples_launched = 0  # that they become
        self._num_windows = 0  # the others, without an end
        self._num_waiting = 0  # codes of all of those
        self._tokens = TokenChunk(self.request_id)
        self._new_ids: list[int] = []  # tokens that were not looked up yet
        self._num_missing = self._chunker.num_missing
        # what is in the queue already
        self._num_blocks = self._num_codes = self._num_samples = 0
        self._carry = self._stream.carry

    @property
    def is_ahead(self) -> bool:
        return self._num_waiting >= self._max_codes_ahead

    @property
    def awaits_first_audio(self) -> bool:
        """Whether a listener waits and the language model is at it."""
        has_tokens = self._tokens.output_tokens > 0
        return self.is_generating and has_tokens and self.plays_until_s == NOT_STARTED

    def on_tokens(self, chunk: TokenChunk) -> None:
        if self.is_done:
            return
        former, self._tokens = self._tokens, chunk
        if chunk.finish_reason is not None:
            self._take_last(chunk, chunk.finish_reason)
            return
        new_ids = self._new_ids
        new_ids += chunk.token_ids
        has_news = not former.output_tokens
        if len(new_ids) >= self._num_missing:
            for block in self._push():
                self._fire(block, is_last=False)
                has_news = True
        if has_news:
            self._tell(self)

    def _push(self) -> list[SpeechChunk]:
        """Look up what came since, when it may complete a block: a token is one code at most."""
        blocks = self._chunker.push(self._code_map.codes(self._new_ids))
        self._new_ids.clear()
        self._num_missing = self._chunker.num_missing
        return blocks

    def _take_last(self, chunk: TokenChunk, reason: FinishReason) -> None:
        self.is_generating = False
        if reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            self._end(chunk)
        else:
            self._new_ids += chunk.token_ids
            blocks = self._push() + self._chunker.finish()
            if not blocks:
                blocks.append(SpeechChunk((), self._stream.num_codes, self._num_fired))
            for block in blocks:
                self._fire(block, is_last=block is blocks[-1])
        self._tell(self)

    @property
    def num_ready(self) -> int:
        """Windows that can be rendered now: fired and not launched, with room in the queue."""
        count = self._num_windows
        return max(min(count, self.queue.room - self._num_launched), 0) if count else 0

    def windows(self) -> list[DecodeWindow]:
        """The `num_ready` windows, in order."""
        first = self._num_launched
        ready = islice(self._waiting, first, first + self.num_ready)
        return [block.window for block in ready if block.window is not None]

    def runs_dry_s(self, now_s: float) -> float:
        """When the client has played all that it has and that a decoder is at."""
        if not self._samples_launched:
            return self.plays_until_s
        return max(self.plays_until_s, now_s) + self._samples_launched / self._sample_rate

    def launched(self) -> None:
        """A decoder is at the oldest window that it was not at before."""
        self._count_launched(1, self._num_launched)

    def withdrawn(self) -> None:
        """A decoder could not take the window that was launched last."""
        self._count_launched(-1, self._num_launched - 1)

    def _count_launched(self, change: int, index: int) -> None:
        """A decoder is at one window more, or less: that of the waiting block with this index."""
        window = self._waiting[index].window
        assert window is not None
        self._num_launched += change
        self._num_windows -= change
        self._samples_launched += change * window.num_samples

    def deliver(self, samples: np.ndarray, now_s: float) -> None:
        """Hand over the oldest waiting block, rendered: [num_samples]."""
        if self.is_done:
            return
        block = self._waiting.popleft()
        assert block.window is not None
        self._num_launched -= 1
        self._samples_launched -= block.window.num_samples
        self._num_waiting -= len(block.chunk.codes)
        self._put(block, samples)
        starts_s = max(self.plays_until_s, now_s)
        self.plays_until_s = starts_s + len(samples) / self._sample_rate

    def deliver_end(self) -> None:
        """Hand over an end without audio, when it is its turn."""
        if self._waiting and self._waiting[0].window is None:
            self._put(self._waiting.popleft(), NO_SAMPLES)

    def end(self, reason: FinishReason, error: str = "") -> None:
        if not self.is_done:
            self._end(_ended(self._tokens, reason, error))
            self._tell(self)

    @property
    def _num_fired(self) -> int:
        return self._num_blocks + len(self._waiting)

    def _fire(self, chunk: SpeechChunk, *, is_last: bool) -> None:
        window = None
        if chunk.codes:
            window = self._stream.window(chunk)
            self._num_windows += 1
            self._num_waiting += len(chunk.codes)
        self._waiting.append(FiredBlock(chunk, window, self._stream.carry, self._tokens, is_last))

    def _end(self, tokens: TokenChunk) -> None:
        self._waiting.clear()
        self._num_launched = self._samples_launched = self._num_windows = self._num_waiting = 0
        chunk = SpeechChunk((), self._num_codes, self._num_blocks)
        self._put(FiredBlock(chunk, None, self._carry, tokens, True), NO_SAMPLES)

    def _put(self, block: FiredBlock, samples: np.ndarray) -> None:
        chunk, _, carry, tokens, is_last = block
        self.is_done = is_last  # first: whoever reads the last block may use the id again
        self.queue.put(
            AudioBlock(
                samples=samples,
                block_index=chunk.block_index,
                first_sample=self._num_samples,
                first_code=chunk.first_code,
                num_codes=len(chunk.codes),
                codes=chunk.codes,
                carry=carry,
                finish_reason=tokens.finish_reason if is_last else None,
                error=tokens.error,
                prompt_tokens=tokens.prompt_tokens,
                cached_prompt_tokens=tokens.cached_prompt_tokens,
                output_tokens=tokens.output_tokens,
                timings=tokens.timings,
            )
        )
        self._num_blocks += 1
        self._num_codes += len(chunk.codes)
        self._num_samples += len(samples)
        self._carry = carry


def _ignore(task: StreamTask) -> None:
    pass


def _ended(tokens: TokenChunk, reason: FinishReason, error: str) -> TokenChunk:
    """What was last known about a request, with another end."""
    return tokens._replace(
        token_ids=(), logprobs=(), prompt_logprobs=(), finish_reason=reason, error=error
    )
