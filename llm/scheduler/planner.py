"""`BatchPlanner`: which rows run next, and which sequences are preempted for them.

with in-flight batching  decode rows, then prompts with what the budget leaves
without                  prompts when it is their turn (`PrefillPolicy`); else decode rows, also
                         when no prompt could be added
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from llm.batch import ForwardMode, RowColumns, Rows, ScheduledBatch, ScheduledRow
from llm.kv_cache.manager import KVCacheManager
from llm.request import Token
from llm.scheduler.adapters import ActiveAdapters, AdapterAdmission
from llm.scheduler.limits import ResolvedLimits
from llm.scheduler.table import SequenceTable, entry_order
from llm.sequence import AWAITED, FUTURE_TOKEN, Sequence, SequenceStatus

logger = logging.getLogger(__name__)

PREEMPTION_LOG_INTERVAL_S = 1.0


class Step:
    """A batch with the sequences of its rows, because request ids may be reused before it ends.

    `BatchPlanner` fills it; afterwards `batch` has its rows.
    """

    batch: ScheduledBatch

    def __init__(self, budget: TokenBudget) -> None:
        self.budget = budget
        self.is_launched = False
        self.sequences: list[Sequence] = []
        self.fed: list[tuple[Token, ...]] = []  # of each sequence
        self.num_prompts = 0  # of the last sequences
        self.num_steps = 1
        self.is_plain = True

    def add_decode_rows(
        self,
        candidates: list[Sequence],
        page_size: int,
        grow: Callable[[Sequence, Step], bool],
    ) -> None:
        """Add a row for each sequence that has the pages, or can `grow`.

        This loop runs for all rows of all steps, so it avoids function calls.
        """
        sequences, fed, decoding = self.sequences, self.fed, SequenceStatus.DECODING
        num_steps, is_plain = self.num_steps, self.is_plain
        for sequence in candidates:
            if sequence.status is not decoding:
                continue  # its pages were taken by an older sequence
            start = sequence.processed
            if start + num_steps > len(sequence.pages) * page_size:
                if not grow(sequence, self):
                    continue
                num_steps = self.num_steps
            sequence.active_end = start + 1
            sequence.in_flight += 1
            is_plain = is_plain and sequence.is_plain
            last = sequence.tokens[-1]
            fed.append(AWAITED if last == FUTURE_TOKEN else (last,))
            sequences.append(sequence)
        self.is_plain = is_plain

    def add_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.activate(num_tokens)
        self.fed.append(tuple(sequence.tokens[sequence.processed : sequence.active_end]))
        self.sequences.append(sequence)
        self.num_prompts += 1
        self.is_plain = self.is_plain and sequence.is_plain

    def finish(self) -> Step:
        """Make the batch of the rows."""
        if not self.sequences:
            mode = ForwardMode.IDLE
        elif not self.num_prompts:
            mode = ForwardMode.DECODE
        elif self.num_prompts < len(self.sequences):
            mode = ForwardMode.MIXED
        else:
            mode = ForwardMode.EXTEND
        num_steps = 1 if self.num_prompts else self.num_steps
        self.batch = ScheduledBatch(Rows(self._columns()), mode, num_steps, self.is_plain)
        return self

    def _columns(self) -> RowColumns:
        rows, num_decoding = self.sequences, len(self.sequences) - self.num_prompts
        prompts = rows[num_decoding:]
        return RowColumns(
            request_id=tuple([row.request_id for row in rows]),
            token_ids=tuple(self.fed),
            start=tuple([row.processed for row in rows]),
            pages=tuple([row.pages for row in rows]),
            is_extend=(False,) * num_decoding + (True,) * len(prompts),
            samples=(True,) * num_decoding + tuple([p.active_end == p.extend_end for p in prompts]),
            sampling=tuple([row.sampling for row in rows]),
            output_ids=tuple([row.output_ids for row in rows]),
            lora=tuple([row.lora for row in rows]),
            embeds=(False,) * num_decoding + tuple([p.request.embeds for p in prompts]),
        )

    def pairs(self) -> zip[tuple[ScheduledRow, Sequence]]:
        """Return pairs of rows and sequences."""
        return zip(self.batch.rows, self.sequences, strict=True)


class BatchPlanner:
    """Fills batches from a table of sequences; claims pages and preempts."""

    def __init__(
        self,
        limits: ResolvedLimits,
        kv_manager: KVCacheManager,
        table: SequenceTable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._kv = kv_manager
        self._table = table
        self._clock = clock
        self._logged_s = float("-inf")
        self._ahead = False
        fitting = kv_manager.total_pages * kv_manager.page_size
        self._longest = min(fitting, limits.max_total_tokens or fitting)  # that can ever run
        self.policy = PrefillPolicy(limits, table, clock)
        self.adapters = ActiveAdapters()
        self.num_preemptions = 0
        # Sequences that can never run, with the reason; the caller ends them.
        self.failed: list[tuple[Sequence, str]] = []

    def plan(self, *, ahead: bool = False) -> Step:
        """Return the next step. Its batch is empty when nothing can run, or while a prefill waits
        for more requests.

        `ahead`: a batch is running. Then no sequence of it is preempted and none fails for lack of
        pages: where that could be necessary the batch is empty, and is planned again when nothing
        runs.
        """
        self._ahead = ahead
        policy, step = self.policy, Step(TokenBudget(self._limits, self._kv.page_size))
        if ahead and not self._pages_suffice():
            return step.finish()
        can_prefill = policy.can_prefill()
        if self._limits.in_flight_batching:
            self._add_decode_rows(step, policy.decode_order())
            decoded_all = True
            if can_prefill:
                self._add_prompts(step)
        else:
            first = policy.first_decode()
            if can_prefill and not first:
                self._add_prompts(step)
            decoded_all = not step.sequences and not first
            if not step.sequences:
                self._add_decode_rows(step, first or policy.decode_order())
        prompts = step.sequences[len(step.sequences) - step.num_prompts :]
        policy.planned(prompts, decoded_all)
        return step.finish()

    def _add_decode_rows(self, step: Step, in_order: Iterable[Sequence]) -> None:
        candidates = list(itertools.islice(in_order, self._limits.max_batch_size))
        if not candidates:
            return
        if self._limits.max_num_steps > 1:
            step.num_steps = self._num_steps(candidates)
        step.add_decode_rows(candidates, self._kv.page_size, self._grow)
        budget = step.budget
        budget.active_tokens += len(step.sequences)
        if self._limits.max_total_tokens is not None:
            costs = (budget.context_cost(row.active_end) for row in step.sequences)
            budget.context_tokens += sum(costs)

    def _pages_suffice(self) -> bool:
        """Whether every decoding row can have its next page."""
        page_size, missing = self._kv.page_size, 0
        if len(self._table.decoding) <= self._kv.available_pages:
            return True
        for sequence in self._table.decoding.values():
            missing += len(sequence.tokens) > len(sequence.pages) * page_size
        return missing <= self._kv.available_pages

    def _num_steps(self, candidates: list[Sequence]) -> int:
        most = self._limits.max_num_steps
        room = min(self._limits.max_length - sequence.processed for sequence in candidates)
        useful = max(sequence.remaining_tokens for sequence in candidates)
        return max(1, min(most, room, useful))

    def _grow(self, sequence: Sequence, step: Step) -> bool:
        """Claim pages for the row's tokens, preempting younger sequences if necessary."""
        request_id, num_tokens = sequence.request_id, len(sequence.tokens)
        if self._kv.extend(request_id, num_tokens + step.num_steps - 1):
            return True
        step.num_steps = 1  # a shorter turn costs less than a preemption
        while not self._kv.extend(request_id, num_tokens):
            victim = next(self._victims(for_decode=sequence), None)
            if victim is not None:
                self._preempt(victim)
                continue
            if not step.sequences and not self._ahead and not self._kv.num_transfers:
                self._fail(sequence)
            return False
        return True

    def _add_prompts(self, step: Step) -> None:
        """Add prompts, from the front of the queue on, as long as there are rows and tokens."""
        pending, budget, limits = self._table.pending, step.budget, self._limits
        adapters = None  # any adapters may run
        if limits.max_adapters is not None:
            active, now = self.adapters.names, self._clock()
            adapters = AdapterAdmission(limits.max_adapters, active, pending, now)
        num_free = limits.max_batch_size - len(step.sequences)
        room = min(num_free, limits.max_decoding - len(self._table.decoding))
        while step.num_prompts < room and (adapters.skip_waiting() if adapters else pending):
            sequence = pending.peek()
            num_tokens = len(sequence.tokens)
            if num_tokens > self._longest:
                self._fail(sequence)
                continue
            # At least one token is fed, however much of the prompt is cached.
            if budget.decide(1, num_tokens) is BudgetDecision.EXHAUSTED:
                break
            if not sequence.pages and not self._claim(sequence, step):
                break
            self._table.prefill_next()
            sequence.mark_scheduled(self._clock())
            num_left = sequence.extend_end - sequence.processed
            decision = budget.decide(num_left, num_tokens)
            step.add_prompt(sequence, budget.take(num_left, num_tokens))
            if decision is not BudgetDecision.AVAILABLE:
                break
        if adapters is not None:
            adapters.close()

    def _claim(self, sequence: Sequence, step: Step) -> bool:
        """Claim pages for all known tokens. The watermark does not apply when no sequence is
        active.
        """
        is_idle = not (step.sequences or self._table.decoding or self._ahead)
        watermark = 1.0 if is_idle else self._limits.watermark
        num_hits = self._try_claim(sequence, watermark)
        if num_hits is None:
            victims = self._victims() if is_idle else self._paused_holders()
            reclaimable = list(victims)
            room = self._kv.room(watermark) + sum(len(victim.pages) for victim in reclaimable)
            if room < self._kv.pages_for(len(sequence.tokens)):
                return False
            for victim in reclaimable:
                self._preempt(victim)
                num_hits = self._try_claim(sequence, watermark)
                if num_hits is not None:
                    break
        if num_hits is None:
            return False
        sequence.bind(self._kv.pages(sequence.request_id), num_hits)
        sequence.next_commit = num_hits + self._kv.page_size
        if sequence.lora:
            self.adapters.take(sequence.lora)
        return True

    def _try_claim(self, sequence: Sequence, watermark: float) -> int | None:
        return self._kv.claim(
            sequence.request_id,
            sequence.tokens,
            cache_salt=sequence.request.cache_namespace,
            watermark=watermark,
            # A cached token has neither logits nor a vector.
            reads_cache=not (sequence.sampling.echo or sequence.request.embeds),
        )

    def _paused_holders(self) -> Iterator[Sequence]:
        """Iterate over paused sequences with pages, longest paused first."""
        paused = self._table.paused.values()
        return (sequence for sequence in paused if sequence.pages and not sequence.in_flight)

    def _victims(self, for_decode: Sequence | None = None) -> Iterator[Sequence]:
        """Iterate over the candidates for preemption: paused, in prefill, decoding but not in the
        batch.
        """
        yield from self._paused_holders()
        yield from (holder for holder in self._table.pending.holders() if not holder.in_flight)
        if for_decode is not None:
            others = [
                sequence
                for sequence in self._table.decoding.values()
                if not sequence.in_flight and sequence is not for_decode
            ]
            others.sort(key=lambda other: (other.request.priority, -entry_order(other)))
            yield from others

    def _preempt(self, sequence: Sequence) -> None:
        num_pages = len(sequence.pages)
        self._kv.release(sequence.request_id, sequence.tokens, sequence.processed)
        self.adapters.leave(sequence.lora)
        sequence.preempt()
        if sequence.status is SequenceStatus.DECODING:
            self._table.queue_in_front(sequence)
        self.num_preemptions += 1
        now = self._clock()
        if now - self._logged_s >= PREEMPTION_LOG_INTERVAL_S:
            self._logged_s = now
            logger.info(
                "preempted %s (%d pages); %d preemptions so far; a larger KV pool or a smaller "
                "max_batch_size avoids them",
                sequence.request_id,
                num_pages,
                self.num_preemptions,
            )

    def _fail(self, sequence: Sequence) -> None:
        self._table.remove(sequence)
        num_tokens, kv, limits = len(sequence.tokens), self._kv, self._limits
        message = (
            f"{num_tokens} tokens need {kv.pages_for(num_tokens)} KV pages of {kv.page_size} "
            f"tokens; the pool has {kv.total_pages}"
        )
        if limits.max_total_tokens is not None and num_tokens > limits.max_total_tokens:
            message = f"{num_tokens} tokens exceed max_batch_total_tokens={limits.max_total_tokens}"
        self.failed.append((sequence, f"{message}; use a shorter prompt or fewer tokens"))


class PrefillPolicy:
    """Decides whether prompts or decode rows run next; changes no sequence.

        prefill while prompts wait and fewer than `min_batch_size_tg` decode
           │  ▲                  (each batch then decoded once: `enable_prioritize_first_decode`)
           ▼  │
        decode, and continue as long as `min_batch_size_tg` or more decode

    The bound is `max_queue_size_tg` unless set: then prompts run whenever a sequence ends, which is
    the rule for text. Zero decodes until all have ended. Where no prompt can be added (no room, no
    pages), decoding continues. In-flight batching puts both kinds of rows into one batch: then
    prompts may join below the bound.
    """

    def __init__(
        self,
        limits: ResolvedLimits,
        table: SequenceTable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._table = table
        self._clock = clock
        self._just_prefilled: list[Sequence] = []  # sequences of the last batch with prompts
        self._num_prefilled = 0  # prompts since all decoding sequences last had their turn
        self._held_since: float | None = None
        self.delay_s = 0.0  # seconds that prompts still wait for others, at the last call

    def can_prefill(self) -> bool:
        """Whether prompts may run next."""
        self.delay_s = 0.0
        if not self._table.pending:
            self._held_since = None
            return False
        num_decoding, limits = len(self._table.decoding), self._limits
        if num_decoding >= max(limits.min_decoding, 1):
            return False
        # Requests of one token never fill the decode set, and must not block decoding forever.
        if num_decoding and self._num_prefilled >= limits.max_decoding:
            return False
        if self._limits.prefill_delay_s:
            self.delay_s = self._remaining_delay_s()
        return self.delay_s <= 0

    def first_decode(self) -> list[Sequence]:
        """Return the sequences that decode before all others."""
        return [s for s in self._just_prefilled if s.status is SequenceStatus.DECODING]

    def decode_order(self) -> Iterable[Sequence]:
        """Return all decoding sequences by first entry, with those of `first_decode` in front."""
        decoding = self._table.decoding.values()
        if not self._just_prefilled:
            return decoding
        first = self.first_decode()
        chosen = set(first)
        return itertools.chain(first, (s for s in decoding if s not in chosen))

    def planned(self, prefilled: list[Sequence], decoded_all: bool) -> None:
        """Record a batch: its prompts, and whether decode rows had their turn."""
        if decoded_all:
            self._num_prefilled = 0
        self._just_prefilled = prefilled if self._limits.first_decode else []
        if prefilled:
            self._num_prefilled += sum(s.active_end == s.extend_end for s in prefilled)
            self._held_since = None

    def _remaining_delay_s(self) -> float:
        """Return how many seconds a prefill still waits for later requests (`ce_delay_ms`)."""
        head = self._table.pending.peek()
        if head.first_scheduled_s is not None:
            return 0.0  # sequences that ran before continue at once
        if self._is_full():
            return 0.0
        if self._held_since is None or head.arrival_s < self._held_since:
            self._held_since = head.arrival_s
        return self._held_since + self._limits.prefill_delay_s - self._clock()

    def _is_full(self) -> bool:
        """Whether no later request could join the next prefill."""
        limits, pending = self._limits, self._table.pending
        room = min(limits.max_batch_size, limits.max_decoding - len(self._table.decoding))
        return len(pending) >= room or pending.num_tokens >= limits.max_input_tokens

    def __repr__(self) -> str:
        num_first = len(self._just_prefilled)
        return f"PrefillPolicy({self._num_prefilled} prefilled, {num_first} decode first)"


class BudgetDecision(Enum):
    """Decision on one more row."""

    AVAILABLE = "available"  # admit, continue
    REACHED = "reached"  # admit, then stop
    EXHAUSTED = "exhausted"  # do not admit, stop


class TokenBudget:
    """The capacity that one batch has left: two budgets, checked in order.

    The first that is not available decides.
    """

    def __init__(self, limits: ResolvedLimits, page_size: int) -> None:
        self._capacity = limits.max_input_tokens
        self._chunked = limits.chunked_prefill
        self._context_capacity = limits.max_total_tokens
        self._page_size = page_size
        self.active_tokens = 0
        self.context_tokens = 0  # counted if they are limited

    def context_cost(self, num_tokens: int) -> int:
        """Return the resident tokens of a sequence of `num_tokens`: whole pages."""
        return -(-num_tokens // self._page_size) * self._page_size

    def decide(self, num_tokens: int, context_len: int) -> BudgetDecision:
        """Decide on a prompt that feeds `num_tokens` and then has `context_len` tokens."""
        left = self._capacity - self.active_tokens
        if left <= 0:
            return BudgetDecision.EXHAUSTED
        active = BudgetDecision.REACHED if num_tokens >= left else BudgetDecision.AVAILABLE
        context = BudgetDecision.AVAILABLE
        if self._context_capacity is not None:
            context = self._decide_context(context_len, self._context_capacity)
        if context is BudgetDecision.EXHAUSTED or active is BudgetDecision.AVAILABLE:
            return context
        return active

    def _decide_context(self, context_len: int, capacity: int) -> BudgetDecision:
        left = capacity - self.context_tokens - self.context_cost(context_len)
        if left > 0:
            return BudgetDecision.AVAILABLE
        # Rounding up to whole pages must not exclude a sequence that fits by itself.
        alone = self.active_tokens == 0 and context_len <= capacity
        return BudgetDecision.REACHED if left == 0 or alone else BudgetDecision.EXHAUSTED

    def take(self, num_tokens: int, context_len: int) -> int:
        """Admit a prompt; return how many of `num_tokens` it may feed now."""
        granted = num_tokens
        if self._chunked:
            granted = min(num_tokens, self._capacity - self.active_tokens)
        self.active_tokens += granted
        if self._context_capacity is not None:
            self.context_tokens += self.context_cost(context_len)
        return granted

    def __repr__(self) -> str:
        return (
            f"TokenBudget({self.active_tokens}/{self._capacity} active, "
            f"{self.context_tokens}/{self._context_capacity or '∞'} context)"
        )
