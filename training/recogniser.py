"""The recogniser of evaluation, in separate processes, in parallel with synthesis.

Recognising a sentence takes longer than generating it, hence one process per core.
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


def _count_errors(texts: Sequence[str], takes: Sequence[np.ndarray]) -> WordErrors:
    """Return word errors by a new recogniser: it adapts to a voice, so that earlier input would
    matter.
    """
    listen = Recogniser()
    pairs = zip(texts, takes, strict=True)
    return total(word_errors(text, listen(samples, SAMPLE_RATE)) for text, samples in pairs)


class RecogniserPool:
    """Counts word errors, deterministically. Close it at the end."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(this_machine().cores, get_context("spawn"))

    def count_errors(self, texts: Sequence[str], takes: Sequence[Take]) -> Future[WordErrors]:
        """Return the word errors of all takes of one voice together, asynchronously."""
        return self._pool.submit(_count_errors, list(texts), [take.samples for take in takes])

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
