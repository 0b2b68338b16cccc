"""Progress and statistics of `tts.say` on standard error."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True)
class SpeechStats:
    """Times of one synthesis, in seconds."""

    first_audio_s: float | None  # from the request to the first bytes of audio
    audio_s: float
    waited_s: float  # for events of the service, without waiting for a player

    @property
    def real_time_factor(self) -> float | None:
        """Seconds of waiting per second of audio; None without audio."""
        return self.waited_s / self.audio_s if self.audio_s else None

    def __str__(self) -> str:
        parts = [f"{self.audio_s:.2f} s of audio"]
        if self.first_audio_s is not None:
            parts.append(f"time to first audio {self.first_audio_s:.2f} s")
        if self.real_time_factor is not None:
            parts.append(f"real-time factor {self.real_time_factor:.2f}")
        return ", ".join(parts)


class Stopwatch:
    """Measures one synthesis: `resume` before waiting for an event, `pause` when it arrives."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._resumed_s = 0.0
        self._first_audio_s: float | None = None
        self._num_samples = 0

    def resume(self) -> None:
        """Start counting."""
        self._resumed_s = time.perf_counter()

    def pause(self) -> None:
        """Stop counting."""
        self._waited_s += time.perf_counter() - self._resumed_s

    def audio(self, end_sample: int) -> None:
        """Note that audio up to this sample has arrived."""
        if self._first_audio_s is None:
            self._first_audio_s = self._waited_s
        self._num_samples = end_sample

    def stats(self, sample_rate: int) -> SpeechStats:
        """Return the statistics so far; `sample_rate` in Hz."""
        audio_s = self._num_samples / sample_rate if sample_rate else 0.0
        return SpeechStats(self._first_audio_s, audio_s, self._waited_s)


class ProgressLine:
    """Progress of a text: one line that is rewritten on a terminal, else a line per chunk."""

    def __init__(self, out: TextIO, num_characters: int | None) -> None:
        self._out = out
        self._num_characters = num_characters
        self._is_terminal = out.isatty()
        self._width = 0

    def show(self, stats: SpeechStats, text_end: int) -> None:
        """Show the seconds of audio and the share of the text; `text_end` characters are said."""
        line = f"{stats.audio_s:.1f} s of audio"
        if self._num_characters:
            line += f", {min(1.0, text_end / self._num_characters):.0%} of the text"
        if self._is_terminal:
            self._out.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._out.write(line + "\n")
        self._out.flush()

    def clear(self) -> None:
        """Erase the line on a terminal."""
        if self._is_terminal and self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._out.flush()
            self._width = 0
