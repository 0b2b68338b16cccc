"""Following a clip: trials, and the criterion of a matched voice."""

from __future__ import annotations

import re

import pytest

from tests.training.speechlike import has_teacher
from training.evaluate import prose
from training.following import Listener, Outcome, trials
from training.studio import teach
from training.teacher import Teacher
from training.voices import NAMED, UNSEEN


def test_a_trial_says_two_sentences_that_its_clip_does_not() -> None:
    sentences = [f"Sentence {n}." for n in range(197)]
    found = trials(sentences, 100)
    assert [trial.number for trial in found] == list(range(100))
    assert {trial.voice for trial in found[: len(UNSEEN)]} == set(UNSEEN)
    for trial in found:
        said, text = (set(re.findall(r"\d+", t)) for t in (trial.said, trial.text))
        assert len(said) == len(text) == 2
        assert said.isdisjoint(text)
    assert len({trial.said for trial in found}) == 100


@pytest.mark.parametrize(
    ("pitch_error", "to_clip", "to_named", "followed"),
    [
        (0.1, 0.3, 0.4, (True, True)),
        (0.2, 0.3, 0.4, (False, True)),
        (0.15, 0.4, 0.4, (True, False)),
    ],
)
def test_both_pitch_and_timbre_have_to_follow(
    pitch_error: float, to_clip: float, to_named: float, followed: tuple[bool, bool]
) -> None:
    outcome = Outcome(pitch_error, to_clip, to_named, "slt")
    assert (outcome.has_pitch, outcome.has_timbre) == followed


@pytest.mark.skipif(not has_teacher(), reason="flite is not installed")
def test_a_voice_follows_itself_and_a_named_voice_does_not() -> None:
    pytest.importorskip("pyworld")
    teacher, trial = Teacher(), trials(prose(None), 4)[3]
    clip = teacher.speak(trial.said, trial.voice)
    assert clip is not None
    listener = Listener(teacher, trial, clip)
    itself = listener.compare(teach(teacher, trial.text, trial.voice))
    assert (itself.has_pitch, itself.has_timbre) == (True, True)
    other = listener.compare(teach(teacher, trial.text, NAMED[2]))
    assert (other.has_timbre, other.named) == (False, NAMED[2].name)
