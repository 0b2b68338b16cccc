"""`EngineSteps`: schedule, execute, commit, one step after the other.

schedule(n + 1) ─> execute(n + 1) ─> results of n + 1, or of n (overlap) ─> commit ─> deliver
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from llm.batch import ForwardMode, ScheduledBatch
from llm.engine.types import Pipeline
from llm.request import TokenChunk
from llm.scheduler import Scheduler
from llm.stats import StepCounters

logger = logging.getLogger(__name__)

EMPTY_BATCH_INTERVAL_S = 0.005  # interval of empty batches while the engine is idle


class EngineSteps:
    """The steps of the loop. Used on the engine thread; `counters` can be read on any thread.

    `deliver` passes chunks to the callers. With `runs_empty` the model also runs while there are no
    requests, because other ranks wait for it in a collective operation.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        scheduler: Scheduler,
        deliver: Callable[[list[TokenChunk]], None],
        *,
        runs_empty: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._deliver = deliver
        self._runs_empty = runs_empty
        self._in_flight: deque[ScheduledBatch] = deque()  # executed, not yet committed
        self.counters = StepCounters()

    def step(self) -> bool:
        """Run one step, which may commit the previous batch. Returns False when there was no work.

        Raises `RuntimeError` when a step failed and the device can no longer be used.
        """
        started_s = time.perf_counter()
        batch = self._scheduler.schedule()
        schedule_s = time.perf_counter() - started_s
        ended = self._scheduler.take_ended()
        self._deliver(ended)
        if not batch and not self._in_flight:
            if self._runs_empty and not ended:
                self._run_empty(batch)
            return bool(ended)
        if batch:
            self.counters.scheduled(batch, schedule_s)
            self._in_flight.append(batch)
        self._deliver(self._execute(batch))
        return True

    def flush(self) -> None:
        """Wait for the batches in flight: the device writes to their pages until then."""
        if self._in_flight:
            self._deliver(self._execute(ScheduledBatch((), ForwardMode.IDLE)))

    @property
    def idle_s(self) -> float | None:
        """Return the seconds until the next attempt after a step without work.

        None: wait for a command.
        """
        delay_s = self._scheduler.delay_s or None
        if not self._runs_empty:
            return delay_s
        return min(delay_s or EMPTY_BATCH_INTERVAL_S, EMPTY_BATCH_INTERVAL_S)

    def _run_empty(self, batch: ScheduledBatch) -> None:
        self.counters.empty_steps += 1
        try:
            self._pipeline.execute(batch)
        except Exception:
            self._runs_empty = False
            logger.exception("a step without rows failed; empty batches are switched off")

    def _execute(self, batch: ScheduledBatch) -> list[TokenChunk]:
        """Run a batch, commit the results that have arrived and let the scheduler continue."""
        chunks: list[TokenChunk] = []
        started_s = time.perf_counter()
        try:
            output = self._pipeline.execute(batch)
        except Exception as error:
            self._deliver(self._fail(f"the model failed: {error!r}"))
            if not self._pipeline.is_alive():
                raise RuntimeError("the device is lost") from error
            return chunks
        execute_s = time.perf_counter() - started_s
        while len(self._in_flight) > int(self._pipeline.has_pending_outputs()):
            done = self._in_flight.popleft()
            self.counters.executed(done, execute_s)
            chunks += self._scheduler.commit(done, output)
        if batch and self._in_flight:
            self._scheduler.launched(batch)
        return chunks

    def _fail(self, message: str) -> list[TokenChunk]:
        """Fail the last batch, and the one before it when its results are lost too."""
        self.counters.failed_steps += 1
        num_lost = len(self._in_flight) - int(self._pipeline.has_pending_outputs())
        kept = [self._in_flight.popleft() for _ in range(len(self._in_flight) - max(num_lost, 1))]
        chunks: list[TokenChunk] = []
        for batch in self._in_flight:
            logger.exception(
                "a step failed: %d rows, %d tokens fed, %d in context",
                len(batch.rows),
                batch.num_tokens,
                sum(row.context_len for row in batch.rows),
                extra={"fields": (("request_ids", [row.request_id for row in batch.rows]),)},
            )
            chunks += self._scheduler.fail(batch, message)
        self._in_flight = deque(kept)
        return chunks
