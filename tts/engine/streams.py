"""Streams between the engine and a reader: speech jobs and text requests.

A stream belongs to the engine's thread. Tokens arrive through `on_tokens` (the engine's sink),
items leave through the stream's bounded queue; the last item has the finish reason.

    TokenChunk ──▶ SpeechStream: codes ──▶ pending blocks ──▶ decoded by DecodeLoop ──▶ queue
    TokenChunk ──▶ TextStream ──────────────────────────────────────────────────────▶ queue
"""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from decoder import (
    CodecSpec,
    DecodeRequest,
    DecoderStream,
    DecodeWindow,
    StreamState,
)
from llm import FinishReason, Token, TokenBuffer, TokenChunk
from tts.engine.client import AudioBlock, SpeechJob
from tts.engine.queue import StreamQueue

NOT_STARTED = -math.inf
LEAD_S = 0.06
"""Complete audio, beyond the time for the next block, of a stream that is not due: it covers the
rendering of that block."""
PACE = 3.0  # times real time, at which a stream's next block is complete
NO_SAMPLES = np.zeros(0, dtype=np.float32)


class CodeMap(Protocol):
    """Mapping from a language model's tokens to speech codes."""

    codes_per_token: int

    def reader(self) -> Callable[[Sequence[Token]], tuple[int, ...]]:
        """Return what finds the codes of the speech tokens of one stream, which come in pieces.

        It returns those of the next tokens, in order; other tokens are skipped.
        """


@dataclass(frozen=True, slots=True)
class SpeechSetup:
    """Settings that all speech streams of one engine share."""

    spec: CodecSpec
    code_map: CodeMap
    max_codes_ahead: int  # number of codes waiting to be rendered at which a sequence is paused


class StreamTask(ABC):
    """Base class of streams, as the decode loop sees them.

    `notify` is called with the stream, on the thread that changes it, when it may have work.
    """

    def __init__(self, request_id: str, queue: StreamQueue[Any]) -> None:
        self.notify: Callable[[StreamTask], None] = _ignore
        self.request_id = request_id
        self.queue = queue
        self.is_abandoned = False  # set by the reader, on any thread
        self.is_paused = False  # its sequence is paused in the engine
        self.is_generating = True  # until the engine's last chunk
        self.is_done = False  # the last item is in the queue
        self.buffer: TokenBuffer | None = None  # where its tokens wait for others, in the engine

    def __repr__(self) -> str:
        states = ("abandoned", "paused", "generating", "done")
        named = [state for state in states if getattr(self, f"is_{state}")]
        return f"{type(self).__name__}({self.request_id!r}, {' '.join(named)}, {self.queue!r})"

    @abstractmethod
    def on_tokens(self, chunk: TokenChunk) -> None:
        """Process generated tokens; on the engine's thread, at most once per step."""

    @abstractmethod
    def end(self, reason: FinishReason, error: str = "") -> None:
        """Drop the work that is not queued yet and end the stream; do nothing if it is done."""

    def mute(self) -> None:
        """Stop calling `notify`: the decode loop has removed this stream."""
        self.notify = _ignore

    @property
    def is_new(self) -> bool:
        """Whether it is speech without a token yet."""
        return False

    @property
    def nears_first_audio(self) -> bool:
        """Whether its next token completes the block that a listener waits for first.

        Where that is its first token, also while its prompt waits for a step.
        """
        return False

    @property
    @abstractmethod
    def is_ahead(self) -> bool:
        """Whether so much is generated and unread that the sequence should be paused."""

    def due_s(self, now_s: float) -> float:
        """Return the time from which the language model should generate for it: -inf is always,
        inf not before a change.
        """
        return -math.inf if self.is_generating and not self.is_paused else math.inf


class TextStream(StreamTask):
    """Stream of a text request: passes chunks through."""

    queue: StreamQueue[TokenChunk]
    is_held = False  # by its reader, who sets it on any thread

    @property
    def is_ahead(self) -> bool:
        return self.is_held or self.queue.is_full

    def on_tokens(self, chunk: TokenChunk) -> None:
        if self.is_done:
            return
        self.is_generating = chunk.finish_reason is None
        self.is_done = not self.is_generating
        is_full = self.queue.put(chunk)
        if self.is_done or is_full:
            self.notify(self)

    def end(self, reason: FinishReason, error: str = "") -> None:
        self.on_tokens(TokenChunk(self.request_id, finish_reason=reason, error=error))


class SpeechStream(StreamTask):
    """Stream of a speech job: cuts codes into blocks and keeps blocks until they are rendered.

    A block is described by the tokens that complete it, at that time, so that a stream's messages
    do not depend on the speed of rendering and reading; its samples follow.

    `plays_until_s` estimates when a client that plays the audio while it arrives runs out of it.
    For a job that returns one block, or that continues an earlier one, no client waits for a first
    sound: there the clock starts with the job.
    Raises CodeRangeError for prompt or carried codes outside the codebook.
    """

    queue: StreamQueue[AudioBlock]
    buffer: TokenBuffer

    def __init__(self, job: SpeechJob, setup: SpeechSetup, queue: StreamQueue[AudioBlock]) -> None:
        super().__init__(job.request.request_id, queue)
        spec = setup.spec
        is_awaited = job.streaming.chunk_sizes is not None and job.carry is None
        self.plays_until_s = NOT_STARTED if is_awaited else time.monotonic()
        self.held_until_s = NOT_STARTED  # until then its first block is not rendered
        self._as_s16 = job.as_s16
        self._sample_rate, self._code_rate = spec.sample_rate, spec.codes_per_second
        self._codes_of = setup.code_map.reader()
        self._codes_per_token = setup.code_map.codes_per_token
        self.token_rate = spec.codes_per_second / self._codes_per_token
        """Tokens per second of audio."""
        self._max_codes_ahead = setup.max_codes_ahead
        self._stream = DecoderStream(
            spec,
            job.streaming,
            prompt_codes=job.prompt_codes,
            carry=job.carry,
            token_offset=job.token_offset,
            pitch=job.pitch,
        )
        self._options, self._buffer = job.streaming, job.streaming.buffer
        self._state = StreamState()
        self._blocks: deque[AudioBlock] = deque()  # pending; the last one may have no codes
        self._requests: deque[DecodeRequest] = deque()  # of the pending blocks with codes
        self._num_launched = 0  # number of those in flight, from the oldest
        self.samples_launched = 0
        """Number of the samples of blocks in flight."""
        self._num_waiting = 0  # codes of all pending blocks
        self._tokens = TokenChunk(self.request_id)
        self._num_missing = self._stream.num_missing / self._codes_per_token
        """Number of tokens that complete the next block."""
        self._new_ids: list[Token] = []  # tokens whose codes were not looked up yet
        self.buffer = TokenBuffer(self._num_missing)
        # totals of the queued items
        self._num_codes = self._num_samples = 0
        self._carry = self._stream.carry

    @property
    def is_ahead(self) -> bool:
        return self._num_waiting >= self._max_codes_ahead

    def due_s(self, now_s: float) -> float:
        """See StreamTask: from then on its next block is complete in time only at more than `PACE`
        times real time.

        The end of complete blocks is known before they are rendered. Until a stream has one, and
        where all audio is one block, it is always due.
        """
        if not self.is_generating or self.is_paused:
            return math.inf
        has_audio = self._num_waiting or self.plays_until_s != NOT_STARTED
        if not has_audio or self._num_missing == math.inf:
            return -math.inf
        ends_s = max(self.plays_until_s, now_s) + self._num_waiting / self._code_rate
        num_missing = self._num_missing - self._num_new
        return ends_s - LEAD_S - num_missing * self._codes_per_token / self._code_rate / PACE

    @property
    def awaits_first_audio(self) -> bool:
        """Whether a client waits for its first audio while the language model generates it."""
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
        is_changed = not former.output_tokens
        if len(new_ids) >= self._num_missing:
            for window in self._push():
                self._add(window)
                is_changed = True
        self.buffer.limit = self._num_missing - len(new_ids)
        if is_changed:
            self.notify(self)

    @property
    def _num_new(self) -> int:
        """Number of tokens after those of the newest complete block."""
        return len(self._new_ids) + len(self.buffer.ids)

    @property
    def is_new(self) -> bool:
        """See StreamTask."""
        return self._tokens.output_tokens == 0

    @property
    def is_unheard(self) -> bool:
        """Whether a listener waits for its first audio."""
        return self.plays_until_s == NOT_STARTED

    @property
    def nears_first_audio(self) -> bool:
        """See StreamTask."""
        num_missing = self._num_missing - self._num_new
        return self.is_unheard and not self._num_waiting and num_missing <= 1

    def lateness_s(self, token_s: float) -> float:
        """Return how late its audio is at worst, if it is played from its first block's completion
        on and a token takes `token_s`: below 0 it is early. Rendering takes no time here.
        """
        options, first = self._options, self._ends_of(0)
        worst_s = -math.inf
        for block in range(1, len(options.chunk_sizes or ())):
            played, (_, needed) = self._ends_of(block - 1)[0], self._ends_of(block)
            generated_s = (needed - first[1]) / self._codes_per_token * token_s
            worst_s = max(worst_s, generated_s - played / self._code_rate)
        return worst_s

    def _ends_of(self, block: int) -> tuple[int, int]:
        """Return the number of codes up to the end of a block, and that with its look-ahead."""
        sizes = self._options.chunk_sizes or (0,)
        end = sum(sizes[: block + 1])
        return end, end + self._options.look_ahead_of(block)

    def _push(self) -> list[DecodeWindow]:
        """Look up the new tokens' codes; return the windows of the blocks that they complete."""
        windows = self._stream.push(self._codes_of(self._new_ids))
        self._new_ids.clear()
        self._num_missing = self._stream.num_missing / self._codes_per_token
        return windows

    def _take_last(self, chunk: TokenChunk, reason: FinishReason) -> None:
        self.is_generating = False
        if reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            self._end(chunk)
        else:
            self._new_ids += chunk.token_ids
            windows = self._push() + self._stream.finish()
            for window in windows:
                self._add(window, is_last=window is windows[-1])
            if not windows:
                self._blocks.append(self._block(chunk, (), self._stream.carry, is_last=True))
        self.notify(self)

    @property
    def num_ready(self) -> int:
        """Number of windows that can be rendered now: not in flight, with room in the queue."""
        count = len(self._requests) - self._num_launched
        return max(min(count, self.queue.room - self._num_launched), 0) if count else 0

    def is_startable(self, now_s: float) -> bool:
        """Whether its windows may be rendered: its first block is not held any more."""
        is_first = self.plays_until_s == NOT_STARTED and self.is_generating
        return not is_first or now_s >= self.held_until_s

    def requests(self, most: int = sys.maxsize) -> list[DecodeRequest]:
        """Return the decode requests of the `num_ready` windows, in order, at most so many."""
        first = self._num_launched
        return list(islice(self._requests, first, first + min(self.num_ready, most)))

    def duration_s(self, request: DecodeRequest) -> float:
        """Return the duration of a window's audio."""
        return request.window.num_samples / self._sample_rate

    def underrun_s(self, now_s: float) -> float:
        """Return the time at which the client has played all audio, including that in flight."""
        if not self.samples_launched:
            return self.plays_until_s
        return max(self.plays_until_s, now_s) + self.samples_launched / self._sample_rate

    def launch(self) -> None:
        """Mark the oldest pending window as in flight."""
        self.samples_launched += self._requests[self._num_launched].window.num_samples
        self._num_launched += 1

    def withdraw(self) -> None:
        """Mark the newest window in flight as pending again, after the decoder rejected it."""
        self._num_launched -= 1
        self.samples_launched -= self._requests[self._num_launched].window.num_samples

    def deliver(self, samples: np.ndarray, now_s: float) -> None:
        """Put the oldest pending block, rendered to [num_samples], into the queue."""
        if self.is_done:
            return
        block, request = self._blocks.popleft(), self._requests.popleft()
        self._num_launched -= 1
        self.samples_launched -= request.window.num_samples
        self._num_waiting -= block.num_codes
        self._put(block, samples)
        starts_s = max(self.plays_until_s, now_s)
        self.plays_until_s = starts_s + len(samples) / self._sample_rate

    def deliver_end(self) -> None:
        """Put an end without audio into the queue if it is next."""
        if self._blocks and not self._blocks[0].codes:
            self._put(self._blocks.popleft(), NO_SAMPLES)

    def end(self, reason: FinishReason, error: str = "") -> None:
        if not self.is_done:
            count = self._tokens.output_tokens + len(self.buffer.ids)
            self._end(_ended(self._tokens, reason, error)._replace(output_tokens=count))
            self.notify(self)

    def _add(self, window: DecodeWindow, *, is_last: bool = False) -> None:
        """Add the block of a window that the newest tokens have completed."""
        codes, carry = window.block, window.carry(self._buffer)
        self._blocks.append(self._block(self._tokens, codes, carry, is_last=is_last))
        self._requests.append(DecodeRequest(window, self._state, self._as_s16))
        self._num_waiting += len(codes)

    def _block(
        self, tokens: TokenChunk, codes: tuple[int, ...], carry: tuple[int, ...], *, is_last: bool
    ) -> AudioBlock:
        """Return the block that follows the pending ones, without its samples."""
        return AudioBlock(
            samples=NO_SAMPLES,
            first_sample=0,
            first_code=self._num_codes + self._num_waiting,
            num_codes=len(codes),
            codes=codes,
            carry=carry,
            finish_reason=tokens.finish_reason if is_last else None,
            error=tokens.error,
            prompt_tokens=tokens.prompt_tokens,
            cached_prompt_tokens=tokens.cached_prompt_tokens,
            output_tokens=tokens.output_tokens,
            queue_s=tokens.queue_s,
            prefill_s=tokens.prefill_s,
            total_s=tokens.total_s,
        )

    def _end(self, tokens: TokenChunk) -> None:
        self._blocks.clear()
        self._requests.clear()
        self._num_launched = self.samples_launched = self._num_waiting = 0
        self._put(self._block(tokens, (), self._carry, is_last=True), NO_SAMPLES)

    def _put(self, block: AudioBlock, samples: np.ndarray) -> None:
        # Before the put: the reader of the last block may use the id again.
        self.is_done = block.finish_reason is not None
        if self.is_done:
            self._state = StreamState()  # its memory serves other streams while this one is read
        self.queue.put(block._replace(samples=samples, first_sample=self._num_samples))
        self._num_codes += block.num_codes
        self._num_samples += len(samples)
        self._carry = block.carry


def _ignore(task: StreamTask) -> None:
    pass


def _ended(tokens: TokenChunk, reason: FinishReason, error: str) -> TokenChunk:
    """Return the last known state of a request with another finish reason."""
    return tokens._replace(
        token_ids=(), logprobs=(), prompt_logprobs=(), finish_reason=reason, error=error
    )
