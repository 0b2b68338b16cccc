"""Pronunciations of the server, of voices and of requests: precedence, and what is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llm import ConfigError
from tests.tts.ramp import SEEDED, RampClient, build, collect_speech, run
from tts.errors import InvalidRequestError
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import Done, SpeechRequest
from tts.text.lexicon.entries import Alphabet, Pronunciation
from tts.text.markup.tags import read_tags

TEXT = "One tomato and SQL in New York."
GERMAN = """<lexicon xml:lang="de-DE" xmlns="http://www.w3.org/2005/01/pronunciation-lexicon">
<lexeme><grapheme>one</grapheme><alias>eins</alias></lexeme>
</lexicon>"""


@pytest.fixture
def served(client: RampClient, tiny_checkpoint: Path, tmp_path: Path) -> Synthesizer:
    """A synthesizer of a model that reads letters, with two lexicons."""
    first, second = tmp_path / "words.txt", tmp_path / "german.pls"
    first.write_text("tomato\t/təˈmɑːtoʊ/\nSQL\tsequel\nNew York\tN UW1 Y AO1 R K\n")
    second.write_text(GERMAN)
    return build(client, tiny_checkpoint, [first, second])


def test_entries_of_the_server_are_spoken_and_reported(
    served: Synthesizer, client: RampClient, tiny_checkpoint: Path
) -> None:
    found = collect_speech(served, TEXT)
    assert found.result.spoken_text == "One tuhmahtoh and sequel in nooyork."
    assert found.result.pronunciations == (
        Pronunciation("tomato", "tuhmahtoh"),
        Pronunciation("SQL", "sequel"),
        Pronunciation("New York", "nooyork"),
    )
    respelled = build(client, tiny_checkpoint)
    same = collect_speech(respelled, "One tuhmahtoh and sequel in nooyork.")
    assert same.data == found.data
    assert same.result.pronunciations == ()


def test_the_request_takes_precedence_over_the_voice_and_the_voice_over_the_server(
    served: Synthesizer,
) -> None:
    of_voice = (Pronunciation("tomato", "toma"), Pronunciation("SQL", "ess"))
    voice = replace(served.voices.default, pronunciations=of_voice)
    of_request = (Pronunciation("sql", "S K AY1 L", Alphabet.ARPABET),)
    found = collect_speech(served, TEXT, voice=voice, pronunciations=of_request)
    assert found.result.spoken_text == "One toma and skighl in nooyork."
    assert [said.phrase for said in found.result.pronunciations] == ["tomato", "sql", "New York"]


def test_the_lexicon_of_another_language_is_left_out(served: Synthesizer) -> None:
    voice = served.voices.default
    assert voice.speaks("en")
    for languages, spoken in (((), "eins"), (("de-AT",), "eins"), (("en-US",), "One")):
        found = collect_speech(served, "One.", voice=replace(voice, language_codes=languages))
        assert found.result.spoken_text == f"{spoken}."


def test_a_document_has_the_pronunciations_of_each_voice(served: Synthesizer) -> None:
    source = "SQL [pause:100ms] SQL and [word](/wɜːd/)."
    found = collect_speech(served, source, markup=read_tags(source))
    assert found.result.spoken_text == "sequel sequel and werd."
    assert found.result.pronunciations == (Pronunciation("SQL", "sequel"),)


def test_a_session_reports_what_it_spoke(served: Synthesizer) -> None:
    async def talk() -> Done:
        session = served.open_session(SpeechRequest(sampling=SEEDED))
        session.feed("We speak SQL. ")
        session.close()
        *_, done = [event async for event in session.events()]
        assert isinstance(done, Done)
        return done

    result = run(talk()).result
    assert result.spoken_text == "We speak sequel."
    assert result.pronunciations == (Pronunciation("SQL", "sequel"),)


def test_a_report_has_at_most_200_entries(synthesizer: Synthesizer) -> None:
    entries = tuple(Pronunciation(f"w{n}", "x") for n in range(300))
    text = ". ".join(f"w{n}" for n in range(300))
    found = collect_speech(synthesizer, text, pronunciations=entries)
    assert found.result.pronunciations == entries[:200]


@pytest.mark.parametrize(
    ("entry", "field", "message"),
    [
        (Pronunciation("a", "w日d", Alphabet.IPA), "pronunciation", "'日' is no sign of the"),
        (Pronunciation("a", "ZZ1", Alphabet.ARPABET), "pronunciation", "'ZZ1' is no phone of"),
        (Pronunciation("a", "a" * 101, Alphabet.IPA), "pronunciation", "may have 100 signs"),
        (Pronunciation("🎉", "x"), "phrase", "no letters"),
        (Pronunciation("a\0", "x"), "phrase", "control character"),
        (Pronunciation("a", "x\0"), "pronunciation", "control character"),
    ],
)
def test_errors_name_the_entry(
    synthesizer: Synthesizer, entry: Pronunciation, field: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        collect_speech(synthesizer, pronunciations=(Pronunciation("x", "y"), entry))
    (violation,) = caught.value.violations
    assert violation.field == f"config.pronunciations[1].{field}"


def test_a_file_that_the_model_cannot_read_is_refused(
    client: RampClient, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "words.txt"
    path.write_text("one\tx\n\ntwo\t/t!/\n")
    with pytest.raises(ConfigError, match=r"words\.txt:3: '!' is no sign"):
        build(client, tiny_checkpoint, [path])
