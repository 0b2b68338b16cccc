"""Interfaces of the engine, to its pipeline and its hook, and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from llm.batch import ScheduledBatch, StepOutput
from llm.kv_cache.manager import KVCacheManager
from llm.request import FrameShape, Token, TokenChunk
from llm.runner.graphs.stats import GraphStats
from llm.speculative.metrics import SpeculativeDecodingMetrics
from llm.stats import BatchStats, SequenceStats

Sink = Callable[[TokenChunk], None]


class Pipeline(Protocol):
    """Interface that the engine requires of a model: one step at a time, and facts about its
    tokens.

    A pipeline may return the results of a batch at once or one call later (`has_pending_outputs`).
    With `overlap_active` it always does the latter, and the duration of a call is that of the last
    batch.
    """

    while_waiting: Callable[[Callable[[], bool]], object] | None
    """Called by `execute` before it waits for results of the device, with a function that returns
    whether they have arrived; set by the engine.
    """

    @property
    def kv_manager(self) -> KVCacheManager: ...
    @property
    def eos_token_ids(self) -> Collection[Token]: ...
    @property
    def frames(self) -> FrameShape | None: ...
    @property
    def media_ids(self) -> frozenset[int]: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    @property
    def overlap_active(self) -> bool: ...

    def hold(self, *, is_held: bool) -> None:
        """Have a running step wait between its layers, or continue."""

    def use_device(self) -> None:
        """Make the model's device the current one of the calling thread."""

    def execute(self, batch: ScheduledBatch, /) -> StepOutput:
        """Start a batch and return finished results; an empty batch only waits for pending results.

        When this raises, the requests of this batch fail; those of the previous batch fail too
        unless its results are still pending.
        """

    def has_pending_outputs(self) -> bool:
        """Whether the next call returns the results of the last batch."""

    def spec_decode_metrics(self) -> SpeculativeDecodingMetrics | None:
        """Return statistics of drafted tokens; None without a draft model."""

    def graph_stats(self) -> GraphStats | None:
        """Return the number of graph replays; None where decoding is not captured."""

    def is_alive(self) -> bool:
        """Whether further steps can run after a step that raised."""

    def release(self, request_id: str, /) -> None:
        """Free what is kept for a request that has ended; no effect for unknown ids."""


class StepHook(Protocol):
    """Work that shares the engine thread with the model (the audio decoder)."""

    poll_s: float
    """Seconds to sleep after a turn with pending work while the model is idle, for hooks whose work
    runs on another device. 0: do not sleep.
    """

    def after_step(self, num_tokens: int, /) -> bool:
        """Called after each step and after `wake`. `num_tokens`: of a sequence at most, in the
        results that have arrived since the last call; 0: none have.

        Returns True when more work may be pending: the loop continues after `poll_s`.
        """

    def may_wait(self, num_live: int, has_step: bool) -> bool:
        """Called before each step: whether none of the running requests needs its next token now,
        and the hook's own work has the device meanwhile. Then there is no step in this turn.

        There are `num_live` requests that have not ended. `has_step`: a step's results have not
        arrived yet, so that this turn waits for them.
        """

    def while_waiting(self, is_done: Callable[[], bool]) -> None:
        """Called before the wait for a step's results, to do other work until `is_done`."""

    def on_stop(self) -> None:
        """Called once, after the loop has ended and every request has received its last chunk."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counters count since the start of the engine."""

    running: int  # sequences that decode or are in prefill
    decoding: int  # the part of them that is past its prompt
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
    input_tokens: int  # tokens fed in all steps
    empty_steps: int  # steps without rows, for `execute_empty_batches`
    batches: tuple[BatchStats, ...]  # by kind of batch
    sequences: SequenceStats
    turn_s: float = 0.0  # duration of the current turn; 0 while the engine sleeps
    speculative: SpeculativeDecodingMetrics | None = None  # None without a draft model
    graphs: GraphStats | None = None  # None where decoding is not captured
    pages_received: int = 0  # of the prefix cache, computed by other engines
    pages_sent: int = 0
