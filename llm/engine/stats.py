"""`BatchStats`: statistics of the engine's steps, by kind of batch.

The time of a step is that of the call that returned its results. With overlap that call also
launched the next batch, so the time is counted for the batch that was waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm.batch import ForwardMode, ScheduledBatch
from llm.stats import ROW_BOUNDS, STEP_BOUNDS_S, TOKEN_BOUNDS, Histogram, HistogramCounter


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Statistics of all batches of one kind since the start; one observation per batch."""

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
        kind.context_tokens.observe(num_tokens + sum([row.start for row in batch.rows]))
        kind.schedule_s.observe(seconds)

    def executed(self, batch: ScheduledBatch, seconds: float) -> None:
        """Count a batch whose results arrived after a call of `seconds`."""
        self._kinds[batch.mode].execute_s.observe(seconds)

    def snapshot(self) -> tuple[BatchStats, ...]:
        """Return the statistics of every kind of batch."""
        return tuple(kind.snapshot() for kind in self._kinds.values())
