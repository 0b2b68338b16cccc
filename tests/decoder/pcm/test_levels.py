"""Removal of silence at the ends, loudness over segments: independent of the division."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder import LevelMatcher, LoudnessNormalizer, SilenceTrimmer

RATE = 16_000
FRAME = 160  # of the trimmer
KEPT = 800


def tone(seconds: float, amplitude: float = 0.3) -> np.ndarray:
    t = np.arange(round(seconds * RATE)) / RATE
    return (amplitude * np.sin(2 * np.pi * 200 * t)).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.full(round(seconds * RATE), 0.001, dtype=np.float32)


def pieces_of(samples: np.ndarray, cuts: list[int]) -> list[np.ndarray]:
    return np.split(samples, sorted(cut % (len(samples) + 1) for cut in cuts))


def trimmed(pieces: list[np.ndarray]) -> np.ndarray:
    trimmer = SilenceTrimmer(RATE)
    parts = [trimmer.process(piece) for piece in pieces]
    return np.concatenate([*parts, trimmer.finish()])


SPEECH = np.concatenate([tone(0.2), silence(0.7), tone(0.1)])


@given(cuts=st.lists(st.integers(0, 2**20), max_size=12))
@settings(max_examples=40)
def test_only_the_ends_are_trimmed(cuts: list[int]) -> None:
    whole = np.concatenate([silence(0.5), SPEECH, silence(0.9)])
    expected = np.concatenate([silence(0.05), SPEECH, silence(0.05)])
    np.testing.assert_array_equal(trimmed(pieces_of(whole, cuts)), expected)


@pytest.mark.parametrize("lead", [0.0, 0.02, 0.05])
def test_short_ends_stay(lead: float) -> None:
    whole = np.concatenate([silence(lead), SPEECH, silence(lead)])
    np.testing.assert_array_equal(trimmed([whole]), whole)


def test_speech_is_returned_at_once_and_little_silence_is_held() -> None:
    trimmer = SilenceTrimmer(RATE)
    for _ in range(200):
        assert len(trimmer.process(silence(0.1))) == 0
    assert trimmer.num_dropped == 200 * 1600 - KEPT
    assert len(trimmer.process(tone(0.1))) == KEPT + 1600
    assert len(trimmer.process(tone(0.105))) == 1600  # half a frame is held
    assert trimmer.num_dropped == 200 * 1600 - KEPT


def test_silence_alone_is_nothing() -> None:
    trimmer = SilenceTrimmer(RATE)
    assert len(trimmer.process(silence(1.0))) == len(trimmer.finish()) == 0
    assert trimmer.num_dropped == RATE


def test_each_utterance_has_its_ends() -> None:
    trimmer = SilenceTrimmer(RATE)
    for _ in range(2):
        out = [trimmer.process(silence(0.3)), trimmer.process(tone(0.1)), trimmer.finish()]
        np.testing.assert_array_equal(
            np.concatenate(out), np.concatenate([silence(0.05), tone(0.1)])
        )
    trimmer.process(np.concatenate([tone(0.1), silence(0.3)]))
    trimmer.drop()
    assert len(trimmer.process(silence(0.3))) == 0


def kept(segments: list[list[np.ndarray]]) -> list[np.ndarray]:
    keeper, out = LoudnessNormalizer(RATE), []
    for pieces in segments:
        keeper.begin_segment()
        out.append(np.concatenate([keeper.process(piece) for piece in pieces]))
    return out


def level_db(samples: np.ndarray) -> float:
    return float(10 * np.log10((samples.astype(np.float64) ** 2).mean()))


@pytest.mark.parametrize("db", [-5.0, -2.0, 2.0, 5.0])
def test_later_segments_come_to_the_level_of_the_first(db: float) -> None:
    first = tone(1.0, 0.2)
    other = tone(4.0, 0.2 * 10 ** (db / 20))
    same, moved = kept([[first], [other]])
    np.testing.assert_array_equal(same, first)
    assert abs(level_db(moved[-RATE:]) - level_db(first)) < 0.15 * abs(db)
    before = np.abs(level_db(other[-RATE:]) - level_db(first))
    assert before > 4 * abs(level_db(moved[-RATE:]) - level_db(first))


def test_a_level_is_changed_by_six_decibels_at_most_and_never_clips() -> None:
    _, quiet = kept([[tone(1.0, 0.5)], [tone(6.0, 0.01)]])
    assert level_db(quiet[-RATE:]) - level_db(tone(1.0, 0.01)) == pytest.approx(6.0, abs=0.01)
    spiky = tone(4.0, 0.1)
    spiky[::1600] = 0.9
    _, bounded = kept([[tone(1.0, 0.5)], [spiky]])
    assert np.abs(bounded).max() <= 0.98


def test_the_gain_never_jumps() -> None:
    steady = np.full(4 * RATE, 0.05, dtype=np.float32)
    _, moved = kept([[np.full(RATE, 0.2, dtype=np.float32)], [steady]])
    assert np.abs(np.diff(20 * np.log10(moved))).max() < 0.25 / 320 * 1.1


def test_silence_and_short_segments_set_no_level() -> None:
    segments = [silence(1.0), tone(0.1, 0.1), tone(1.0, 0.2), tone(3.0, 0.3)]
    out = kept([[segment] for segment in segments])
    for before, after in zip(segments[:3], out, strict=False):
        np.testing.assert_array_equal(after, before)
    assert level_db(out[3][-RATE:]) < level_db(segments[3][-RATE:]) - 2


@given(cuts=st.lists(st.integers(0, 2**20), max_size=12))
@settings(max_examples=30)
def test_how_segments_are_cut_changes_nothing(cuts: list[int]) -> None:
    segments = [tone(0.5, 0.1), np.concatenate([silence(0.13), tone(0.7, 0.25)])]
    whole = kept([[segment] for segment in segments])
    for expected, found in zip(whole, kept([pieces_of(s, cuts) for s in segments]), strict=True):
        np.testing.assert_array_equal(found, expected)


def matched(segments: list[list[np.ndarray]]) -> np.ndarray:
    matcher, out = LevelMatcher(RATE), []
    for pieces in segments:
        matcher.begin_segment()
        out += [matcher.process(piece) for piece in pieces]
    return np.concatenate([*out, matcher.finish()])


@pytest.mark.parametrize("db", [-11.0, -3.0, 6.0, 11.0])
@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_another_voice_begins_at_the_level_of_the_first(db: float, seconds: float) -> None:
    first, other = tone(1.0, 0.1), tone(seconds, 0.1 * 10 ** (db / 20))
    found = matched([[first], [np.concatenate([silence(0.2), other])]])
    np.testing.assert_array_equal(found[:RATE], first)
    assert len(found) == RATE + 3200 + len(other)
    spoken = found[RATE + 3200 :]
    assert level_db(spoken) == pytest.approx(level_db(first), abs=0.2)
    np.testing.assert_allclose(spoken, other * (spoken[100] / other[100]), atol=1e-5)  # no ramp


def test_levels_change_by_twelve_decibels_at_most_and_never_clip() -> None:
    quiet = tone(2.0, 0.01)
    found = matched([[tone(1.0, 0.3)], [quiet]])[RATE:]
    assert level_db(found) - level_db(quiet) == pytest.approx(12.0, abs=0.01)
    loud = matched([[tone(1.0, 0.01)], [tone(2.0, 0.3)]])[RATE:]
    assert level_db(loud) - level_db(tone(2.0, 0.3)) == pytest.approx(-12.0, abs=0.01)
    spiky = tone(2.0, 0.1)
    spiky[::1600] = 0.9
    assert np.abs(matched([[tone(1.0, 0.5)], [spiky]])).max() <= 0.981


def test_silence_is_no_level_and_stays_silent() -> None:
    segments = [silence(1.0), tone(0.1, 0.3), tone(1.0, 0.1), silence(2.0)]
    found = matched([[segment] for segment in segments])
    np.testing.assert_array_equal(found, np.concatenate(segments))
    assert len(matched([])) == 0


def test_the_first_voice_is_not_delayed_and_others_are_by_the_measured_sound() -> None:
    matcher = LevelMatcher(RATE)
    assert len(matcher.process(tone(0.3))) == len(tone(0.3))
    matcher.begin_segment()
    assert len(matcher.process(tone(1.4))) == 0
    assert len(matcher.process(tone(0.2))) == len(tone(1.6))
    assert len(matcher.process(tone(0.1))) == len(tone(0.1))
    matcher.begin_segment()
    assert len(matcher.process(tone(0.5))) == 0
    matcher.begin_segment()
    assert len(matcher.process(tone(0.1))) == len(tone(0.5))


@given(cuts=st.lists(st.integers(0, 2**20), max_size=12))
@settings(max_examples=30)
def test_how_voices_are_cut_changes_nothing(cuts: list[int]) -> None:
    segments = [tone(0.5, 0.1), np.concatenate([silence(0.13), tone(2.7, 0.25)]), tone(0.2)]
    expected = matched([[segment] for segment in segments])
    found = matched([pieces_of(segment, cuts) for segment in segments])
    np.testing.assert_array_equal(found, expected)
