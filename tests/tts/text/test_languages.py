"""Readings of Spanish, French, German, Italian and Portuguese, and what chooses the language."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tts.families.base import FamilyTraits
from tts.text.languages.registry import LANGUAGES
from tts.text.markup.passages import PassageText, passages_of
from tts.text.markup.say_as import say_as_in
from tts.text.markup.ssml import read_ssml
from tts.text.segmenter import TextNormalization, TextOptions, split_text
from tts.voices.types import Voice

TABLES = Path(__file__).parent / "languages"
CODES = ("de", "es", "fr", "it", "pt")
MIN_CASES, MIN_KINDS = 40, 10
NOT_WORDS = re.compile(r"[^\w\s']")


def options(language: str) -> TextOptions:
    return TextOptions(max_characters=10_000, ascii_only=False, language=language)


def sentences(text: str, language: str) -> list[str]:
    return [segment.text for segment in split_text(text, options(language))]


def words_of(text: str) -> str:
    return " ".join(NOT_WORDS.sub(" ", text.lower()).split())


def cases(code: str) -> list[tuple[str, str, str]]:
    lines = (TABLES / f"{code}.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if "\t" in line]
    return [(kind, written, spoken) for kind, written, spoken in rows]


@pytest.mark.parametrize(
    ("code", "written", "spoken"),
    [(code, written, spoken) for code in CODES for _, written, spoken in cases(code)],
)
def test_figures_are_read_as_a_careful_reader_does(code: str, written: str, spoken: str) -> None:
    accepted = (re.compile(reading.strip()) for reading in spoken.split(" | "))
    said = words_of(" ".join(sentences(written, code)))
    assert any(pattern.fullmatch(said) for pattern in accepted), said


@pytest.mark.parametrize("code", CODES)
def test_the_tables_have_many_kinds_and_no_case_twice(code: str) -> None:
    table = cases(code)
    assert len({written for _, written, _ in table}) == len(table) >= MIN_CASES
    assert len({kind for kind, _, _ in table}) >= MIN_KINDS


@pytest.mark.parametrize(
    ("code", "written", "spoken"),
    [
        ("es-MX", "5 €/kg.", ["cinco euros por kilogramo."]),
        ("pt-BR", "16 dias", ["dezesseis dias"]),
        ("pt-PT", "16 km", ["dezasseis quilómetros"]),
        ("de_AT", "Am 3. Mai. Er kam.", ["Am dritten Mai.", "Er kam."]),
        ("de", "Er hat 3. Dann kam er.", ["Er hat drei.", "Dann kam er."]),
        ("de", "Am 3.5. endet es.", ["Am dritten Mai endet es."]),
        ("de", "z. B. Dr. Meier. Gut.", ["zum Beispiel Doktor Meier.", "Gut."]),
        (
            "de",
            "die 1990er Jahre, 9-17 Uhr",
            ["die neunzehnhundertneunziger Jahre, neun bis siebzehn Uhr"],
        ),
        ("fr", "L'art. 3 dit non. Il part.", ["L'article trois dit non.", "Il part."]),
        ("fr", "J'aime l'art. Il part.", ["J'aime l'art.", "Il part."]),
        ("fr", "1,5 million à 0h30", ["un virgule cinq million à zéro heure trente"]),
        ("it", "3/4 di 1 ora", ["tre quarti di un'ora"]),
        ("es", "el +34 91 234", ["el más tres cuatro, nueve uno, dos tres cuatro"]),
        ("nl", "Het is 5 € en 3 m².", ["Het is 5 € en 3 m²."]),  # has no reader
    ],
)
def test_regions_sentences_and_languages_without_a_reader(
    code: str, written: str, spoken: list[str]
) -> None:
    assert sentences(written, code) == spoken


@given(
    st.text(alphabet="0123456789.,:/-–+%€$²ºª°hkm esIVX\n", max_size=40),
    st.sampled_from([*LANGUAGES]),
)
def test_no_figures_remain_and_a_reading_is_stable(text: str, code: str) -> None:
    said = " ".join(sentences(text, code))
    assert not re.search("[0-9]", said)
    assert words_of(" ".join(sentences(said, code))) == words_of(said)


@pytest.mark.parametrize("code", LANGUAGES)
def test_numbers_of_any_length_are_read(code: str) -> None:
    for length in range(1, 40):
        figures = "9" * length
        for text in (figures, f"{figures} €", f"0,{figures} km", ".".join(["999"] * length)):
            assert not re.search("[0-9]", " ".join(sentences(text, code)))


@pytest.mark.parametrize(
    ("language", "asked", "spoken"),
    [
        ("", "", "2 ans."),
        ("", "fr-CA", "deux ans."),
        ("en", "", "two ans."),
        ("en", "fr", "deux ans."),
        ("de", "", "zwei ans."),  # as of a model for German
        ("en", "ja", "2 ans."),
    ],
)
def test_a_request_chooses_the_language(language: str, asked: str, spoken: str) -> None:
    traits = FamilyTraits(language=language)
    made = traits.text_options(None, Voice("v", language=asked))
    assert [segment.text for segment in split_text("2 ans.", made)] == [spoken]
    off = traits.text_options(TextNormalization.OFF, Voice("v", language=asked))
    assert [segment.text for segment in split_text("2 ans.", off)] == ["2 ans."]


def test_a_model_for_english_alone_reads_english() -> None:
    made = FamilyTraits(ascii_only=True).text_options(None, Voice("v", language="fr"))
    assert [segment.text for segment in split_text("2 ans.", made)] == ["two ans."]


def test_a_text_may_change_its_language() -> None:
    source = "<speak>I said <lang xml:lang='fr'>25 ans,</lang> not 25.</speak>"
    (passage,) = (part for part in passages_of(read_ssml(source)))
    text = PassageText(passage)  # type: ignore[arg-type]
    assert text.languages("en") == ((7, "fr"), (14, "en"))
    made = TextOptions(ascii_only=False, language="en", languages=text.languages("en"))
    (segment,) = split_text(text.text, made)
    assert segment.text == "I said vingt-cinq ans, not twenty-five."
    assert [word.spoken for word in segment.words] == (
        ["I", "said", "vingt-cinq", "ans,", "not", "twenty-five."]
    )


@pytest.mark.parametrize(
    ("language", "kind", "text", "layout", "spoken"),
    [
        ("en", "cardinal", "21", "", "twenty-one"),
        ("de", "cardinal", "21", "", "einundzwanzig"),
        ("es", "digits", "2026", "", "dos cero dos seis"),
        ("fr", "characters", "B-2", "", "B deux"),
        ("it", "date", "3.5.2026", "dmy", "tre maggio duemilaventisei"),
        ("pt", "ordinal", "3", "", "terceiro"),
        ("de", "telephone", "030 12", "", "null drei null, eins zwei"),
        ("nl", "cardinal", "21", "", "21"),
    ],
)
def test_say_as_is_read_in_the_language(
    language: str, kind: str, text: str, layout: str, spoken: str
) -> None:
    assert say_as_in(language, kind, text, layout) == spoken
