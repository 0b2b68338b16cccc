"""`Scheduler`: schedule (decide), commit (results), fail (error).

schedule() ──ScheduledBatch──> pipeline ──StepOutput──> commit() ──> TokenChunks
    one batch at a time; sequences in it can be cancelled and paused, which
    takes effect when it is committed

With `plan_ahead` the next batch may be scheduled once the running one is `launched`, before its
results have arrived: see `StepsInFlight`.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from llm.batch import ScheduledBatch, ScheduledRow, StepOutput, first_tokens
from llm.kv_cache.manager import KVCacheManager
from llm.request import FinishReason, Token, TokenChunk, TokenLogprob
from llm.scheduler.limits import ResolvedLimits, SchedulerConfig
from llm.scheduler.planner import BatchPlanner, Step
from llm.scheduler.table import SequenceTable
from llm.sequence import (
    ReceivedPrompt,
    Sequence,
    SequenceStatus,
    TakenTokens,
    launch_sampling,
    take_awaited,
    take_tokens,
)
from llm.stats import SequenceCounters, SequenceStats

UNPAUSABLE = (SequenceStatus.PAUSED, SequenceStatus.ENDING)
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class Scheduler:
    """Decides which requests run, and is the only one to change sequences and pages. Not
    thread-safe.

    `max_seq_len` is the model's limit. `enable_in_flight_batching` (None: as configured) puts
    decode rows and prompts into one batch. `plan_ahead` allows a second batch in flight.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_manager: KVCacheManager,
        *,
        max_seq_len: int | None = None,
        enable_in_flight_batching: bool | None = None,
        plan_ahead: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = ResolvedLimits.create(
            config, max_seq_len=max_seq_len, in_flight_batching=enable_in_flight_batching
        )
        self._kv = kv_manager
        self._clock = clock
        self._table = SequenceTable()
        self._planner = BatchPlanner(self._limits, kv_manager, self._table, clock)
        self._in_flight = StepsInFlight(kv_manager, limit=2 if plan_ahead else 1)
        self._ended: list[TokenChunk] = []
        self._counters = SequenceCounters()

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self._limits.max_length

    @property
    def max_batch_size(self) -> int:
        """Maximum number of rows of a batch."""
        return self._limits.max_batch_size

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._table)

    @property
    def num_waiting(self) -> int:
        """Sequences in the pending queue."""
        return len(self._table.pending)

    @property
    def num_running(self) -> int:
        """Sequences that decode or are in prefill."""
        table = self._table
        return len(table.decoding) + len(table.prefilling) + len(table.ending)

    @property
    def num_decoding(self) -> int:
        """Sequences past their prompt, without paused ones."""
        return len(self._table.decoding) + len(self._table.ending)

    @property
    def num_paused(self) -> int:
        """Number of paused sequences."""
        return len(self._table.paused)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions since the start."""
        return self._planner.num_preemptions

    @property
    def delay_s(self) -> float:
        """Seconds until a delayed prefill may start, after `schedule` returned nothing; 0 without
        one.
        """
        return max(self._planner.policy.delay_s, 0.0)

    def stats(self) -> SequenceStats:
        """Return statistics of the sequences so far: their ends and the times between their
        tokens.
        """
        return self._counters.snapshot()

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence by priority and arrival; one with pages in front, or to decode if it
        has its first token.
        """
        sequence.limit_length(self._limits.max_length)
        received, sequence.received = sequence.received, None
        if received is None:
            self._table.add(sequence)
        else:
            self._add_received(sequence, received)

    def _add_received(self, sequence: Sequence, received: ReceivedPrompt) -> None:
        kv, request_id, now = self._kv, sequence.request_id, self._clock()
        num_tokens = received.num_tokens
        kv.adopt(received.name, request_id, sequence.tokens, num_tokens, received.num_pages)
        reason = sequence.receive(kv.pages(request_id), received)
        sequence.next_commit = (num_tokens // kv.page_size + 1) * kv.page_size
        if received.token is not None:
            sequence.mark_scheduled(now)
            self._mark_first_token(sequence, now)
            sequence.token_s = now
        self._table.add(sequence)
        # The context of decoding rows is not limited: prompts are admitted by it.
        limits, num_decoding = self._limits, len(self._table.decoding)
        may_decode = limits.max_total_tokens is None and num_decoding < limits.max_decoding
        if received.token is not None and may_decode:
            self._table.decode(sequence)
        else:
            sequence.extend_end = sequence.end  # it is fed like the end of a prompt
            self._table.queue_in_front(sequence)
        if reason is not None:
            self._ended.append(self._finish(sequence, reason, now))

    def cancel(self, request_id: str, asked_s: float | None = None) -> list[TokenChunk]:
        """End a sequence in any state; return its last chunk. `asked_s`: time of the request to
        cancel.

        Returns nothing for an unknown id (it may have just ended), or for a sequence of a batch
        that was not launched: `commit` or `fail` returns its last chunk.
        """
        sequence = self._table.get(request_id)
        if sequence is None:
            return []
        sequence.cancel_asked_s = self._clock() if asked_s is None else asked_s
        if sequence.is_active:
            sequence.cancel_requested = True
            return []
        return [self._finish(sequence, FinishReason.CANCELLED, self._clock())]

    def cancel_all(self) -> list[TokenChunk]:
        """Cancel every sequence."""
        request_ids = [sequence.request_id for sequence in self._table]
        return [chunk for request_id in request_ids for chunk in self.cancel(request_id)]

    def pause(self, request_id: str) -> None:
        """Stop scheduling a sequence. It keeps its pages until other sequences need them."""
        sequence = self._table.get(request_id)
        if sequence is None or sequence.status in UNPAUSABLE:
            return
        if sequence.is_active:
            sequence.pause_requested = True
        else:
            self._table.pause(sequence)

    def resume(self, request_id: str) -> None:
        """Schedule a paused sequence again."""
        sequence = self._table.get(request_id)
        if sequence is None:
            return
        sequence.pause_requested = False
        if request_id in self._table.paused:
            self._table.resume(sequence)

    def schedule(self) -> ScheduledBatch:
        """Return the next batch; empty when nothing can run before the running batch has ended.

        Commit or fail it before the next call; when planning ahead, launch it.
        """
        num_in_flight = self._in_flight.check_room()
        step = self._planner.plan(ahead=num_in_flight > 0)
        if self._planner.failed:
            now = self._clock()
            for sequence, message in self._planner.failed:
                self._ended.append(self._finish(sequence, FinishReason.ERROR, now, error=message))
            self._planner.failed.clear()
        if step.sequences:
            self._in_flight.add(step)
        return step.batch

    def launched(self, batch: ScheduledBatch) -> None:
        """Mark a batch as running, so that the next one can be planned before its results arrive.

        Placeholders stand for its tokens. Commit the previous batch first.
        """
        step = self._in_flight.newest(batch)
        step.is_launched = True
        for place in launch_sampling(step.sequences):
            row, sequence = batch.rows[place], step.sequences[place]
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.launch(row.generates)
            if sequence.on_launched is not None and row.samples:
                on_launched, sequence.on_launched = sequence.on_launched, None
                on_launched(sequence.pages)
            if sequence.cancel_requested:
                self._ended.append(self._finish(sequence, FinishReason.CANCELLED, self._clock()))
            elif sequence.is_ending:
                self._table.end(sequence)
            else:
                self._place(sequence)

    def take_ended(self) -> list[TokenChunk]:
        """Return the last chunks of sequences that `schedule` found unable to run; each is returned
        once.
        """
        ended, self._ended = self._ended, []
        return ended

    def commit(
        self, batch: ScheduledBatch, output: StepOutput, now: float | None = None
    ) -> list[TokenChunk]:
        """Commit a step's results: advance, append, stop. Returns the new chunks.

        `now` is the time of the scheduler's clock.
        """
        step = self._in_flight.take(batch)
        if now is None:
            now = self._clock()
        taken: TakenTokens = [], range(len(step.sequences)), []
        if not (output.logprobs or output.failures or output.prompt_logprobs):
            if step.is_launched:
                names = batch.columns.request_id
                tokens = first_tokens(output.token_ids, names)
                taken = take_awaited(step.sequences, tokens, now)
                left = [(names[n], t) for n in taken[1] if (t := tokens[n]) is not None]
                output = replace(output, token_ids={name: (t,) for name, t in left})
            else:
                taken = take_tokens(step.sequences, output.token_ids, now)
        chunks, places, gaps = taken
        for last_s, times in gaps:
            if last_s is not None:
                self._counters.token_gap_s.observe(now - last_s, times)
        for place in places:
            row, sequence = batch.rows[place], step.sequences[place]
            chunk = self._commit_row(row, sequence, step, output, now)
            if chunk is not None:
                chunks.append(chunk)
        if self._in_flight.ended:
            self._note_released(self._in_flight.release_ended(step))
        return chunks

    def _commit_row(
        self, row: ScheduledRow, sequence: Sequence, step: Step, output: StepOutput, now: float
    ) -> TokenChunk | None:
        if step.is_launched:
            sequence.complete_launch()
        else:
            sequence.advance()
        if sequence.status is SequenceStatus.FINISHED:
            return None  # the sequence ended after launch; discard its result
        echoed: tuple[TokenLogprob, ...] = ()
        if entries := output.prompt_logprobs.get(row.request_id):
            echoed = sequence.take_echo(entries, row.start)
        chunk = None
        if sequence.cancel_requested:
            chunk = self._finish(sequence, FinishReason.CANCELLED, now)
        elif vectors := output.embeddings.get(row.request_id):
            chunk = self._finish(sequence, FinishReason.STOP, now)._replace(embeddings=vectors)
        elif row.samples:
            chunk = self._accept(sequence, step, output, now)
        else:
            self._settle(sequence, step)
        if echoed:
            chunk = (chunk or sequence.chunk(now))._replace(prompt_logprobs=echoed)
        return chunk

    def fail(
        self, batch: ScheduledBatch, message: str, now: float | None = None
    ) -> list[TokenChunk]:
        """End every sequence of a batch whose step raised; return their last chunks.

        An older batch that is still running continues.
        """
        step = self._in_flight.take_failed(batch)
        if now is None:
            now = self._clock()
        chunks = []
        for row, sequence in step.pairs():
            if step.is_launched:
                sequence.complete_launch()
                # The fed tokens have no KV.
                sequence.processed = min(sequence.processed, row.start)
            else:
                sequence.rewind()
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if sequence.cancel_requested:
                chunks.append(self._finish(sequence, FinishReason.CANCELLED, now))
            else:
                chunks.append(self._finish(sequence, FinishReason.ERROR, now, error=message))
        self._note_released(self._in_flight.release_ended(step))
        return chunks

    def _accept(
        self, sequence: Sequence, step: Step, output: StepOutput, now: float
    ) -> TokenChunk | None:
        """Append a row's sampled tokens, up to the one that ends the sequence."""
        sampled = output.token_ids.get(sequence.request_id)
        message = output.failures.get(sequence.request_id, "")
        if message or not sampled:
            error = message or "the model returned no token for this request"
            chunk = self._finish(sequence, FinishReason.ERROR, now, error=error)
            return chunk._replace(is_refused=bool(message))
        if sequence.token_s is None:
            self._mark_first_token(sequence, now)
        else:
            self._counters.token_gap_s.observe(now - sequence.token_s)
        sequence.token_s = now
        logprobs = output.logprobs.get(sequence.request_id, ()) if output.logprobs else ()
        num_accepted, reason = 0, None
        for token in sampled:
            reason = sequence.accept(token)
            if reason is FinishReason.STOP:
                break
            num_accepted += 1
            if reason is not None:
                break
        if len(sampled) > 1:  # each of these tokens was fed to sample the next one
            num_sampled = num_accepted + (reason is FinishReason.STOP)
            sequence.processed = sequence.active_end = sequence.processed + num_sampled - 1
        token_ids, logprobs = sampled[:num_accepted], logprobs[:num_accepted]
        if not sequence.stop_ids.isdisjoint(token_ids):
            token_ids, logprobs = _without(sequence.stop_ids, token_ids, logprobs)
        if reason is not None:
            return self._finish(sequence, reason, now, token_ids=token_ids, logprobs=logprobs)
        self._settle(sequence, step)
        return sequence.chunk(now, token_ids, logprobs) if token_ids else None

    def _mark_first_token(self, sequence: Sequence, now: float) -> None:
        sequence.mark_first_token(now)
        self._counters.first_token_s.observe(now - sequence.arrival_s)

    def _settle(self, sequence: Sequence, step: Step) -> None:
        """Continue a sequence after a step: cache its full pages and update its place."""
        if sequence.processed >= sequence.next_commit:
            page_size = self._kv.page_size
            self._kv.commit(sequence.request_id, sequence.tokens, sequence.processed)
            sequence.next_commit = (sequence.processed // page_size + 1) * page_size
        if not step.is_launched:
            self._place(sequence)

    def _place(self, sequence: Sequence) -> None:
        if sequence.pause_requested:
            sequence.pause_requested = False
            self._table.pause(sequence)
        elif sequence.status is SequenceStatus.PREFILLING:
            if sequence.needs_extend:
                self._table.queue_in_front(sequence)
            else:
                self._table.decode(sequence)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        token_ids: tuple[Token, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str = "",
    ) -> TokenChunk:
        """Free everything that a sequence holds, remove it and return its last chunk."""
        sequence.drop_future()
        if sequence.pages:
            self._planner.adapters.leave(sequence.lora)
        if sequence.pages and sequence.in_flight:
            self._in_flight.defer_release(sequence)
        elif sequence.pages:
            known = (sequence.tokens, sequence.processed)
            if sequence.kept_as and reason in COMPLETE:
                self._kv.keep(sequence.request_id, sequence.kept_as, *known)
            else:
                self._kv.release(sequence.request_id, *known)
            sequence.pages = ()
            self._note_released([sequence])
        self._table.discard(sequence)
        self._counters.finished[reason] += 1
        chunk = sequence.chunk(now, token_ids, logprobs)
        return chunk._replace(finish_reason=reason, error=error)

    def _note_released(self, ended: list[Sequence]) -> None:
        """Record the cancellation times of sequences whose pages have been freed."""
        for sequence in ended:
            if sequence.cancel_asked_s is not None:
                self._counters.cancel_s.observe(self._clock() - sequence.cancel_asked_s)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless places, indices, claims, pages and locks are consistent."""
        self._table.check_integrity()
        self._kv.check_integrity()
        self._planner.adapters.check_integrity(self._table)
        counts = self._in_flight.counts()
        for sequence in self._table:
            sequence.check_integrity(self._kv.page_size)
            request_id = sequence.request_id
            if sequence.in_flight != counts[sequence]:
                raise AssertionError(f"{sequence!r}: does not match the running batches")
            if self._kv.has_claim(request_id) != bool(sequence.pages):
                raise AssertionError(f"{sequence!r}: does not match the KV manager")
        num_holders = sum(bool(sequence.pages) for sequence in self._table)
        if self._kv.num_claims != num_holders + len(self._in_flight.ended) + self._kv.num_transfers:
            raise AssertionError(f"{self!r}: pages of a request that has ended")

    def __repr__(self) -> str:
        return (
            f"Scheduler({self._in_flight!r}, {self._table!r}, {self._kv!r}, "
            f"{self.num_preemptions} preemptions)"
        )


def _without(
    stop_ids: frozenset[Token], token_ids: tuple[Token, ...], logprobs: tuple[TokenLogprob, ...]
) -> tuple[tuple[Token, ...], tuple[TokenLogprob, ...]]:
    """Leave out stop ids under `ignore_eos`: they are counted, but not delivered."""
    kept = [index for index, token in enumerate(token_ids) if token not in stop_ids]
    kept_logprobs = tuple(logprobs[index] for index in kept) if logprobs else ()
    return tuple(token_ids[index] for index in kept), kept_logprobs


class StepsInFlight:
    """Steps that are not committed yet, in the order of scheduling, which is that of commits."""

    def __init__(self, kv_manager: KVCacheManager, limit: int) -> None:
        self._kv = kv_manager
        self._limit = limit
        self._steps: deque[Step] = deque()
        self.ended: dict[Sequence, str] = {}
        """Ended sequences whose pages a step still writes to, with the names of their claims."""
        self._departures = itertools.count()

    def check_room(self) -> int:
        """Return the number of steps; raise `RuntimeError` when no further one may be planned."""
        if len(self._steps) >= self._limit:
            raise RuntimeError("the last batch was neither committed nor failed")
        if self._steps and not self._steps[-1].is_launched:
            raise RuntimeError("the last batch was not launched")
        return len(self._steps)

    def add(self, step: Step) -> None:
        """Add a step that was planned."""
        self._steps.append(step)

    def newest(self, batch: ScheduledBatch) -> Step:
        """Return the step of a batch that is about to be launched."""
        if not self._steps or self._steps[-1].batch is not batch:
            raise RuntimeError("this batch is not the last one scheduled")
        return self._steps[-1]

    def take(self, batch: ScheduledBatch) -> Step:
        """Remove and return the step of a batch that has ended, which must be the oldest."""
        if not self._steps or self._steps[0].batch is not batch:
            raise RuntimeError("this batch is not the running one")
        return self._steps.popleft()

    def take_failed(self, batch: ScheduledBatch) -> Step:
        """Remove and return the step of a failed batch, also while an older one still runs."""
        for step in self._steps:
            if step.batch is batch:
                self._steps.remove(step)
                return step
        raise RuntimeError("this batch is not a running one")

    def defer_release(self, sequence: Sequence) -> None:
        """Defer the release of a sequence that has ended but is part of a step. Its id is free at
        once.
        """
        name = f"{sequence.request_id}/departed-{next(self._departures)}"
        self._kv.rename(sequence.request_id, name)
        self.ended[sequence] = name

    def release_ended(self, step: Step) -> list[Sequence]:
        """Free the pages of ended sequences that no step holds any more; return those sequences."""
        released: list[Sequence] = []
        for sequence in step.sequences:
            if not sequence.in_flight and sequence in self.ended:
                name = self.ended.pop(sequence)
                self._kv.release(name, sequence.tokens, sequence.processed)
                sequence.pages = ()
                released.append(sequence)
        return released

    def counts(self) -> Counter[Sequence]:
        """Return the number of steps that hold each sequence."""
        return Counter(sequence for step in self._steps for sequence in step.sequences)

    def __repr__(self) -> str:
        rows = " + ".join(str(len(step.sequences)) for step in self._steps)
        return f"{rows} rows running" if rows else "idle"
