"""`TokenBudget`: what one batch may still take.

| budget        | capacity               | cost of a row                | applies to           |
| active tokens | max_batch_input_tokens | tokens fed (a decode row: 1) | every batch          |
| total context | max_batch_total_tokens | tokens known, in whole pages | batches with prompts |

A prompt that does not fit the active tokens is cut to what is left (chunked prefill), or else
admitted whole as the last one: then the capacity is a soft limit. Context cannot be cut.
"""

from __future__ import annotations

from enum import Enum

from llm.scheduler.limits import ResolvedLimits


class Verdict(Enum):
    """What a budget says to one more row."""

    AVAILABLE = "available"  # admit, go on
    REACHED = "reached"  # admit, then stop
    EXHAUSTED = "exhausted"  # do not admit, stop


class TokenBudget:
    """The two budgets of one batch, tried in order; the first that is not available wins."""

    def __init__(self, limits: ResolvedLimits, page_size: int) -> None:
        self._capacity = limits.max_input_tokens
        self._chunked = limits.chunked_prefill
        self._context_capacity = limits.max_total_tokens
        self._page_size = page_size
        self.active_tokens = 0
        self.context_tokens = 0

    def add_decode_rows(self, num_rows: int, context_tokens: int) -> None:
        """Count rows that are in the batch whatever they cost."""
        self.active_tokens += num_rows
        self.context_tokens += context_tokens

    def context_cost(self, num_tokens: int) -> int:
        """Resident tokens of a sequence of `num_tokens`: whole pages."""
        return -(-num_tokens // self._page_size) * self._page_size

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` can ever run, as the only one of its batch."""
        return self._context_capacity is None or num_tokens <= self._context_capacity

    def verdict(self, num_tokens: int, context_len: int) -> Verdict:
        """What is said to a prompt that feeds `num_tokens` and then has `context_len` tokens."""
        left = self._capacity - self.active_tokens
        if left <= 0:
            return Verdict.EXHAUSTED
        active = Verdict.REACHED if num_tokens >= left else Verdict.AVAILABLE
        context = self._context_verdict(context_len)
        if context is Verdict.EXHAUSTED or active is Verdict.AVAILABLE:
            return context
        return active

    def _context_verdict(self, context_len: int) -> Verdict:
        if self._context_capacity is None:
            return Verdict.AVAILABLE
        left = self._context_capacity - self.context_tokens - self.context_cost(context_len)
        if left > 0:
            return Verdict.AVAILABLE
        # Rounding up to whole pages must not lock out a sequence that fits by itself.
        alone = self.active_tokens == 0 and self.fits_alone(context_len)
        return Verdict.REACHED if left == 0 or alone else Verdict.EXHAUSTED

    def take(self, num_tokens: int, context_len: int) -> int:
        """Admit a prompt; returns how many of `num_tokens` it may feed now."""
        granted = num_tokens
        if self._chunked:
            granted = min(num_tokens, self._capacity - self.active_tokens)
        self.active_tokens += granted
        self.context_tokens += self.context_cost(context_len)
        return granted

    def __repr__(self) -> str:
        return (
            f"TokenBudget({self.active_tokens}/{self._capacity} active, "
            f"{self.context_tokens}/{self._context_capacity or '∞'} context)"
        )
