"""Training sequences: what is predicted of them, and batches of one length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.documents import assemble, bucketed, target_mask
from training.vocabulary import (
    END_OF_SPEECH,
    END_OF_TEXT,
    FIRST_CODE,
    FIRST_SOUND,
    PAD,
    PHONEMES,
    START_OF_SPEECH,
)

BUCKETS = (32, 64, 96)
SPEECH = [72, 105, START_OF_SPEECH, FIRST_CODE + 3, FIRST_CODE + 9, END_OF_SPEECH]
SOUNDS = [PHONEMES, 72, 105, END_OF_TEXT, FIRST_SOUND + 5, FIRST_SOUND, END_OF_TEXT]
ROWS = [np.array(row, np.int16) for row in (SPEECH, SOUNDS, [*SPEECH, *SPEECH])]


@dataclass(frozen=True)
class Part:
    length: np.ndarray


def test_targets_are_codes_and_ends_and_sounds_alone() -> None:
    assert target_mask(ROWS[0]).tolist() == [False] * 3 + [True] * 3
    assert target_mask(ROWS[1]).tolist() == [False] * 4 + [True] * 3
    assert target_mask(ROWS[2]).tolist() == 2 * ([False] * 3 + [True] * 3)


def test_a_batch_predicts_each_target_from_what_is_before_it() -> None:
    length = max(map(len, ROWS))
    weighted = [(row, (n + 1.0) * target_mask(row)) for n, row in enumerate(ROWS)]
    batch = assemble(weighted, length, 4)
    assert batch.ids.shape == (4, length)
    assert (batch.ids[3] == PAD).all()
    expected = [
        (row * length + at - 1, int(tokens[at]))
        for row, tokens in enumerate(ROWS)
        for at in np.flatnonzero(target_mask(tokens))
    ]
    assert list(zip(batch.chosen.tolist(), batch.targets.tolist(), strict=True)) == expected
    assert batch.weights.tolist() == [1.0 + at // length for at, _ in expected]


def test_batches_are_full_and_of_one_length() -> None:
    tokens, rng = 1280, np.random.default_rng(2)
    parts = [Part(rng.integers(4, 90, count)) for count in (300, 20)]
    plans = bucketed(parts, tokens, rng, BUCKETS)
    assert {length for length, _ in plans} == set(BUCKETS)
    for length, members in plans:
        assert len(members) == tokens // length
        for part, i in members:
            assert parts[part].length[i] - 1 <= length


def test_a_document_that_is_too_long_is_in_no_batch() -> None:
    part = Part(np.array([40, BUCKETS[-1] + 2]))
    plans = bucketed([part], 64, np.random.default_rng(0), BUCKETS)
    assert {i for _, members in plans for _, i in members} == {0}
