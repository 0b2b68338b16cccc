"""Voices: derived ones, and those that training must never use."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest

from training.voices import (
    FIXED_PITCH,
    FORMANT_STEP,
    NAMED,
    NUM_UNNAMED,
    TEACHERS,
    TURNS,
    UNSEEN,
    VOICES,
    Voice,
    voice_of,
)


def test_the_teachers_come_first_and_unchanged() -> None:
    assert tuple(voice.name for voice in NAMED[: len(TEACHERS)]) == TEACHERS
    assert all((v.pitch, v.formants) == (1, 1) for v in NAMED[: len(TEACHERS)])
    assert len(NAMED) == 8
    assert len({voice.name for voice in NAMED}) == len(NAMED)
    assert all(voice.description for voice in NAMED)
    assert VOICES[: len(NAMED)] == NAMED
    assert len(VOICES) == len(NAMED) + NUM_UNNAMED


def test_an_unseen_voice_is_never_trained_on() -> None:
    """No voice of the same teacher is so near in pitch and formants that it is almost the same."""
    assert set(UNSEEN).isdisjoint(VOICES)
    for unseen in UNSEEN:
        others = [v for v in VOICES[len(NAMED) :] if v.teacher == unseen.teacher]
        distance = min(
            math.hypot(
                math.log(v.pitch_hz / unseen.pitch_hz) / 3, math.log(v.formants / unseen.formants)
            )
            for v in others
        )
        assert distance >= 0.03 - 1e-9


def test_unseen_voices_lie_between_and_beyond_those_that_are_trained_on() -> None:
    def is_beyond(unseen: Voice) -> bool:
        voices = [voice for voice in VOICES if voice.teacher == unseen.teacher]
        return any(
            not min(map(value, voices)) <= value(unseen) <= max(map(value, voices))
            for value in (lambda voice: voice.pitch_hz, lambda voice: voice.formants)
        )

    assert 2 <= sum(map(is_beyond, UNSEEN)) <= len(UNSEEN) - 10


@pytest.mark.parametrize("voice", [*NAMED, *UNSEEN, VOICES[-1]])
def test_formants_move_by_a_ratio_that_can_be_resampled(voice: object) -> None:
    assert isinstance(voice, Voice)
    assert FORMANT_STEP % voice.formants.denominator == 0
    assert Fraction(3, 4) < voice.formants < Fraction(5, 4)


def test_a_fixed_pitch_moves_with_the_formants_only() -> None:
    for voice in VOICES:
        if voice.teacher in FIXED_PITCH:
            assert voice.pitch == pytest.approx(float(voice.formants))


def test_every_line_meets_every_turn() -> None:
    """No named voice has a text of its own, and the shares are those of the turns."""
    for line in (0, 5, 801):
        spoken = [voice_of(line, line // 3, turn) for turn in range(len(TURNS))]
        named = Counter(voice for voice in spoken if voice < len(NAMED))
        assert named == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1}
        assert len(TURNS) / 3 < len(spoken) - named.total() < 2 * len(TURNS) / 3
        assert all(voice < len(VOICES) for voice in spoken)
    unnamed = {voice_of(line, line, 0) for line in range(4000)} - set(range(len(NAMED)))
    assert len(unnamed) > 0.8 * NUM_UNNAMED
