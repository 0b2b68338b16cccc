"""The recogniser of evaluation, in a process of its own: the next takes are spoken meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

import numpy as np

from benchmarks.word_errors import Recogniser, WordErrors, total, word_errors
from training.studio import Take
from training.teacher import SAMPLE_RATE


@cache
def _recogniser() -> Recogniser:
    return Recogniser()


def _hear(text: str, samples: np.ndarray) -> WordErrors:
    return word_errors(text, _recogniser()(samples, SAMPLE_RATE))


class Judge:
    """Counts word errors. Close it at the end."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))

    def hear(self, text: str, take: Take) -> Future[WordErrors]:
        """Word errors of one take, when there is time."""
        return self._pool.submit(_hear, text, take.samples)

    def hear_all(self, texts: Sequence[str], takes: Sequence[Take]) -> Hearing:
        """Those of many takes together."""
        return Hearing([self.hear(*pair) for pair in zip(texts, takes, strict=True)])

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Hearing:
    """Word errors that are being counted."""

    def __init__(self, errors: Sequence[Future[WordErrors]]) -> None:
        self._errors = errors

    @property
    def errors(self) -> WordErrors:
        """All of them; waits."""
        return total(error.result() for error in self._errors)
