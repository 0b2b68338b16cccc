"""Semitones by which a changed pitch is heard.

Each text is spoken with each pitch and without one, with the same seed. Both have the same sounds
at the same times, so that the pitch of their moments is compared, and the median counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import tts
from benchmarks.report import Figure, Report, arguments, lines_of, publish
from benchmarks.speech_judges import LOUD_DB

TEXTS = Path(__file__).with_name("held_out.txt")
ASKED = (-6.0, -3.0, -1.0, 1.0, 3.0, 6.0)  # semitones
LOWEST_HZ, HIGHEST_HZ = 50, 600
WINDOW_S, STEP_S = 0.05, 0.01
CLEAR, NEAR_BEST = 0.6, 0.9  # of a window's best period, and of a shorter one against the best


def semitones_between(before: np.ndarray, after: np.ndarray, rate: int) -> float:
    """Return how much higher the second of two clips is, both [S] and of the same sounds."""
    first, second = (pitch_of(clip, rate) for clip in (before, after))
    count = min(len(first), len(second))
    changes = 12 * np.log2(second[:count] / first[:count])
    return float(np.nanmedian(changes))


def pitch_of(clip: np.ndarray, rate: int) -> np.ndarray:
    """Return the pitch of frames of `STEP_S` in Hz, NaN where there is none.

    It is the shortest period that repeats almost as well as the best one, by the autocorrelation of
    a window divided by that of the window's own shape (Boersma, 1993).
    """
    size, step = round(WINDOW_S * rate), round(STEP_S * rate)
    window = np.hanning(size)
    starts = np.arange(0, len(clip) - size, step)
    frames = clip[starts[:, None] + np.arange(size)] * window
    lags = np.arange(rate // HIGHEST_HZ, rate // LOWEST_HZ)
    found = _autocorrelation(frames)[:, : lags[-1] + 2] / _autocorrelation(window[None])[
        :, : lags[-1] + 2
    ].clip(1e-9)
    loud = np.square(frames).mean(1)
    values = np.full(len(starts), np.nan)
    for index, row in enumerate(found):
        if loud[index] > loud.max() * 10 ** (-LOUD_DB / 10):
            values[index] = _period(row, lags, rate)
    return values


def _autocorrelation(frames: np.ndarray) -> np.ndarray:
    spectrum = np.fft.rfft(frames, 2 * frames.shape[1])
    lagged = np.fft.irfft(np.square(np.abs(spectrum)))
    return np.asarray(lagged / lagged[:, :1].clip(1e-12))


def _period(row: np.ndarray, lags: np.ndarray, rate: int) -> float:
    """Return the pitch in Hz of one frame's autocorrelation, NaN without a clear period."""
    before, at, behind = row[lags - 1], row[lags], row[lags + 1]
    peaks = lags[(at >= before) & (at > behind)]
    if not len(peaks) or row[peaks].max() < CLEAR:
        return float("nan")
    lag = int(peaks[row[peaks] >= NEAR_BEST * row[peaks].max()][0])
    left, middle, right = row[lag - 1 : lag + 2]
    bend = left - 2 * middle + right
    shift = 0.5 * (left - right) / bend if bend else 0.0
    return rate / (lag + shift)


def figures(voice: tts.LoadedVoice, texts: Sequence[str], names: Sequence[str]) -> Iterator[Figure]:
    """Yield the semitones heard for each pitch, over all texts and voices."""
    heard: dict[float, list[float]] = {asked: [] for asked in ASKED}
    for name in names:
        for seed, text in enumerate(texts):
            plain = voice.say(text, voice=name, seed=seed)
            for asked in ASKED:
                said = voice.say(text, voice=name, seed=seed, pitch=asked)
                heard[asked].append(
                    semitones_between(plain.samples, said.samples, plain.sample_rate)
                )
    errors = []
    for asked, values in heard.items():
        errors += [abs(value - asked) for value in values]
        yield Figure(f"heard for {asked:+g}", tuple(values), "semitones")
    yield Figure("error", tuple(errors), "semitones")


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Semitones asked and heard.", repeat=3, has_model=False)
    parser.add_argument("--voices", nargs="+", default=["hazel", "hugh"], metavar="NAME")
    args = parser.parse_args(argv)
    with tts.load() as voice:
        found = tuple(figures(voice, lines_of(TEXTS, args.repeat), args.voices))
    return publish(Report("pitch", found))


if __name__ == "__main__":
    sys.exit(main())
