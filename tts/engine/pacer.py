"""Pacing of a decoder that renders in parallel with the language model.

Both share one device: each decoder call slows the language model's steps, and many windows cost
little more than one. A call therefore waits for more windows until a stream needs its audio:

    at once     a full batch, or a stream that would underrun within `NEAR_S`
    when idle   windows of all streams
    after rest  other windows. After a call that took d the decoder rests `REST` times d, or only
                `FIRST_REST` times d while a stream waits for its first audio

A single stream therefore never waits. Unless a batch is full or a stream is about to underrun,
calls take at most half of the time, and a fourteenth while all streams have buffered audio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NEAR_S = 0.06
FIRST_REST = 1.0
REST = 13.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Summary of the windows that could be launched now."""

    dry_s: float  # time of the first underrun; inf: no stream has audio yet
    awaits_first_audio: bool  # a stream waits for its first audio
    fills_batch: bool
    has_all_streams: bool  # all streams have a window


class Pace:
    """Pacer of decoder calls, based on the newest call. Times are seconds on one clock."""

    def __init__(self) -> None:
        self._finished_s = -math.inf
        self._took_s = 0.0

    def __repr__(self) -> str:
        return f"Pace(finished_s={self._finished_s:.3f}, took_s={self._took_s:.4f})"

    def note(self, started_s: float, took_s: float) -> None:
        """Record a call that has ended."""
        self._finished_s, self._took_s = started_s + took_s, took_s

    def is_due(self, now_s: float, waiting: Waiting, *, is_busy: bool) -> bool:
        """Return whether to launch; `is_busy` means that batches are in flight."""
        if waiting.fills_batch or waiting.dry_s < now_s + NEAR_S:
            return True
        if is_busy:
            return False
        rest = FIRST_REST if waiting.awaits_first_audio else REST
        return waiting.has_all_streams or now_s >= self._finished_s + rest * self._took_s
