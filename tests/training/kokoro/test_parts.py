"""What surrounds the teacher: its package's names, packed weights, voices, phonemes, lines."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import hard_texts
from training import templates
from training.kokoro.convert import module_of, without_side
from training.kokoro.lines import (
    ASKED,
    SHARES,
    SINGLE_WORDS,
    alike,
    choose,
    kind_of,
    words_by_initial,
)
from training.kokoro.packages import GRAPH, HASHES, PackageError, check, fetch
from training.kokoro.phonemes import accents_in, correct, ids_of, read_table, table, write_table
from training.kokoro.style import HALF, LENGTHS, StyleBook, Voice, thin
from training.kokoro.weights import Quantised, copy_without, pack, unpack

QUESTIONS = Path(templates.__file__).with_name("questions.txt")


@pytest.mark.parametrize(
    ("node", "module"),
    [
        ("/encoder/text_encoder/cnn.0/cnn.0.0/Conv_quant", "text_encoder.cnn.0.0"),
        ("/encoder/F0.1/pool/ConvTranspose", "predictor.F0.1.pool"),
        ("/encoder/shared/LSTM_quant", "predictor.shared"),
        ("/decoder/decoder/decode.2/conv1x1/Conv_quant", "decoder.decode.2.conv1x1"),
        ("/encoder/bert/encoder/layers.0/dense_7/MatMul_quant", "bert.encoder.layers.0.dense"),
    ],
)
def test_a_nodes_scope_is_its_module(node: str, module: str) -> None:
    assert module_of(node) == module


def test_a_constant_loses_the_side_of_the_graph_only() -> None:
    assert without_side("decoder.decoder.encode.norm1.fc.bias") == "decoder.encode.norm1.fc.bias"


def test_packed_weights_come_back(tmp_path: Path) -> None:
    values = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)
    scale, zero = np.array([[0.5], [1.0], [2.0]], np.float32), np.array([[1], [0], [-1]], np.int8)
    pack({"a.weight": Quantised(values, scale, zero), "a.bias": np.ones(3)}, tmp_path / "w.xz")
    found = unpack(tmp_path / "w.xz")
    assert set(found) == {"a.weight", "a.bias"}
    wanted = (values.astype(np.float32) - zero) * scale
    assert torch.equal(found["a.weight"], torch.from_numpy(wanted))
    copy_without(tmp_path / "w.xz", lambda name: name.startswith("a.bias"), tmp_path / "less.xz")
    (left,) = unpack(tmp_path / "less.xz").values()
    assert torch.equal(left, found["a.weight"])


def test_another_teacher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="missing"):
        check(tmp_path)
    for name in HASHES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"other weights")
    with pytest.raises(PackageError, match=re.escape(GRAPH)):
        check(tmp_path)


def test_a_folder_without_the_teacher_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = tmp_path / "npm" / "package" / GRAPH
    graph.parent.mkdir(parents=True)
    graph.write_bytes(b"other weights")
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f"#!/bin/sh\ntar czf one.tgz -C {tmp_path / 'npm'} package && echo one.tgz\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(npm.parent), prepend=":")
    (tmp_path / "out" / "package" / "build").mkdir(parents=True)
    with pytest.raises(PackageError, match="another teacher"):
        fetch(tmp_path / "out")
    assert (tmp_path / "out" / "package" / GRAPH).read_bytes() == b"other weights"


@pytest.fixture
def book() -> StyleBook:
    rows = {f"{language}{sex}_{n}": np.full((300, 256), n, np.float16)
            for language in "abz" for sex in "fm" for n in range(1, 4)}  # fmt: skip
    return StyleBook(rows, torch.device("cpu"))


def test_halves_of_a_voice_are_weighted_means(book: StyleBook) -> None:
    voice = Voice((("af_1", 0.5), ("zf_3", 0.5)), (("bf_2", 0.25), ("af_3", 0.75)))
    style = book.style(voice, 40)
    assert style[:HALF].tolist() == [2.0] * HALF
    assert style[HALF:].tolist() == [2.75] * HALF
    assert (voice.accent, voice.sex) == ("a", "f")
    assert book.number(voice) == -1
    assert book.english[book.number(Voice.named("bm_2"))] == "bm_2"


def test_drawn_voices_are_english_and_of_one_sex(book: StyleBook) -> None:
    rng = random.Random(0)
    for _ in range(50):
        voice = book.draw(rng)
        names = [name for name, _ in (*voice.timbre, *voice.prosody)]
        assert {name[1] for name in names} == {voice.sex}
        assert all(name[0] in "ab" for name, _ in voice.prosody)
        assert sum(share for _, share in voice.timbre) == pytest.approx(1)
        assert sum(share for _, share in voice.prosody) == pytest.approx(1)


def test_spanish_voices_have_the_prosody_of_spanish_ones() -> None:
    english = [f"{accent}{sex}_{n}" for accent in "ab" for sex in "fm" for n in range(2)]
    others = ["ef_dora", "em_alex", "ff_siwis", "im_nicola", "jf_alpha", "jm_kumo", "pm_alex"]
    names = [*english, *others]
    rows = {name: np.zeros((2, 256), np.float16) for name in names}
    book, rng = StyleBook(rows, torch.device("cpu")), random.Random(0)
    assert book.named == (*english, "ef_lucia", "em_diego")
    drawn = [book.draw(rng, 0.5, 0.5) for _ in range(200)]
    spanish = [voice for voice in drawn if voice.accent == "e"]
    assert 70 < len(spanish) < 130
    named = {book.number(voice) for voice in spanish}
    assert named == {-1, 8, 9}
    for voice in spanish:
        (own, share), *others = voice.prosody
        assert own in ("ef_dora", "em_alex")
        assert share >= 0.6
        assert all(name[0] in "efip" for name, _ in others)
        assert {name[1] for name, _ in (*voice.timbre, *voice.prosody)} == {voice.sex}
        assert sum(part for _, part in voice.timbre) == pytest.approx(1)
        assert sum(part for _, part in voice.prosody) == pytest.approx(1)
    assert any(name[0] in "abj" for voice in spanish for name, _ in voice.timbre)


def test_thinned_rows_are_filled_in() -> None:
    steps = np.linspace(0, 1, 510)[:, None].repeat(256, 1).astype(np.float32)
    few = thin({"af_one": steps}, 8, 256)
    assert len(few["af_one"]) == len(few[LENGTHS]) == 33
    whole, thinned = (StyleBook(rows, torch.device("cpu")) for rows in ({"af_one": steps}, few))
    voice = Voice.named("af_one")
    for length in (1, 8, 99, 256):
        assert torch.allclose(whole.style(voice, length), thinned.style(voice, length), atol=1e-5)


@pytest.mark.parametrize(
    ("word", "guess", "before", "tag"),
    [
        ("?", "NN", "NN", "."),
        ("to", "IN", "VB", "TO"),
        ("record", "NN", "MD", "VB"),
        ("record", "VB", "DT", "NN"),
        ("read", "NN", "PRP", "VBP"),
        ("'s", "POS", "PRP", "VBZ"),
        ("'s", "POS", "NNP", "POS"),
        ("the", "NN", "", "DT"),
        ("live", "VBP-X", "", "VBP"),
        ("12", "NN", "", "CD"),
    ],
)
def test_neighbours_decide_what_a_word_is(word: str, guess: str, before: str, tag: str) -> None:
    assert correct(word, guess, before) == tag


def test_a_folder_has_english_and_perhaps_spanish(tmp_path: Path) -> None:
    assert accents_in(tmp_path) == ["a", "b"]
    write_table(["ˈola\tHola"], table(tmp_path, "e"))
    assert accents_in(tmp_path) == ["a", "b", "e"]


def test_tables_of_phonemes_come_back(tmp_path: Path) -> None:
    rows = ["hˈI\tHi", "ðɛɹ\tThere"]
    write_table(rows, table(tmp_path, "a"))
    assert read_table(table(tmp_path, "a")) == rows
    assert ids_of("hx", {"h": 50}) == [50]


def test_all_kinds_of_lines_are_chosen() -> None:
    corpus = [f"The {word} house stands near the river." for word in ["big", "old", "red", "tall"]]
    corpus += ["Is it here?", "Apples", "It is in the garden,", "ALL OF IT.", "Volume 3 of it is."]
    corpus += ["It went on and on, " + "and on, " * 14 + "and it was over."]
    lines = choose(corpus, 200, 1)
    others = [line for line in lines if line not in SINGLE_WORDS]
    assert not set(SINGLE_WORDS) & set(hard_texts.SINGLE)  # by which voices are judged
    assert len(set(others)) == len(others) < len(lines)
    kinds = {kind_of(line) for line in lines}
    assert {"long", "prose", "question", "clause", "short", "exclamation"} <= kinds
    assert any(line.startswith("“") for line in lines)
    assert "ALL OF IT." not in lines
    assert sum(SHARES.values()) == pytest.approx(1)
    assert sum(ASKED.values()) == pytest.approx(1)
    assert lines == choose(corpus, 200, 1)
    asking = [line for line in choose(corpus, 1000, 1, 0.9) if line.endswith("?")]
    tags = [line for line in asking if re.search(r", (right|yes|no|\w+n't \w+|\w+ \w+)\?$", line)]
    others = [line for line in asking if re.match(r"(Wh|How|Which|Since)", line)]
    assert 0.05 < len(tags) / len(asking) < 0.25
    assert 0.1 < len(others) / len(asking) < 0.3
    assert max(len(line.split()) for line in asking) <= templates.MOST_ASKED


def test_words_of_one_initial_stand_in_a_row() -> None:
    middles = [f"{one}{other}" for one in "aeiou" for other in "bdfgklmnt"]
    lines = ["the old house", " ".join(f"b{middle}" for middle in middles)] * 3
    lines.append(" ".join(f"c{middle}" for middle in middles))
    (found,) = words_by_initial(lines)  # all of the others are rare
    assert found == sorted(f"b{middle}" for middle in middles)
    words = alike(random.Random(1), found).rstrip(".!").lower().split()
    assert len([word for word in words if word in found]) >= 4


@pytest.mark.parametrize(
    ("one", "several"),
    [
        ("lamp", "lamps"),
        ("key", "keys"),
        ("ferry", "ferries"),
        ("branch", "branches"),
        ("fish", "fishes"),
        ("boss", "bosses"),
        ("bus", "buses"),
        ("box", "boxes"),
        ("knife", "knives"),
    ],
)
def test_plurals(one: str, several: str) -> None:
    assert templates.plural(one) == several


def test_lines_of_templates_have_plurals() -> None:
    rng = random.Random(0)
    filled = [templates.fill(rng, ["Anna", "Ben"]) for _ in range(2000)]
    assert any("glasses" in text for text in filled)
    assert not any(re.search(r"([^aeiou]y|ch|sh|ss|x|child|shelf)s\b", text) for text in filled)


def test_questions_are_whole_and_none_of_those_that_judge() -> None:
    rng = random.Random(0)
    kinds = ("asked", "asked", "tagged", "wh")
    asked = [templates.question(rng, ["Anna", "Ben"], kinds[n % 4]) for n in range(2000)]
    assert len(set(asked)) > 1700
    assert not any(re.search(r"\b[Aa] ([aeio]|u[^ns])", text) for text in asked)
    assert not any(re.search(r"([^aeiou]y|ch|sh|ss|x|child|shelf)s\b", text) for text in asked)
    assert all(text.endswith("?") and text[0].isupper() for text in asked)
    assert not any(sign in text for text in asked for sign in "{}~")
    judged = QUESTIONS.read_text().splitlines()
    prose = ["It is in the old house.", "The cat sat on the mat.", "We went to the sea."]
    assert set(choose([*judged, *prose], 100, 1)).isdisjoint(judged)
