"""`TokenBudget`: the capacity that one batch has left."""

from __future__ import annotations

from enum import Enum

from llm.scheduler.limits import ResolvedLimits


class BudgetDecision(Enum):
    """Decision on one more row."""

    AVAILABLE = "available"  # admit, continue
    REACHED = "reached"  # admit, then stop
    EXHAUSTED = "exhausted"  # do not admit, stop


class TokenBudget:
    """The two budgets of one batch, checked in order; the first that is not available decides."""

    def __init__(self, limits: ResolvedLimits, page_size: int) -> None:
        self._capacity = limits.max_input_tokens
        self._chunked = limits.chunked_prefill
        self._context_capacity = limits.max_total_tokens
        self._page_size = page_size
        self.active_tokens = 0
        self.context_tokens = 0

    def add_decode_rows(self, num_rows: int, context_tokens: int) -> None:
        """Count rows that the batch contains regardless of their cost."""
        self.active_tokens += num_rows
        self.context_tokens += context_tokens

    def context_cost(self, num_tokens: int) -> int:
        """Return the resident tokens of a sequence of `num_tokens`: whole pages."""
        return -(-num_tokens // self._page_size) * self._page_size

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` can ever run, alone in its batch."""
        return self._context_capacity is None or num_tokens <= self._context_capacity

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
        alone = self.active_tokens == 0 and self.fits_alone(context_len)
        return BudgetDecision.REACHED if left == 0 or alone else BudgetDecision.EXHAUSTED

    def take(self, num_tokens: int, context_len: int) -> int:
        """Admit a prompt; return how many of `num_tokens` it may feed now."""
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
