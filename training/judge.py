"""The recogniser of evaluation, in processes of its own: the next takes are spoken meanwhile.

It takes longer to hear a sentence than the service to speak it, hence one process for each core.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from benchmarks.report import this_machine
from benchmarks.word_errors import Recogniser, WordErrors, total, word_errors
from training.studio import Take
from training.teacher import SAMPLE_RATE


def _hear(texts: Sequence[str], takes: Sequence[np.ndarray]) -> WordErrors:
    """By a recogniser of their own: it gets used to a voice, and what it heard before counts."""
    listen = Recogniser()
    pairs = zip(texts, takes, strict=True)
    return total(word_errors(text, listen(samples, SAMPLE_RATE)) for text, samples in pairs)


class Judge:
    """Counts word errors; the same takes give the same count. Close it at the end."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(this_machine().cores, get_context("spawn"))

    def hear(self, texts: Sequence[str], takes: Sequence[Take]) -> Future[WordErrors]:
        """Word errors of all takes of one voice together, when there is time."""
        return self._pool.submit(_hear, list(texts), [take.samples for take in takes])

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
