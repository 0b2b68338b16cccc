"""When a decoder that renders beside the language model is given its next batch.

Both share one device, so each call takes something from the language model's steps, and many
windows cost little more than one. So a call waits for company as long as nobody misses anything:

    at once     a full batch; a listener who would hear silence within `NEAR_S`
    when idle   windows of all the streams that there are
    after rest  the others. After a call that took d the decoder rests `REST` times d, or only
                `FIRST_REST` times d where somebody has heard nothing yet

So a lone stream never waits. As long as no batch is full and nobody is about to hear silence, calls
take half of the time at most; a fourteenth, while all listeners have audio ahead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NEAR_S = 0.06
FIRST_REST = 1.0
REST = 13.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What could be launched now."""

    dry_s: float  # when the first listener hears silence; inf: none has heard anything yet
    has_unheard: bool  # somebody has heard nothing yet
    fills_batch: bool
    is_everyone: bool  # no other stream could join


class Pace:
    """Remembers the newest call. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._finished_s = -math.inf
        self._took_s = 0.0

    def __repr__(self) -> str:
        return f"Pace(finished_s={self._finished_s:.3f}, took_s={self._took_s:.4f})"

    def note(self, started_s: float, took_s: float) -> None:
        """A call has ended."""
        self._finished_s, self._took_s = started_s + took_s, took_s

    def is_due(self, now_s: float, waiting: Waiting, *, is_busy: bool) -> bool:
        """Whether to launch; `is_busy`: the decoder has not finished what it was given."""
        if waiting.fills_batch or waiting.dry_s < now_s + NEAR_S:
            return True
        if is_busy:
            return False
        rest = FIRST_REST if waiting.has_unheard else REST
        return waiting.is_everyone or now_s >= self._finished_s + rest * self._took_s
