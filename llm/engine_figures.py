"""`BatchFigures`: what the engine's steps were like, by the kind of batch.

A step's time is from the call that brought its results: under overlap that is the call which
launched the next batch, so a time stands with the batch that was waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm.batch import ForwardMode, ScheduledBatch
from llm.scheduler.figures import ROW_BOUNDS, STEP_BOUNDS_S, TOKEN_BOUNDS, Histogram, Tally


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """All batches of one kind since the start; each histogram has an observation per batch."""

    mode: ForwardMode
    rows: Histogram
    input_tokens: Histogram  # fed
    context_tokens: Histogram  # in the KV cache once the step has run
    schedule_s: Histogram  # to decide on the batch
    execute_s: Histogram  # to run it; failed steps are not among these


class _Kind:
    def __init__(self, mode: ForwardMode) -> None:
        self.mode = mode
        self.rows = Tally(ROW_BOUNDS)
        self.input_tokens = Tally(TOKEN_BOUNDS)
        self.context_tokens = Tally(TOKEN_BOUNDS)
        self.schedule_s = Tally(STEP_BOUNDS_S)
        self.execute_s = Tally(STEP_BOUNDS_S)

    def snapshot(self) -> BatchFigures:
        return BatchFigures(
            self.mode,
            self.rows.snapshot(),
            self.input_tokens.snapshot(),
            self.context_tokens.snapshot(),
            self.schedule_s.snapshot(),
            self.execute_s.snapshot(),
        )


class StepCounters:
    """Counts steps as they happen. Written on the engine thread, read on any."""

    def __init__(self) -> None:
        modes = (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED)
        self._kinds: dict[ForwardMode, _Kind] = {mode: _Kind(mode) for mode in modes}
        self.steps = 0
        self.failed_steps = 0
        self.empty_steps = 0
        self.input_tokens = 0

    def scheduled(self, batch: ScheduledBatch, seconds: float) -> None:
        """A batch was decided on, in so many seconds."""
        kind, num_tokens = self._kinds[batch.mode], batch.num_tokens
        self.steps += 1
        self.input_tokens += num_tokens
        kind.rows.observe(len(batch.rows))
        kind.input_tokens.observe(num_tokens)
        kind.context_tokens.observe(num_tokens + sum([row.start for row in batch.rows]))
        kind.schedule_s.observe(seconds)

    def executed(self, batch: ScheduledBatch, seconds: float) -> None:
        """A batch's results are here, after a call of so many seconds."""
        self._kinds[batch.mode].execute_s.observe(seconds)

    def snapshot(self) -> tuple[BatchFigures, ...]:
        """Figures of every kind of batch."""
        return tuple(kind.snapshot() for kind in self._kinds.values())
