"""Word errors counted in other processes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.speechlike import has_teacher
from training.evaluate import prose
from training.recogniser import RecogniserPool
from training.studio import Take, teach
from training.teacher import Teacher
from training.voices import NAMED


@pytest.mark.skipif(not has_teacher(), reason="flite is not installed")
def test_a_count_depends_on_nothing_that_was_heard_before() -> None:
    pytest.importorskip("pocketsphinx")
    teacher, texts = Teacher(), prose(3)
    takes = [teach(teacher, text, NAMED[1]) for text in texts]
    silence = [Take(np.zeros(16_000, np.float32))] * 3
    recogniser = RecogniserPool()
    first, none, again = (
        recogniser.count_errors(texts, heard) for heard in (takes, silence, takes)
    )
    assert first.result() == again.result()
    assert first.result().rate < 0.5
    assert none.result().words == first.result().words
    assert none.result().rate == 1.0
    recogniser.close()
