"""OuteTTS: prompts with and without a speaker's words, codes among other tokens, its service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm import CheckpointError, SamplingParams
from tests.tts.family_checkpoints import (
    OUTETTS_CODES,
    OUTETTS_FIRST_CODE,
    OUTETTS_NAMES,
    write_outetts,
)
from tests.tts.family_services import configured
from tests.tts.serving import (
    Serving,
    collect_speech,
    error_of,
    flush,
    reason_of,
    run_conversation,
    run_with_server,
    say,
    session_config,
    stream_request,
    unary_request,
)
from tts.factory import Service, create_service
from tts.families.base import Checkpoint
from tts.families.outetts import CODEBOOK_SIZE, OuteTTSFamily, WordVocabulary, separator_of
from tts.families.registry import find_family
from tts.v1 import speech_pb2 as pb
from tts.voices.types import Voice

HELLO, LINE = 15339, 198
WORD = {"word": "hello", "duration": 0.2, "c1": [7, 9], "c2": [1, 2]}
PROFILE = {
    "text": "hello",
    "words": [WORD | {"features": {"energy": 10, "spectral_centroid": 15, "pitch": 45}}],
}


def ids(*names: str) -> tuple[int, ...]:
    known = (*OUTETTS_NAMES, *OUTETTS_CODES)
    return tuple(128_256 + known.index(name) for name in names)


BEFORE = (*ids("im_start"), LINE, *ids("text_start"))
BETWEEN = (*ids("text_end"), LINE, *ids("audio_start"), LINE)
SPOKEN = (
    *ids("word_start"),
    *(HELLO, 13),  # the separator is a part of the last word
    *ids("features", "t_0.20", "energy_10", "spectral_centroid_15", "pitch_45", "code"),
    *ids("c1_7", "c2_1", "c1_9", "c2_2", "word_end"),
    LINE,
    *ids("word_start"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_outetts(tmp_path_factory.mktemp("outetts") / "model")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    made = create_service(configured(folder, max_length=4096))
    yield made
    asyncio.run(made.client.close())


def with_profile(folder: Path, copy: Path, profile: Any, name: str = "anna") -> Checkpoint:
    """Return a checkpoint with a speaker's profile."""
    (copy / "speakers").mkdir(parents=True)
    for file in ("config.json", "tokenizer.json"):
        (copy / file).symlink_to(folder / file)
    (copy / "speakers" / f"{name}.json").write_text(json.dumps(profile), encoding="utf-8")
    return Checkpoint(copy)


def test_without_a_profile_the_model_chooses_a_speaker(service: Service) -> None:
    assert service.family == "outetts"
    assert service.synthesizer is not None
    assert service.synthesizer.voices.default.name == "default"
    assert service.prompts.speech_prompt('"hello"', Voice("x")) == (*BEFORE, HELLO, *BETWEEN)


def test_the_words_of_a_profile_follow_the_text(
    folder: Path, service: Service, tmp_path: Path
) -> None:
    family = find_family(with_profile(folder, tmp_path / "copy", PROFILE, "Anna"))
    assert isinstance(family, OuteTTSFamily)
    anna = family.voices().voices[0]
    assert (anna.name, anna.speaker, family.voices().default) == ("anna", "anna", "anna")
    vocabulary = family.vocabulary(service.synthesizer.codec)  # type: ignore[union-attr]
    said = (HELLO, 13, 24748)  # "hello. hello"
    assert family.prompt(vocabulary, "hello", anna) == (*BEFORE, *said, *BETWEEN, *SPOKEN)


@pytest.mark.parametrize(
    ("text", "separator"),
    [("Yes.", " "), ("Yes", ". "), ("Yes,", ". "), ("はい", "。"), ("是。", ""), ("是!", "")],
)
def test_sentences_are_separated(text: str, separator: str) -> None:
    assert separator_of(text) == separator


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": []}, "no text or no words"),
        ({"text": " "}, "no text or no words"),
        ({"words": [WORD | {"features": {}, "c2": [1]}]}, "no speaker profile: ValueError"),
        ({"words": [WORD | {"features": {"pitch": 101}}]}, "must be in 0..100"),
        ({"words": [WORD | {"features": {}, "duration": 99}]}, r"no token <\|t_99.00\|>"),
        ({"words": [WORD | {"features": {}, "c1": [7, 2000]}]}, r"no token <\|c1_2000\|>"),
        ({"words": [WORD]}, "KeyError"),
        ({"text": None}, "AttributeError"),
    ],
)
def test_a_damaged_profile_is_named(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    checkpoint = with_profile(folder, tmp_path / "copy", PROFILE | change)
    with pytest.raises(CheckpointError, match=message) as caught:
        find_family(checkpoint)
    assert "anna.json" in str(caught.value)


def test_a_profile_is_named_as_a_voice(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="name of a voice"):
        find_family(with_profile(folder, tmp_path / "copy", PROFILE, "two words"))


# --- codes


def word_vocabulary() -> WordVocabulary:
    return WordVocabulary([range(10, 20), range(20, 30)], (5, 6), ((0, 30),))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))),
    st.lists(st.integers(30, 40), min_size=1),
    st.data(),
)
def test_codes_are_found_among_other_tokens(
    frames: list[tuple[int, int]], others: list[int], data: st.DataObject
) -> None:
    """However the tokens are divided, and wherever the other ones stand."""
    tokens = [token for one, two in frames for token in (10 + one, 20 + two)]
    for other in others:
        tokens.insert(data.draw(st.integers(0, len(tokens))), other)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)))))
    read = word_vocabulary().reader()
    pieces = [
        read(tokens[start:stop]) for start, stop in zip([0, *cuts], [*cuts, None], strict=True)
    ]
    assert tuple(chain(*pieces)) == tuple(chain(*frames))


@pytest.mark.parametrize(
    ("tokens", "codes"),
    [
        ([10, 11, 22], (1, 2)),  # the first frame has no second code
        ([20, 10, 21], (0, 1)),  # a second code without a first one
        ([10, 20, 21, 11], (0, 0)),
    ],
)
def test_frames_that_are_not_whole_are_dropped(tokens: list[int], codes: tuple[int, ...]) -> None:
    assert word_vocabulary().codes(tokens) == codes


def test_streams_are_read_apart() -> None:
    vocabulary = word_vocabulary()
    one, other = vocabulary.reader(), vocabulary.reader()
    assert (one([10]), other([21]), one([22])) == ((), (), (0, 2))


def test_codes_that_the_codec_does_not_have_are_not_sampled(service: Service) -> None:
    vocabulary = service.prompts.vocabulary
    assert vocabulary is not None
    sampling = vocabulary.constrain(SamplingParams())
    assert sampling.stop_token_ids == ids("audio_end", "im_end")
    spare = {OUTETTS_FIRST_CODE + CODEBOOK_SIZE, OUTETTS_FIRST_CODE + 2 * CODEBOOK_SIZE + 1}
    assert vocabulary.id_range is None, "words are sampled, too"
    allowed = {n for start, stop in sampling.allowed_ranges for n in range(start, stop)}
    assert set(range(OUTETTS_FIRST_CODE + len(OUTETTS_CODES))) - allowed == spare


# --- the service


def test_every_call_gives_the_same_samples(service: Service) -> None:
    async def ask(served: Serving) -> None:
        streamed = await collect_speech(served, "Hello there.", max_tokens=120)
        whole = await served.speech.Synthesize(unary_request("Hello there.", max_tokens=120))
        assert streamed.done.usage.output_tokens == 120
        assert 0 < len(streamed.data) < 120 / 150 * 48_000  # some tokens are no codes
        assert len(streamed.data) % 640 == 0  # whole frames
        assert whole.audio == streamed.data

    run_with_server(service, ask)


def test_a_sentence_may_be_spoken_in_parts(service: Service) -> None:
    """The rest of an eager sentence is asked for by itself: codes cannot stand in a prompt."""

    async def ask(served: Serving) -> None:
        config = session_config(max_tokens=200)
        config.config.eager = 2
        words = say("One two three four five six, seven eight.")
        responses = await run_conversation(served, config, words, flush("f"))
        assert sum(len(r.audio.data) for r in responses if r.HasField("audio")) > 0
        assert responses[-1].HasField("done")

    run_with_server(service, ask)


def test_voices_are_not_cloned(service: Service) -> None:
    async def ask(served: Serving) -> None:
        (model,) = (await served.speech.GetServerInfo(pb.GetServerInfoRequest())).models
        assert not model.voice_cloning
        tokens = pb.VoiceSelection(prompt_tokens=pb.SpeechTokens(tokens=(1, 2)))
        error = await error_of(served.speech.SynthesizeStream(stream_request(voice=tokens)))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(error) == "VOICE_CLONING_UNAVAILABLE"

    run_with_server(service, ask)
