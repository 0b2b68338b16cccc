"""Training sequences: their beginnings, and their targets."""

from __future__ import annotations

import numpy as np
import pytest

from training.documents import (
    BUCKETS,
    HELD_OUT_LINE,
    Documents,
    Speech,
    assemble,
    bucketed,
    compose,
    single_turns,
    target_mask,
)
from training.pronunciations import Pairs, PhonemeTask, read_pairs
from training.strings import Strings
from training.vocabulary import (
    ANY_VOICE,
    END_OF_SPEECH,
    END_OF_TEXT,
    FIRST_CODE,
    FIRST_VOICE,
    PAD,
    PHONEMES,
    START_OF_SPEECH,
)
from training.voices import NAMED

LINES = [f"Line number {n} of {'many ' * (n % 7)}" for n in range(2 * HELD_OUT_LINE)]
UNNAMED = len(NAMED) + 3
VOICES = (0, 3, UNNAMED)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    """Write two parts of codes in the format of `training.codes`; each clip's codes identify its
    line.
    """
    rng = np.random.default_rng(4)
    paths = []
    for part in range(2):
        lines = np.arange(part * HELD_OUT_LINE, part * HELD_OUT_LINE + 90)
        lengths = rng.integers(4, 60, len(lines))
        voices = rng.choice(VOICES, len(lines))
        voices[0] = 0  # a named voice says the held-out line
        starts = np.cumsum(lengths) - lengths
        sounds = "\n".join("L1N" for _ in lines)
        paths.append(tmp_path_factory.mktemp("codes") / f"codes{part}.npz")
        np.savez(
            paths[-1],
            codes=np.repeat(lines % 97, lengths).astype(np.uint16),
            clips=np.stack([starts, lengths, lines, voices], 1),
            sounds=np.frombuffer(sounds.encode(), np.uint8),
        )
    return Speech(paths, LINES)


@pytest.fixture(scope="module")
def parts(speech: Speech, tmp_path_factory: pytest.TempPathFactory) -> list:
    words = tmp_path_factory.mktemp("words") / "words.tsv"
    words.write_text("alpha\tABCDE\nbeta\tFGHI\n")
    none = Pairs(Strings([]), Strings([]))
    task = PhonemeTask(0.2, (0.3, 0.7), [read_pairs(words)], LINES, none)
    return compose(speech, np.random.default_rng(1), task)


def documents(speech: Speech, parts: list) -> list[np.ndarray]:
    return [part.tokens(speech, i) for part in parts for i in range(len(part.first))]


def turns_of(tokens: np.ndarray) -> list[np.ndarray]:
    """Return a speech document's turns, each with its end."""
    ends = np.flatnonzero(tokens == END_OF_SPEECH) + 1
    return np.split(tokens[1:], ends[:-1] - 1)


def test_a_turn_is_a_line_and_its_codes(speech: Speech) -> None:
    parts = single_turns(speech, np.arange(len(speech.line)))
    for i in (1, 95, 150):
        tokens, line = parts.tokens(speech, i), int(speech.line[i])
        start = int(np.argmax(tokens == START_OF_SPEECH))
        assert bytes(tokens[1:start].astype(np.uint8)).decode() == LINES[line]
        assert set(tokens[start + 1 : -1]) == {FIRST_CODE + line % 97}
        assert tokens[-1] == END_OF_SPEECH
        assert len(tokens) == parts.length[i]


def test_a_voice_without_a_name_begins_with_any_voice(speech: Speech, parts: list) -> None:
    for part in parts:
        if isinstance(part, Documents):
            for i in range(len(part.first)):
                clips = part.clips[part.at[i] : part.at[i] + part.count[i]]
                (voice,) = set(speech.voice[clips].tolist())
                first = part.tokens(speech, i)[0]
                if voice == UNNAMED:
                    assert first == ANY_VOICE
                    assert part.count[i] > 1 or part.length[i] > BUCKETS[-3]
                else:
                    assert first == FIRST_VOICE + voice or (part.count[i] > 1)


def test_documents_have_one_to_four_turns_of_their_length(speech: Speech, parts: list) -> None:
    counts = set()
    for part in parts:
        for i in range(len(part.first)):
            tokens = part.tokens(speech, i)
            assert len(tokens) == part.length[i]
            if isinstance(part, Documents):
                turns = turns_of(tokens)
                assert all(turn[-1] == END_OF_SPEECH for turn in turns)
                assert len(turns) == part.count[i] - part.joined[i]
                counts.add(part.count[i])
    assert counts == {1, 2, 3, 4}


def test_a_joined_turn_says_two_lines_of_one_voice(speech: Speech) -> None:
    seen, rng = set(), np.random.default_rng(0)
    for part in (part for _ in range(8) for part in compose(speech, rng)):
        assert isinstance(part, Documents)
        for i in np.flatnonzero(part.joined):
            clips = part.clips[part.at[i] : part.at[i] + part.count[i]]
            first, *others = turns_of(part.tokens(speech, i))
            start = int(np.argmax(first == START_OF_SPEECH))
            said = bytes(first[:start].astype(np.uint8)).decode()
            lines = [LINES[line] for line in speech.line[clips[:2]]]
            assert said == ("" if part.textless[i] else " ".join(lines))
            codes = np.repeat(speech.line[clips[:2]] % 97, speech.code_len[clips[:2]])
            assert np.array_equal(first[start + 1 : -1], FIRST_CODE + codes)
            assert len(others) == part.count[i] - 2 > 0
            assert part.first[i] == ANY_VOICE
            seen.add(bool(part.textless[i]))
    assert seen == {False, True}


def test_clips_are_followed_mostly_of_unnamed_voices(speech: Speech) -> None:
    rng = np.random.default_rng(2)
    followed = []
    for _ in range(10):
        for part in compose(speech, rng):
            assert isinstance(part, Documents)
            several = (part.first == ANY_VOICE) & (part.count > 1)
            followed += (speech.voice[part.clips[part.at[several]]] == UNNAMED).tolist()
    assert np.mean(followed) > 0.9


def test_only_a_followed_voices_first_text_is_left_out(speech: Speech) -> None:
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(6):
        for part in compose(speech, rng):
            assert isinstance(part, Documents)
            for i in np.flatnonzero(part.textless):
                first, *others = turns_of(part.tokens(speech, i))
                assert part.first[i] == ANY_VOICE
                assert first[0] == START_OF_SPEECH
                assert others
                assert all(turn[0] < 256 for turn in others)
                seen += 1
    assert seen > 5


def test_targets_are_codes_and_ends_and_sounds_alone(speech: Speech, parts: list) -> None:
    for tokens in documents(speech, parts):
        mask = target_mask(tokens)
        if tokens[0] == PHONEMES:
            end = int(np.argmax(tokens == END_OF_TEXT))
            assert not mask[: end + 1].any()
            assert mask[end + 1 :].all()
            assert tokens[-1] == END_OF_TEXT
        else:
            assert np.array_equal(mask, (tokens >= FIRST_CODE) | (tokens == END_OF_SPEECH))
            assert not mask[0]


def test_a_batch_predicts_each_target_from_what_is_before_it(speech: Speech, parts: list) -> None:
    rows = documents(speech, parts)[:3]
    length = max(map(len, rows))
    batch = assemble(rows, length, 4)
    assert batch.ids.shape == (4, length)
    assert (batch.ids[3] == PAD).all()
    expected = [
        (row * length + at - 1, int(tokens[at]))
        for row, tokens in enumerate(rows)
        for at in np.flatnonzero(target_mask(tokens))
    ]
    assert list(zip(batch.chosen.tolist(), batch.targets.tolist(), strict=True)) == expected


def test_held_out_lines_are_in_no_document(speech: Speech, parts: list) -> None:
    held_out = {0, HELD_OUT_LINE}
    used = {int(line) for p in parts if isinstance(p, Documents) for line in speech.line[p.clips]}
    assert held_out.isdisjoint(used)
    assert set(speech.line[speech.held_out]) == held_out
    assert set(speech.line[speech.train]) == set(speech.line) - held_out


def test_batches_are_full_and_of_one_length(parts: list) -> None:
    tokens = 1280
    for length, members in bucketed(parts, tokens, np.random.default_rng(2)):
        assert length in BUCKETS
        assert len(members) == max(1, tokens // length)
        for part, i in members:
            assert parts[part].length[i] - 1 <= length


def test_a_document_that_is_too_long_is_in_no_batch() -> None:
    part = Documents(*(np.zeros(2, np.int64) for _ in range(6)), np.array([40, BUCKETS[-1] + 2]))
    plans = bucketed([part], 64, np.random.default_rng(0))
    assert {i for _, members in plans for _, i in members} == {0}


def test_little_speech_has_little_of_the_tokens(
    speech: Speech, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = tmp_path_factory.mktemp("words") / "words.tsv"
    words.write_text("alpha\tABCDE\nbeta\tFGHI\n")
    none = Pairs(Strings([]), Strings([]))
    task = PhonemeTask(0.4, (0, 1), [read_pairs(words)], LINES, none)
    for fullness, share in ((1.0, 0.6), (0.25, 0.15)):
        parts = compose(speech, np.random.default_rng(1), task, fullness)
        tokens = [int(part.length.sum()) for part in parts]
        spoken = sum(n for n, p in zip(tokens, parts, strict=True) if isinstance(p, Documents))
        assert spoken / sum(tokens) == pytest.approx(share, rel=0.1)
