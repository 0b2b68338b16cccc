"""`Cycle`: whose turn it is, prompts or decode rows.

    encode while prompts wait and fewer than `min_batch_size_tg` decode
       │  ▲                      (each batch then decoded once: `enable_prioritize_first_decode`)
       ▼  │
    decode, and go on as long as `min_batch_size_tg` or more decode

The bound is `max_queue_size_tg` unless set: then any sequence that ends lets prompts in, which is
the rule for text. Zero decodes until nobody is left. Where no prompt can be added (no room, no
pages), decoding goes on. In-flight batching puts both kinds of rows into one batch: then the bound
says when prompts may join.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

from llm.scheduler.limits import ResolvedLimits
from llm.scheduler.table import SequenceTable
from llm.sequence import Sequence, SequenceStatus


class Cycle:
    """Decides from the table and from the batches planned so far; changes no sequence."""

    def __init__(
        self,
        limits: ResolvedLimits,
        table: SequenceTable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._table = table
        self._clock = clock
        self._just_encoded: list[Sequence] = []  # by the last batch with prompts
        self._num_encoded = 0  # prompts since all who decode had their turn
        self._held_since: float | None = None
        self.held_s = 0.0  # how long prompts are still to wait for others, when last asked

    def may_encode(self) -> bool:
        """Whether prompts may run next."""
        self.held_s = 0.0
        if not self._table.pending:
            self._held_since = None
            return False
        num_decoding, limits = len(self._table.decoding), self._limits
        if num_decoding >= max(limits.min_decoding, 1):
            return False
        # Requests of one token never fill the decode set; those who decode must not wait for ever.
        if num_decoding and self._num_encoded >= limits.max_decoding:
            return False
        self.held_s = self._hold_s()
        return self.held_s <= 0

    def first_decode(self) -> list[Sequence]:
        """Who is to decode before everybody else."""
        return [s for s in self._just_encoded if s.status is SequenceStatus.DECODING]

    def decode_order(self) -> Iterable[Sequence]:
        """All who decode, by first entry, but those of `first_decode` in front."""
        first, decoding = self.first_decode(), self._table.decoding.values()
        if not first:
            return decoding
        chosen = set(first)
        return itertools.chain(first, (s for s in decoding if s not in chosen))

    def planned(self, encoded: list[Sequence], decoded_all: bool) -> None:
        """Take note of a batch: the prompts in it, and whether decode rows had their turn."""
        if decoded_all:
            self._num_encoded = 0
        self._just_encoded = encoded if self._limits.first_decode else []
        if encoded:
            self._num_encoded += sum(s.active_end == s.extend_end for s in encoded)
            self._held_since = None

    def _hold_s(self) -> float:
        """Seconds that a prefill still waits for later requests to join it (`ce_delay_ms`)."""
        head = self._table.pending.peek()
        if not self._limits.prefill_delay_s or head.first_scheduled_s is not None:
            return 0.0  # whoever has run before goes on at once
        if self._is_full():
            return 0.0
        if self._held_since is None or head.arrival_s < self._held_since:
            self._held_since = head.arrival_s
        return self._held_since + self._limits.prefill_delay_s - self._clock()

    def _is_full(self) -> bool:
        """Whether nobody who comes later could join the next prefill."""
        limits, pending = self._limits, self._table.pending
        room = min(limits.max_batch_size, limits.max_decoding - len(self._table.decoding))
        return len(pending) >= room or pending.num_tokens >= limits.max_input_tokens

    def __repr__(self) -> str:
        return f"Cycle({self._num_encoded} encoded, {len(self._just_encoded)} decode first)"
