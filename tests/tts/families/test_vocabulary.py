"""Token ids and codes; text and token ids; generated ids back to text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llm import CheckpointError, RequestError, SamplingParams
from tests.fakes import speech_description
from tests.vocabulary import FIRST_CODE, build_tokenizer
from tts.checkpoint.files import load_eos_ids, load_sampling_defaults
from tts.checkpoint.tokenizer import IncrementalDetokenizer, TextTokenizer
from tts.families.base import Checkpoint, SpeechTokens, SpeechVocabulary
from tts.families.embedded import EmbeddedFamily
from tts.families.registry import find_family

CODEBOOK = 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    build_tokenizer(CODEBOOK).save(str(path))
    return TextTokenizer(path)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """A sentence-piece tokenizer with a few words, byte fallback and one visible added token."""
    bytes_ = {f"<0x{byte:02X}>": byte for byte in range(256)}
    words = ["▁", "▁hello", "▁wor", "ld", "h", "e", "l", "o", "w", "r", "d"]
    vocab = {**bytes_, **{word: 256 + index for index, word in enumerate(words)}}
    merges = [("h", "e"), ("l", "d")]
    vocab |= {"he": len(vocab)}
    model = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    model.add_special_tokens([AddedToken("</s>", special=True)])
    model.add_tokens([AddedToken("<tool>", special=False)])
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.json"
    model.save(str(path))
    return TextTokenizer(path)


TOKENS = SpeechTokens("<|s_{}|>", "<|start_of_speech|>", "<|end_of_speech|>")


# --- codes


def test_consecutive_code_tokens_need_no_table(tokenizer: TextTokenizer) -> None:
    vocabulary = SpeechVocabulary.from_tokenizer(tokenizer, TOKENS, CODEBOOK)
    assert repr(vocabulary) == f"SpeechVocabulary({CODEBOOK} codes, base {FIRST_CODE})"
    held = vocabulary.constrain(SamplingParams(top_k=7, stop_token_ids=(9,)))
    assert held == SamplingParams(
        top_k=7, stop_token_ids=(258,), allowed_ranges=((FIRST_CODE, FIRST_CODE + CODEBOOK),)
    )
    assert (vocabulary.start_id, vocabulary.end_id) == (257, 258)
    assert vocabulary.id_range == (258, FIRST_CODE + CODEBOOK)


def test_scattered_code_tokens_go_through_a_table() -> None:
    vocabulary = SpeechVocabulary([[7, 3, 4, 9]], start_id=1, end_id=2)
    assert vocabulary.constrain(SamplingParams()).allowed_ranges == ((3, 5), (7, 8), (9, 10))
    assert vocabulary.codes([3, 9, 1, 5, 7]) == (1, 3, 0)
    assert vocabulary.token_ids([0, 1, 2, 3]) == (7, 3, 4, 9)
    with pytest.raises(RequestError):
        vocabulary.token_ids([4])


@given(codes=st.lists(st.integers(0, CODEBOOK - 1)))
@settings(max_examples=50)
def test_codes_come_back_from_their_ids(codes: list[int]) -> None:
    for ids in (range(FIRST_CODE, FIRST_CODE + CODEBOOK), range(900, 900 - CODEBOOK, -1)):
        vocabulary = SpeechVocabulary([ids], start_id=1, end_id=2)
        assert vocabulary.codes(vocabulary.token_ids(codes)) == tuple(codes)


@pytest.mark.parametrize("places", [[[7, 3, 4, 9]], [[5, 6, 7], [8, 9, 10]]])
def test_tokens_decoded_one_by_one_equal_all_at_once(places: list[list[int]]) -> None:
    vocabulary = SpeechVocabulary(places, start_id=1, end_id=2)
    one_by_one = [code for token in range(13) for code in vocabulary.codes([token])]
    assert tuple(one_by_one) == vocabulary.codes(list(range(13)))
    assert len(one_by_one) == sum(map(len, places))


@pytest.mark.parametrize("code", [-1, CODEBOOK])
def test_codes_outside_the_codebook_are_refused(tokenizer: TextTokenizer, code: int) -> None:
    vocabulary = SpeechVocabulary.from_tokenizer(tokenizer, TOKENS, CODEBOOK)
    with pytest.raises(RequestError, match=r"0\.\.63"):
        vocabulary.token_ids([0, code])


def test_other_ids_are_not_speech(tokenizer: TextTokenizer) -> None:
    vocabulary = SpeechVocabulary.from_tokenizer(tokenizer, TOKENS, CODEBOOK)
    assert vocabulary.codes([258, FIRST_CODE - 1, FIRST_CODE, FIRST_CODE + CODEBOOK]) == (0,)


def test_a_codebook_larger_than_the_vocabulary_is_an_error(tokenizer: TextTokenizer) -> None:
    with pytest.raises(CheckpointError, match=r"no token <\|s_64\|>"):
        SpeechVocabulary.from_tokenizer(tokenizer, TOKENS, CODEBOOK + 1)


def test_two_codes_cannot_share_a_token() -> None:
    with pytest.raises(CheckpointError, match="share a token"):
        SpeechVocabulary([[5, 5]], start_id=1, end_id=2)


FRAMES = SpeechVocabulary([range(100, 104), range(104, 108), range(108, 112)], 1, 2)
SCATTERED = SpeechVocabulary([(9, 8, 20, 21), range(30, 34), range(40, 44)], 1, 2)


@pytest.mark.parametrize("vocabulary", [FRAMES, SCATTERED])
def test_positions_of_a_frame_have_separate_tokens(vocabulary: SpeechVocabulary) -> None:
    ids = vocabulary.token_ids([0, 0, 0, 3, 2, 1])
    assert len(set(ids)) == 6
    assert vocabulary.codes([2, *ids, 1]) == (0, 0, 0, 3, 2, 1)
    cycle = vocabulary.constrain(SamplingParams()).allowed_cycle
    assert [any(a <= i < b for a, b in ranges) for i, ranges in zip(ids, cycle * 2, strict=True)]
    assert vocabulary.constrain(SamplingParams()).stop_token_ids == (2,)
    with pytest.raises(RequestError, match="whole frames of 3"):
        vocabulary.token_ids([0, 1, 2, 3])


def test_frames_are_literal() -> None:
    assert FRAMES.token_ids([0, 1, 2, 3, 2, 1]) == (100, 105, 110, 103, 106, 109)
    assert SCATTERED.token_ids([0, 1, 2, 3, 2, 1]) == (9, 31, 42, 21, 32, 41)
    assert SCATTERED.constrain(SamplingParams()).allowed_cycle == (
        ((8, 10), (20, 22)),
        ((30, 34),),
        ((40, 44),),
    )
    assert [FRAMES.whole_frames(n) for n in (0, 2, 3, 5, 6)] == [0, 0, 3, 3, 6]
    assert repr(FRAMES) == "SpeechVocabulary(3 x 4 codes, base 100)"
    assert [vocabulary.id_range for vocabulary in (FRAMES, SCATTERED)] == [(2, 112), (2, 44)]


@pytest.mark.parametrize("places", [[], [[]], [[1, 2], [2, 3]], [[1, 2], [3]]])
def test_positions_have_distinct_tokens_for_the_same_codes(places: list[list[int]]) -> None:
    with pytest.raises(CheckpointError):
        SpeechVocabulary(places, 1, 2)


# --- text to ids


def test_text_is_its_bytes(tokenizer: TextTokenizer) -> None:
    assert tokenizer.encode("Hé!") == list("Hé!".encode())


@pytest.mark.parametrize("text", ["<|s_12|>", "<|end_of_speech|>", "a<|voice_0|>b", "<|pad|>" * 3])
def test_control_tokens_in_text_are_encoded_as_text(tokenizer: TextTokenizer, text: str) -> None:
    assert tokenizer.encode(text) == list(text.encode())


def test_visible_added_tokens_in_text_are_encoded_as_text(pieces: TextTokenizer) -> None:
    ids = pieces.encode("<tool></s>")
    assert pieces.decode(ids) == "<tool></s>"
    assert not {pieces.control_id("<tool>"), pieces.control_id("</s>")} & set(ids)


def test_a_control_token_in_the_text_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(4)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"].append({**data["added_tokens"][0], "id": ord("x"), "content": "x"})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data))
    with pytest.raises(RequestError, match="control token"):
        TextTokenizer(path).encode("box")


def test_unsupported_and_missing_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        TextTokenizer(tmp_path / "tokenizer.json")
    path = tmp_path / "words.json"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(CheckpointError, match="byte-level"):
        TextTokenizer(path)


# --- ids to text


@given(text=st.text(max_size=40))
@settings(max_examples=60)
def test_text_round_trips_through_ids_without_splitting_characters(
    tokenizer: TextTokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    stream = IncrementalDetokenizer(tokenizer)
    deltas = [stream.push([token_id]) for token_id in ids]
    assert stream.finish() == ""
    assert "".join(deltas) == text == tokenizer.decode(ids)
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


def test_broken_bytes_become_replacement_characters_at_once(tokenizer: TextTokenizer) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    euro = list("€".encode())
    assert [stream.push([i]) for i in [0xFF, *euro[:2], 0x41]] == ["\ufffd", "", "", "\ufffdA"]
    assert stream.push(euro[:1]) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_not_text_but_other_added_ones_are(pieces: TextTokenizer) -> None:
    ids = [*pieces.encode("hello"), pieces.control_id("<tool>"), pieces.control_id("</s>")]
    assert pieces.decode(ids) == "hello<tool>"


def test_sentence_pieces_and_their_bytes_are_decoded(pieces: TextTokenizer) -> None:
    assert pieces.decode(pieces.encode("hello wörld €")) == "hello wörld €"
    assert pieces.token_bytes(10**6) == b""


# --- the checkpoint's own words


def embedded_family(folder: Path, tiny_checkpoint: Path, text: str) -> EmbeddedFamily:
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((tiny_checkpoint / name).read_bytes())
    (folder / "speech.json").write_text(text)
    return EmbeddedFamily(Checkpoint(folder))


def test_the_description_and_defaults_are_read(tiny_checkpoint: Path) -> None:
    family = find_family(Checkpoint(tiny_checkpoint))
    assert isinstance(family, EmbeddedFamily)
    assert (family.traits.max_characters, family.traits.max_codes) == (200, 500)
    assert (family.traits.codec, family.traits.voices_file) == ("codec", "voices.json")
    defaults = load_sampling_defaults(tiny_checkpoint)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.8, 50, 1.0)
    assert family.sampling() == defaults
    assert load_eos_ids(tiny_checkpoint) == (258, 260)


def test_a_folder_without_files_samples_plainly(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path).temperature == 1.0
    assert load_eos_ids(tmp_path) == ()
    with pytest.raises(CheckpointError, match=r"speech\.json is missing"):
        find_family(Checkpoint(tmp_path), "embedded")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_codes": 0}, "max_codes must be a positive whole number"),
        ({"codec": 7}, "codec must be text"),
        ({"code_token": "<|s|>"}, "code_token must hold {}"),
        ({"family": None}, "family must be text"),
        ({"colour": "red"}, "embedded has no colour; there are: any_voice, code_token"),
    ],
)
def test_the_error_for_a_wrong_description_names_the_field(
    tmp_path: Path, tiny_checkpoint: Path, change: dict[str, object], message: str
) -> None:
    text = json.dumps(speech_description() | change)
    with pytest.raises(CheckpointError, match=message):
        embedded_family(tmp_path, tiny_checkpoint, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"family": "embedded"}', "lacks: any_voice, code_token, codec"),
        ('{"codec": "codec"}', "lacks: family"),
    ],
)
def test_missing_fields_are_listed(
    tmp_path: Path, tiny_checkpoint: Path, text: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        embedded_family(tmp_path, tiny_checkpoint, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperature": "hot"}', "temperature must be a number"),
        ('{"top_p": 7}', "top_p must be in"),
        ("[]", "no JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_wrong_sampling_defaults_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_sampling_defaults(tmp_path)


def test_greedy_defaults(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7}')
    assert load_sampling_defaults(tmp_path).temperature == 0.0
