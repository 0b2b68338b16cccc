"""Statistics of the scheduler and the engine, as values that any metrics library can export.

`Histogram` is a frozen snapshot of a `HistogramCounter`. Counting happens on one thread, snapshots
can be taken on any.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from llm.batch import ForwardMode, ScheduledBatch
from llm.request import FinishReason

ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKEN_BOUNDS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
STEP_BOUNDS_S = (
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
)
CANCEL_BOUNDS_S = (5e-4, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 8e-3, 0.01, 0.015, 0.025, 0.1, 1.0)
WAIT_BOUNDS_S = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Number of observations at most each bound and above the previous one.

    `counts` has one more entry than `bounds`, for observations above all of them; `total` is the
    sum of the observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


class HistogramCounter:
    """Counts observations by size."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that was observed `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> Histogram:
        """Return a snapshot of the counts."""
        return Histogram(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """Statistics of the requests."""

    finished: Mapping[FinishReason, int]
    first_token_s: Histogram  # from submission
    token_gap_s: Histogram  # between two tokens of a request, or two of its multi-step turns
    cancel_s: Histogram  # from the cancellation of a running request until its pages are free


class SequenceCounters:
    """Counters behind `SequenceStats`, owned by the scheduler."""

    def __init__(self) -> None:
        self.finished = dict.fromkeys(FinishReason, 0)
        self.first_token_s = HistogramCounter(WAIT_BOUNDS_S)
        self.token_gap_s = HistogramCounter(STEP_BOUNDS_S)
        self.cancel_s = HistogramCounter(CANCEL_BOUNDS_S)

    def snapshot(self) -> SequenceStats:
        """Return a snapshot of the counts."""
        return SequenceStats(
            dict(self.finished),
            self.first_token_s.snapshot(),
            self.token_gap_s.snapshot(),
            self.cancel_s.snapshot(),
        )


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Statistics of all batches of one kind since the start; one observation per batch.

    The time of a step is that of the call that returned its results. With overlap that call also
    launched the next batch, so the time is counted for the batch that was waited for.
    """

    mode: ForwardMode
    rows: Histogram
    input_tokens: Histogram  # tokens fed
    context_tokens: Histogram  # tokens in the KV cache after the step
    schedule_s: Histogram  # time to plan the batch
    execute_s: Histogram  # time to run the batch; failed steps are not counted


class _Kind:
    def __init__(self, mode: ForwardMode) -> None:
        self.mode = mode
        self.rows = HistogramCounter(ROW_BOUNDS)
        self.input_tokens = HistogramCounter(TOKEN_BOUNDS)
        self.context_tokens = HistogramCounter(TOKEN_BOUNDS)
        self.schedule_s = HistogramCounter(STEP_BOUNDS_S)
        self.execute_s = HistogramCounter(STEP_BOUNDS_S)

    def snapshot(self) -> BatchStats:
        return BatchStats(
            self.mode,
            self.rows.snapshot(),
            self.input_tokens.snapshot(),
            self.context_tokens.snapshot(),
            self.schedule_s.snapshot(),
            self.execute_s.snapshot(),
        )


class StepCounters:
    """Counts steps. Written on the engine thread, read on any thread."""

    def __init__(self) -> None:
        modes = (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED)
        self._kinds: dict[ForwardMode, _Kind] = {mode: _Kind(mode) for mode in modes}
        self.steps = 0
        self.failed_steps = 0
        self.empty_steps = 0
        self.input_tokens = 0

    def scheduled(self, batch: ScheduledBatch, seconds: float) -> None:
        """Count a batch that was planned in `seconds`."""
        kind, num_tokens = self._kinds[batch.mode], batch.num_tokens
        self.steps += 1
        self.input_tokens += num_tokens
        kind.rows.observe(len(batch.rows))
        kind.input_tokens.observe(num_tokens)
        kind.context_tokens.observe(num_tokens + sum(batch.columns.start))
        kind.schedule_s.observe(seconds)

    def executed(self, batch: ScheduledBatch, seconds: float) -> None:
        """Count a batch whose results arrived after a call of `seconds`."""
        self._kinds[batch.mode].execute_s.observe(seconds)

    def snapshot(self) -> tuple[BatchStats, ...]:
        """Return the statistics of every kind of batch."""
        return tuple(kind.snapshot() for kind in self._kinds.values())
