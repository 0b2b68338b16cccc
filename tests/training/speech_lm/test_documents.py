"""What the language model learns from."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from tests.training.speech_lm.tokens import (
    KNOWN,
    ROWS,
    VOICE_ROWS,
    VOICE_TOKENS,
    rows,
    write_tables,
    write_tokens,
)
from training.speech_lm import documents
from training.speech_lm.documents import (
    BUCKETS,
    SYMBOLS,
    TEXT,
    WORDS,
    Documents,
    held_out,
    pronounced,
    pronounced_held_out,
    some_words,
    spoken,
    wanted,
)
from training.speech_lm.speech import BEFORE, Speech, token_files
from training.speech_lm.texts import Texts
from training.speech_lm.vocabulary import BRITISH, FIRST_SYMBOL, SPANISH, SPELLED, Symbols
from training.vocabulary import END_OF_SPEECH, END_OF_TEXT, FIRST_CODE, PHONEMES, START_OF_SPEECH


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Texts:
    monkeypatch.setattr("training.speech_lm.texts.HELD_OUT_LINE", 9)
    write_tables(tmp_path)
    return Texts.load(tmp_path / "phonemes", Symbols(KNOWN))


@pytest.fixture
def speech(tmp_path: Path, texts: Texts) -> Speech:
    for number in range(3):
        write_tokens(tmp_path / f"tokens_0_{number:04d}.npz", seed=number)
    (tmp_path / "tokens_0_0003.tmp.npz").write_bytes(b"not finished")
    return Speech(token_files(tmp_path), texts)


def parts_of(tokens: np.ndarray) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """The voice tokens, and every turn's text and codes."""
    turns, rest = [], tokens[VOICE_TOKENS:]
    while len(rest):
        start, end = (int(np.argmax(rest == t)) for t in (START_OF_SPEECH, END_OF_SPEECH))
        turns.append((rest[:start], rest[start + 1 : end]))
        rest = rest[end + 1 :]
    return tokens[:VOICE_TOKENS], turns


def read(text: np.ndarray, symbols: Symbols) -> str:
    """A text with its symbols in brackets."""
    out = ""
    for token in text.tolist():
        if token == SPELLED:
            out += "|"
        elif token >= FIRST_SYMBOL:
            out += symbols.all[token - FIRST_SYMBOL]
        else:
            out += chr(token)
    return out


def test_texts_are_ascii_and_words_stand_beside_their_symbols(texts: Texts) -> None:
    assert texts.text[2].tobytes() == b'"Bed fuzz fuzz gab2."'
    assert texts.aligned[2]
    pairs = [texts.bare(pair) for pair in texts.words(2)]
    assert [word for word, _ in pairs] == [b"Bed", b"fuzz", b"fuzz", b"gab2"]
    said = [texts.symbols.read(FIRST_SYMBOL + np.array(list(s))) for _, s in pairs]
    assert said == ["bˈəd", "faz", "faz", "gˈəb"]
    assert not texts.aligned[1] or texts.words(1)[0][0] == b"The-bad"
    assert texts.first.tolist() == [0, ROWS]
    assert 0 < texts.held_out.sum() < ROWS
    assert (texts.held_out[:ROWS] == texts.held_out[ROWS:]).all()


def test_a_pass_says_every_line_once(speech: Speech, texts: Texts) -> None:
    made = spoken(speech, texts, np.random.default_rng(0))
    assert sorted(made.order.tolist()) == speech.train.tolist()
    assert not texts.held_out[speech.text[made.order]].any()
    assert made.count.sum() == len(made.order)
    codes = 0
    for i in range(len(made.at)):
        tokens = made.tokens(i)
        assert tokens.dtype == np.int16
        exact = len(tokens) == made.length[i]
        assert exact or (made.way[i] == WORDS and len(tokens) < made.length[i])
        assert len(tokens) <= BUCKETS[-1]
        voice, turns = parts_of(tokens)
        assert (voice >= FIRST_CODE).all()
        assert len(turns) == made.count[i] - made.joined[i] + 1
        codes += sum(len(said) for _, said in turns)
    assert codes == speech.code_len[speech.train].sum()
    assert made.count.max() > 2
    assert made.joined.max() == 3
    assert set(made.way.tolist()) == {TEXT, SYMBOLS, WORDS}


@pytest.fixture
def bilingual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Speech, Texts]:
    """The same where every third session speaks Spanish."""
    monkeypatch.setattr("training.speech_lm.texts.HELD_OUT_LINE", 9)
    write_tables(tmp_path, "abe")
    for number in range(4):
        write_tokens(tmp_path / f"tokens_0_{number:04d}.npz", seed=number, third=2)
    texts = Texts.load(tmp_path / "phonemes", Symbols(KNOWN))
    return Speech(token_files(tmp_path), texts), texts


def test_spanish_texts_stand_behind_a_marker_with_their_letters(
    bilingual: tuple[Speech, Texts],
) -> None:
    speech, texts = bilingual
    assert texts.text[2 * ROWS].tobytes().decode() == '"Báñó gab0."'
    assert texts.text[0].tobytes() == b'"Bed gab0."'
    made, ways = spoken(speech, texts, np.random.default_rng(0)), set()
    for i in range(len(made.at)):
        spanish = bool(texts.spanish[speech.text[made.order[made.at[i]]]])
        tokens = made.tokens(i)
        assert len(tokens) == made.length[i] or made.way[i] == WORDS
        for text, _ in parts_of(tokens)[1]:
            assert (text[0] == SPANISH) == spanish
            assert SPANISH not in text[1:]
        ways |= {(spanish, int(made.way[i]))}
    assert {(True, TEXT), (False, TEXT)} <= ways
    asked = pronounced(texts, 200, random.Random(0))
    openings = {tuple(asked.tokens(i)[:2].tolist()) for i in range(200)}
    assert (PHONEMES, SPANISH) in openings
    assert (PHONEMES, BRITISH) in openings
    mine = held_out(speech, texts, TEXT, texts.spanish)
    assert len(mine.at)
    assert all(mine.tokens(i)[VOICE_TOKENS] == SPANISH for i in range(len(mine.at)))


def one(made: Documents, choose: np.ndarray) -> int:
    return int(np.flatnonzero(choose)[0])


def test_a_text_is_that_of_its_codes(speech: Speech, texts: Texts) -> None:
    made = spoken(speech, texts, np.random.default_rng(1))
    plain = one(made, (made.count > 1) & (made.joined == 1) & (made.way == TEXT))
    lines = made.order[made.at[plain] : made.at[plain] + made.count[plain]]
    _, turns = parts_of(made.tokens(plain))
    for line, (text, codes) in zip(lines, turns, strict=True):
        row = int(speech.text[line])
        assert bytes(text.tolist()) == texts.text[row].tobytes()
        assert set((codes - FIRST_CODE).tolist()) == {row % ROWS % 64}
    joined = one(made, (made.joined > 1) & (made.way == TEXT))
    lines = made.order[made.at[joined] : made.at[joined] + made.joined[joined]]
    text, codes = parts_of(made.tokens(joined))[1][0]
    assert bytes(text.tolist()) == b" ".join(texts.text[r].tobytes() for r in speech.text[lines])
    assert len(codes) == speech.code_len[lines].sum()


def test_texts_may_be_symbols_or_have_some_words_in_symbols(speech: Speech, texts: Texts) -> None:
    made = spoken(speech, texts, np.random.default_rng(2))
    whole = one(made, (made.way == SYMBOLS) & (made.joined == 1))
    row = int(speech.text[made.order[made.at[whole]]])
    text = parts_of(made.tokens(whole))[1][0][0]
    phonemes = rows("ab"[row // ROWS])[row % ROWS].split("\t")[0]
    assert read(text, texts.symbols) == f"|{phonemes}"
    mixed = np.flatnonzero((made.way == WORDS) & (made.joined == 1))
    found = [read(t, texts.symbols) for i in mixed for t, _ in parts_of(made.tokens(i))[1]]
    assert any(" |" in text or "|" in text[:1] for text in found)
    assert any("uzz" in text or "gab" in text for text in found if "|" in text)


@pytest.fixture
def unwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Speech, Texts]:
    """The same where some lines have a word without letters."""
    monkeypatch.setattr("training.speech_lm.texts.HELD_OUT_LINE", 9)
    monkeypatch.setattr("tests.training.speech_lm.tokens.rows", rows_without_letters)
    (tmp_path / "other").mkdir()
    write_tables(tmp_path / "other")
    texts = Texts.load(tmp_path / "other" / "phonemes", Symbols(KNOWN))
    write_tokens(tmp_path / "other" / "tokens_0_0000.npz")
    return Speech(token_files(tmp_path / "other"), texts), texts


def rows_without_letters(accent: str) -> list[str]:
    found = rows(accent)
    return [re.sub(r"gab\d+", "_", row) if n % 2 else row for n, row in enumerate(found)]


def test_words_without_letters_are_symbols_in_every_text(unwritten: tuple[Speech, Texts]) -> None:
    speech, texts = unwritten
    assert texts.unwritten.sum() == ROWS - 2  # every other one; one is another text
    made = spoken(speech, texts, np.random.default_rng(0))
    found: dict[int, list[str]] = {TEXT: [], SYMBOLS: [], WORDS: []}
    for i in range(len(made.at)):
        tokens = made.tokens(i)
        assert len(tokens) <= made.length[i]
        found[int(made.way[i])] += [read(t, texts.symbols) for t, _ in parts_of(tokens)[1]]
    assert not any("_" in text for way in found.values() for text in way)
    assert any(re.fullmatch(r'"Bed (fuzz )*\|gˈ[əi]b\."', text) for text in found[TEXT])
    assert any(re.fullmatch(r'"Bed (fuzz )*gab\d+\."', text) for text in found[TEXT])
    letters = pronounced(texts, 200, random.Random(0))
    assert not any(ord("_") in letters.tokens(i) for i in range(200))
    held = pronounced_held_out(texts)
    assert len(held.length) == (texts.held_out & ~texts.unwritten).sum()


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Speech, Texts]:
    """The same where every other line is a question."""
    monkeypatch.setattr("training.speech_lm.texts.HELD_OUT_LINE", 9)
    monkeypatch.setattr("tests.training.speech_lm.tokens.rows", rows_that_ask)
    (tmp_path / "other").mkdir()
    write_tables(tmp_path / "other")
    texts = Texts.load(tmp_path / "other" / "phonemes", Symbols(KNOWN))
    write_tokens(tmp_path / "other" / "tokens_0_0000.npz", sessions=20)
    return Speech(token_files(tmp_path / "other"), texts), texts


def rows_that_ask(accent: str) -> list[str]:
    return [
        row.replace(".\u201d", "?\u201d") if n % 2 else row for n, row in enumerate(rows(accent))
    ]


def test_codes_at_the_ends_of_questions_may_count_more(asking: tuple[Speech, Texts]) -> None:
    speech, texts = asking
    assert texts.asks.sum() == ROWS - 2  # every other one; one is another text
    speech.weigh_ends(3.0, 2.0)
    made = spoken(speech, texts, np.random.default_rng(0))
    seen = set()
    for i in range(len(made.at)):
        tokens, weights = made.weighted(i)
        assert np.array_equal(tokens, made.tokens(i))
        assert np.array_equal(weights > 0, wanted(tokens, VOICE_TOKENS))
        assert set(weights[tokens == END_OF_SPEECH]) == {1.0}
        lines = made.order[made.at[i] : made.at[i] + made.count[i]]
        found = np.split(weights[np.flatnonzero(tokens >= FIRST_CODE)[VOICE_TOKENS:]],
                         np.cumsum(speech.code_len[lines])[:-1])  # fmt: skip
        for line, own in zip(lines, found, strict=True):
            row, size = int(speech.text[line]) % ROWS, len(own)
            end = (6.0 if row % 4 == 1 else 3.0) if texts.asks[speech.text[line]] else 1.0
            first = max(0, size - 2 - BEFORE)
            assert own.tolist() == [1.0] * first + [end] * (size - first)
            seen.add(end)
    assert seen == {1.0, 3.0, 6.0}


def test_held_out_lines_are_of_some_kinds_apart(asking: tuple[Speech, Texts]) -> None:
    speech, texts = asking
    asked, others = (held_out(speech, texts, TEXT, kind) for kind in (texts.asks, ~texts.asks))
    assert sorted([*asked.order, *others.order]) == speech.held_out.tolist()
    assert len(asked.order)
    assert texts.asks[speech.text[asked.order]].all()
    ends = held_out(speech, texts, TEXT, texts.asks, only_ends=True)
    for i in range(len(ends.at)):
        tokens, weights = ends.weighted(i)
        size = min(BEFORE + 2, int(speech.code_len[ends.order[i]]))
        assert weights.sum() == size
        assert (tokens[weights > 0] >= FIRST_CODE).all()


def test_words_without_letters_may_be_in_parentheses() -> None:
    symbols = Symbols(KNOWN | {"(": 100, ")": 102})
    texts = Texts([["fˈad (bˈad) fˈad\tFad (_) fad"], ["bˈad\t_"]], symbols)
    words = [read(word, symbols) for word in some_words(texts, 0, seed=0, chance=0.0)]
    assert words == ["Fad", "(|bˈad)", "fad"]


def test_voice_tokens_are_a_row_of_their_session_or_its_voices_fixed_one(
    speech: Speech, texts: Texts
) -> None:
    made = spoken(speech, texts, np.random.default_rng(3))
    named = fixed = 0
    chosen = set()
    for i in range(len(made.at)):
        track = int(speech.track[made.order[made.at[i]]])
        voice = made.tokens(i)[:VOICE_TOKENS]
        named += speech.voice[track] >= 0
        if made.row[i] < 0:
            fixed += 1
            assert np.array_equal(voice, speech.fixed[int(speech.voice[track])])
            continue
        chosen.add(int(made.row[i]))
        assert np.array_equal(voice, speech.rows[track, made.row[i]])
    assert 0.3 < fixed / named < 0.7
    assert chosen == set(range(VOICE_ROWS))
    assert sorted(speech.fixed) == [0, 1, 2]
    assert (speech.fixed[1] - FIRST_CODE).tolist() == [4, 5, 6, 7]  # its first session's own row


def test_fixed_rows_of_an_earlier_run_stay(tmp_path: Path, speech: Speech, texts: Texts) -> None:
    kept = np.full(VOICE_TOKENS, FIRST_CODE + 9, np.int16)
    again = Speech(token_files(tmp_path), texts, {1: kept})
    assert np.array_equal(again.fixed[1], kept)
    assert np.array_equal(again.fixed[0], speech.fixed[0])


def test_codes_and_ends_are_predicted_but_no_voice(speech: Speech, texts: Texts) -> None:
    made = held_out(speech, texts, TEXT)
    assert len(made.at) == len(speech.held_out) > 0
    tokens = made.tokens(0)
    mask = wanted(tokens, VOICE_TOKENS)
    _, ((text, codes),) = parts_of(tokens)
    opening = VOICE_TOKENS + len(text) + 1
    assert mask.tolist() == [False] * opening + [True] * (len(codes) + 1)


def test_letters_to_sounds_are_of_lines_that_are_trained_on(texts: Texts) -> None:
    made = pronounced(texts, 300, random.Random(0))
    allowed = [texts.text[row].tobytes() for row in np.flatnonzero(~texts.held_out)]
    british = runs = 0
    for i in range(300):
        tokens = made.tokens(i)
        assert len(tokens) == made.length[i]
        assert tokens[0] == PHONEMES
        ends = np.flatnonzero(tokens == END_OF_TEXT)
        assert len(ends) == 2
        british += tokens[1] == BRITISH
        first = 2 if tokens[1] == BRITISH else 1
        text, said = bytes(tokens[first : ends[0]].tolist()), tokens[ends[0] + 1 : ends[1]]
        assert any(text in line for line in allowed)
        runs += text not in allowed
        assert (said >= FIRST_SYMBOL).all()
        assert ("i" in texts.symbols.read(said)) <= (tokens[1] == BRITISH)
        assert wanted(tokens, VOICE_TOKENS).sum() == len(said) + 1
    assert 60 < british < 240
    assert runs > 60
    assert len(pronounced_held_out(texts).length) == texts.held_out.sum()


def test_other_tables_than_those_that_were_spoken_are_refused(
    tmp_path: Path, texts: Texts, speech: Speech
) -> None:
    others = Texts([["bad\tbad"], ["bad\tbad"]], texts.symbols)
    with pytest.raises(ValueError, match="not those that were spoken"):
        Speech(token_files(tmp_path), others)
    with pytest.raises(ValueError, match="no tokens"):
        Speech([], texts)


def test_long_tracks_are_cut_where_a_sequence_ends(
    monkeypatch, speech: Speech, texts: Texts
) -> None:
    monkeypatch.setattr(documents, "BREAK", 0.0)
    monkeypatch.setattr(documents, "BUCKETS", (64, 160))
    made = spoken(speech, texts, np.random.default_rng(0))
    assert made.length.max() <= 160
    assert made.count.max() > 1
    assert made.count.sum() == len(speech.train)
