"""What stands around the engine: the pipeline it drives, its hook, its streams, its numbers."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from llm.batch import ScheduledBatch, StepOutput
from llm.engine_figures import BatchFigures
from llm.kv_cache.manager import KVCacheManager
from llm.request import TokenChunk
from llm.runner.graph_figures import GraphFigures
from llm.scheduler.figures import SequenceFigures
from llm.speculative.metrics import SpeculativeDecodingMetrics

Sink = Callable[[TokenChunk], None]


class Pipeline(Protocol):
    """What the engine needs of a model: one step at a time, and the facts about its tokens.

    A pipeline may answer a batch at once, or one call later (`has_pending_outputs`); with
    `overlap_active` it always does the latter, and the time a call takes is the last batch's.
    """

    @property
    def kv_manager(self) -> KVCacheManager: ...
    @property
    def eos_token_ids(self) -> Collection[int]: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    @property
    def overlap_active(self) -> bool: ...

    def execute(self, batch: ScheduledBatch, /) -> StepOutput:
        """Start a batch (an empty one: only see to what is pending); return finished results.

        May raise: then the requests of this batch fail, and those of the one before unless it
        is still pending.
        """

    def has_pending_outputs(self) -> bool:
        """Whether the last batch's results are still to come, with the next call."""

    def spec_decode_metrics(self) -> SpeculativeDecodingMetrics | None:
        """What became of drafted tokens; None without a draft model."""

    def graph_figures(self) -> GraphFigures | None:
        """How often decoding was replayed; None where it is not captured."""

    def is_alive(self) -> bool:
        """Whether further steps can run after one that raised."""

    def release(self, request_id: str, /) -> None:
        """Forget a request that has ended; harmless when nothing is known of it."""


class StepHook(Protocol):
    """Work that shares the engine thread with the model (the audio decoder)."""

    poll_s: float
    """How long to sleep after a turn with more to do, while the model has nothing to do: where
    another device does the work. 0: not at all."""

    def after_step(self) -> bool:
        """Called after each step and when woken; True when there may be more to do: the loop goes
        on, after `poll_s`.
        """

    def on_stop(self) -> None:
        """Called once, when the loop has ended and every request has had its last chunk."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counters count from the start."""

    running: int  # sequences that decode or are being encoded
    decoding: int  # of them past their prompt
    waiting: int  # sequences that wait for prefill, new ones in the inbox included
    paused: int
    used_pages: int  # held by requests
    cached_pages: int  # kept for their prefix only
    total_pages: int
    host_pages: int  # of the prefix cache, in host memory
    pages_to_host: int  # copied
    pages_from_host: int
    preemptions: int
    prefix_hit_tokens: int  # prompt tokens that were not computed again
    prefix_miss_tokens: int
    steps: int
    failed_steps: int
    input_tokens: int  # fed, all steps together
    empty_steps: int  # without a row, for `execute_empty_batches`
    batches: tuple[BatchFigures, ...]  # by kind of batch
    sequences: SequenceFigures
    turn_s: float = 0.0  # how long the turn that runs has taken; 0 while the engine sleeps
    speculative: SpeculativeDecodingMetrics | None = None  # None without a draft model
    graphs: GraphFigures | None = None  # None where decoding is not captured


class TokenStream:
    """Handle of a submitted request; without a sink also a blocking iterator over its chunks."""

    def __init__(self, request_id: str, cancel: Callable[[str], None], buffered: bool) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._chunks: queue.SimpleQueue[TokenChunk] | None = None
        if buffered:
            self._chunks = queue.SimpleQueue()
        self._has_ended = False

    def put(self, chunk: TokenChunk) -> None:
        """Called by the engine."""
        if self._chunks is not None:
            self._chunks.put(chunk)

    def cancel(self) -> None:
        """Ask the engine to end the request; its last chunk still comes."""
        self._cancel(self.request_id)

    def __iter__(self) -> Iterator[TokenChunk]:
        return self

    def __next__(self) -> TokenChunk:
        if self._chunks is None:
            raise RuntimeError("this request's chunks go to its sink")
        if self._has_ended:
            raise StopIteration
        chunk = self._chunks.get()
        self._has_ended = chunk.finish_reason is not None
        return chunk
