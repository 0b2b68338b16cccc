"""Playback of a stream: its start, stalls, and the first sound that is not silence."""

from __future__ import annotations

import array

AUDIBLE = 32  # of 32,768: 60 dB below full scale


class Playback:
    """A player that starts with the first audio and stalls when its buffer is empty.

    Times are seconds of one clock; samples are 16-bit, in this machine's byte order.
    """

    def __init__(self, sample_rate: int) -> None:
        self._rate = sample_rate
        self._until_s = 0.0  # end of the received audio
        self.first_s: float | None = None  # arrival of the first audio
        self.audible_s: float | None = None  # the first sample that is not silence was played
        self.audio_s = 0.0
        self.stalls = 0
        self.stalled_s = 0.0
        self.first_stall: int | None = None  # index of the first late message
        self._messages = 0

    def take(self, now_s: float, data: bytes) -> None:
        """Add a message."""
        seconds = len(data) / 2 / self._rate
        if self.first_s is None:
            self.first_s = self._until_s = now_s
        elif now_s > self._until_s:
            self.stalls += 1
            if self.first_stall is None:
                self.first_stall = self._messages
            self.stalled_s += now_s - self._until_s
            self._until_s = now_s
        if self.audible_s is None:
            place = first_audible(data)
            if place is not None:
                self.audible_s = self._until_s + place / self._rate
        self._messages += 1
        self.audio_s += seconds
        self._until_s += seconds


def first_audible(data: bytes) -> int | None:
    """Return the index of the first 16-bit sample that is not silence; None: all are."""
    samples = array.array("h", data)
    return next((place for place, value in enumerate(samples) if abs(value) >= AUDIBLE), None)
