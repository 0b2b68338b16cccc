"""Jumps across joins: their measurement, and the positions of joins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.fakes import build_tiny_checkpoint
from training.joins import FRAME, Jumps, Track, figures, measure, one_by_one
from training.studio import Studio, Take
from training.teacher import SAMPLE_RATE


def buzz(seconds: float, level: float = 0.1, formant_hz: float = 700.0) -> np.ndarray:
    """Return a voice of 120 Hz with one formant."""
    t = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    partials = np.arange(1, 60) * 120.0
    loudness = np.exp(-(((partials - formant_hz) / 400) ** 2)) + 0.05
    wave = (loudness[:, None] * np.sin(2 * np.pi * partials[:, None] * t)).sum(0)
    return (level * wave / np.sqrt(np.mean(wave**2))).astype(np.float32)


def jumps_of(*pieces: np.ndarray) -> tuple[Jumps, Jumps]:
    pytest.importorskip("pyworld")
    silence = np.zeros(SAMPLE_RATE // 5, np.float32)
    joins, inside = Jumps(), Jumps()
    takes = [Take(np.concatenate([silence, piece, silence])) for piece in pieces]
    measure(one_by_one(takes), joins, inside)
    return joins, inside


def test_a_join_is_heard_where_the_level_jumps() -> None:
    joins, inside = jumps_of(buzz(1.5), buzz(1.5, level=0.2), buzz(1.5, level=0.2))
    assert joins.level == pytest.approx([6.02, 0.0], abs=0.3)
    assert inside.level == pytest.approx([0.0, 0.0, 0.0], abs=0.3)
    assert max(joins.timbre) < 1


def test_a_join_is_heard_where_the_timbre_jumps() -> None:
    joins, inside = jumps_of(buzz(1.5), buzz(1.5, formant_hz=1800.0))
    assert joins.timbre[0] > 5 * max(inside.timbre)
    assert max(joins.level) < 1.5


def test_too_little_speech_is_no_place_to_listen() -> None:
    joins, inside = jumps_of(buzz(1.5), buzz(0.3))
    assert (joins.level, len(inside.level)) == ([], 1)


def test_a_track_hears_nothing_outside_its_bounds() -> None:
    pytest.importorskip("pyworld")
    track = Track(np.concatenate([buzz(1.0, level=0.3), buzz(3.0)]))
    second = SAMPLE_RATE // FRAME
    assert track.middle(second, 4 * second) == pytest.approx(2.5 * second, abs=3)
    jump = track.jump(second, second + 60, 4 * second)
    assert jump is not None
    assert jump[0] == pytest.approx(0.0, abs=0.3)
    assert track.jump(second, second + 10, 4 * second) is None


def test_a_take_knows_its_joins(tmp_path: Path) -> None:
    studio = Studio(build_tiny_checkpoint(tmp_path / "model"))
    one = "He went to the harbour and waited there until the evening, for nobody had told him. "
    short, long = studio.speak(["Yes.", 4 * one], studio.named("slt"), seed=1)
    studio.close()
    assert short.joins == ()
    assert len(long.joins) >= 1
    assert list(long.joins) == sorted(set(long.joins))
    assert 0 < long.joins[0] <= long.joins[-1] < len(long.samples)


def test_the_teacher_at_joins_is_the_bar_of_the_voice_there() -> None:
    found = {
        ("voice", "joins"): Jumps([4.0, 9.0, 2.0], [3.0]),
        ("voice", "inside"): Jumps([1.0], [1.0]),
        ("teacher", "joins"): Jumps([1.0, 3.5], [1.0, 2.5]),
        ("teacher", "inside"): Jumps(),
    }
    count, *others = figures(found)
    assert count.value == 3
    bars = {figure.name: (figure.bar, figure.reached) for figure in others if figure.bar}
    assert bars == {
        "voice, level at joins": (3.25, False),
        "voice, timbre at joins": (2.75, False),
    }
    assert [figure.value for figure in others if "teacher, level" in figure.name] == [2.25, 0.0]


def test_jumps_are_numbers_that_json_knows() -> None:
    joins, _ = jumps_of(buzz(1.0), buzz(1.0))
    assert {type(value) for value in (*joins.level, *joins.timbre)} == {float}
