"""`PrefillPolicy`: whether prompts or decode rows run next.

    prefill while prompts wait and fewer than `min_batch_size_tg` decode
       │  ▲                      (each batch then decoded once: `enable_prioritize_first_decode`)
       ▼  │
    decode, and continue as long as `min_batch_size_tg` or more decode

The bound is `max_queue_size_tg` unless set: then prompts run whenever a sequence ends, which is
the rule for text. Zero decodes until all have ended. Where no prompt can be added (no room, no
pages), decoding continues. In-flight batching puts both kinds of rows into one batch: then prompts
may join below the bound.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

from llm.scheduler.limits import ResolvedLimits
from llm.scheduler.table import SequenceTable
from llm.sequence import Sequence, SequenceStatus


class PrefillPolicy:
    """Decides from the table and the batches planned so far; changes no sequence."""

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
        first, decoding = self.first_decode(), self._table.decoding.values()
        if not first:
            return decoding
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
