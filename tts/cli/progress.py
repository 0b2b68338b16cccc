"""Progress and statistics of `tts.say` on standard error."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from tts.cli.options import SayOptions

if TYPE_CHECKING:
    from tqdm import tqdm


SHOWN_FROM = 300  # characters, on a terminal
COLUMNS, ROWS = 80, 24  # of a terminal that does not say


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


class Progress:
    """Progress of a text: on a terminal a bar with the time left, else a line per step."""

    def __init__(self, out: TextIO, num_characters: int, num_done: int = 0) -> None:
        """Begin with `num_done` characters; `num_characters` is 0 while the length is unknown."""
        self._out, self._total = out, num_characters
        self._bar: tqdm[None] | None = None
        if out.isatty():
            from tqdm import tqdm  # takes a tenth of a second: only for texts that take longer

            shown = "{percentage:3.0f}% of the text |{bar}|{postfix}, {remaining} left"
            self._bar = tqdm(
                total=num_characters,
                initial=num_done,
                file=out,
                leave=False,
                mininterval=0,  # steps are seldom
                miniters=1,
                ncols=os.get_terminal_size(out.fileno()).columns or COLUMNS,
                nrows=ROWS,
                bar_format=shown if num_characters else "{postfix}",
            )

    @classmethod
    def of(
        cls, options: SayOptions, num_characters: int | None, num_done: int = 0
    ) -> Progress | None:
        """Return the progress of a text, if it is to be shown; None is the length of a stream."""
        is_long = num_characters is None or num_characters >= SHOWN_FROM
        if options.show_progress or (is_long and sys.stderr.isatty() and not options.is_quiet):
            return cls(sys.stderr, num_characters or 0, num_done)
        return None

    def show(self, audio_s: float, num_done: int) -> None:
        """Show the seconds of audio, and how many characters are said."""
        audio = f"{audio_s:.1f} s of audio"
        if self._bar is not None:
            self._bar.set_postfix_str(audio, refresh=False)
            self._bar.update(num_done - self._bar.n)
        else:
            share = f", {num_done / self._total:.0%} of the text" if self._total else ""
            self._out.write(f"{audio}{share}\n")
            self._out.flush()

    def close(self) -> None:
        """Erase the bar."""
        if self._bar is not None:
            self._bar.close()
