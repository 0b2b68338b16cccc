"""Error of the word times that an aligner finds in codes, against the teacher's own."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Figure, Report
from training.labels import TimedWord
from tts.speech.aligner import Aligner
from tts.speech.word_times import WordTimer
from tts.text.segmenter import SpokenWord

BLOCK = 10  # codes that arrive at once
MOST_MS, MOST_WORK = 30.0, 5.0


@dataclass(frozen=True, slots=True)
class Line:
    """Codes of one line, and its words."""

    codes: tuple[int, ...]
    words: tuple[TimedWord, ...]


def evaluate(aligner: Aligner, lines: Iterable[Line], codes_per_second: float) -> Report:
    """Return the errors of starts and ends, the words without times, and the work."""
    errors: list[float] = []
    missed, seconds, spoken_s = 0, 0.0, 0.0
    for line in lines:
        words = [SpokenWord(name, i, i + 1, name) for i, (name, _, _) in enumerate(line.words)]
        timer = WordTimer(aligner, words, 1 / codes_per_second)
        found = []
        started = time.thread_time()
        for start in range(0, len(line.codes), BLOCK):
            found += timer.push(line.codes[start : start + BLOCK])
        found += timer.finish()
        seconds += time.thread_time() - started
        spoken_s += len(line.codes) / codes_per_second
        missed += len(words) - len(found)
        for span in found:
            _, start_s, end_s = line.words[span.word.start]
            errors += [1000 * abs(span.start_s - start_s), 1000 * abs(span.end_s - end_s)]
    return Report("timings", (
        Figure("start and end of a word", tuple(errors), "ms", MOST_MS),
        Figure("90 % within", (float(np.percentile(errors, 90)),), "ms"),
        Figure("words without times", (float(missed),), ""),
        Figure("work", (1000 * seconds / spoken_s,), "ms per s of speech", MOST_WORK),
    ))  # fmt: skip
