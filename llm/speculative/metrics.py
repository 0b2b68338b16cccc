"""`SpeculativeDecodingMetrics`: statistics of drafted tokens by their position in the draft."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculativeDecodingMetrics:
    """A snapshot; counts are from the start. Position 0 is a draft's first token.

    A token counts as accepted if all earlier tokens of its draft were accepted, too. Tokens after
    the end of their sequence are not counted.
    """

    num_verifications: int  # verified drafts, one per row and step
    drafted: tuple[int, ...]  # by position
    accepted: tuple[int, ...]

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Accepted share by position; 0 where nothing was drafted."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        return tuple(accepted / drafted if drafted else 0.0 for accepted, drafted in pairs)

    @property
    def mean_accepted(self) -> float:
        """Mean number of accepted tokens per draft; each step yields one token more."""
        return sum(self.accepted) / self.num_verifications if self.num_verifications else 0.0


class AcceptanceCounter:
    """Counters for drafts of at most `num_positions` tokens."""

    def __init__(self, num_positions: int) -> None:
        self._num_verifications = 0
        self._drafted = [0] * num_positions
        self._accepted = [0] * num_positions

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count one row's verified draft."""
        if not 0 <= num_accepted <= num_drafted <= len(self._drafted):
            raise ValueError(f"{num_accepted} of {num_drafted} drafted tokens accepted")
        if num_drafted:
            self._num_verifications += 1
        for position in range(num_drafted):
            self._drafted[position] += 1
            self._accepted[position] += position < num_accepted

    def snapshot(self) -> SpeculativeDecodingMetrics:
        """Return a snapshot of the counts."""
        return SpeculativeDecodingMetrics(
            self._num_verifications, tuple(self._drafted), tuple(self._accepted)
        )
