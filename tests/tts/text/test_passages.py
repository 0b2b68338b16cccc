"""Passages of documents: where they begin, their phonemes, and positions in the source."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tts.errors import InvalidRequestError
from tts.text.lexicon.entries import Alphabet, Lexicon, Pronunciation
from tts.text.markup.document import Break, Document, Mark, Style
from tts.text.markup.passages import Passage, PassageText, passages_of
from tts.text.markup.ssml import read_ssml
from tts.text.markup.tags import read_tags
from tts.text.segmenter import SegmentStream, TextOptions, TextSegment, phrase_of_place

FIRST = phrase_of_place(0)


def passages(document: Document) -> list[Passage]:
    return [found for found in passages_of(document) if isinstance(found, Passage)]


def segments(document: Document, **options: bool) -> list[TextSegment]:
    found = []
    for passage in passages(document):
        text = PassageText(passage)
        stream = SegmentStream(TextOptions(phonemes=text.phonemes, **options))
        found += [text.located(segment) for segment in stream.split(text.text)]
    return found


def words(document: Document) -> list[tuple[str, str]]:
    """Return the words, each with its range of the source."""
    return [
        (word.text, document.source[word.start : word.end])
        for segment in segments(document)
        for word in segment.words
    ]


def test_passages_end_at_breaks_and_where_the_style_changes() -> None:
    document = read_ssml(
        "<speak>one <emphasis>two</emphasis> <lang xml:lang='fr'>three</lang><break/>"
        "<prosody rate='slow'>four</prosody> <prosody rate='slow'>five</prosody>"
        "<break strength='none'/> six</speak>"
    )
    found = list(passages_of(document))
    texts = [PassageText(p).text if isinstance(p, Passage) else p.seconds for p in found]
    assert texts == ["one two three", 0.75, "four five", " six"]
    assert isinstance(found[1], Break)
    assert [p.style.rate for p in passages(document)] == [1.0, 0.64, 1.0]


@pytest.mark.parametrize(
    ("inside", "has_voices"),
    [
        ("one <voice name='a'>two</voice>", True),
        ("<voice name='a'>one</voice> <voice name='b'>two</voice>", True),
        ("<voice name='a'>one</voice>, <voice xml:lang='de'>two</voice>", True),
        (" <voice name='a'>one</voice> <voice name='a'>two</voice>", False),
        ("one <prosody rate='2'>two</prosody>", False),
    ],
)
def test_a_document_knows_whether_several_voices_speak(inside: str, has_voices: bool) -> None:
    assert read_ssml(f"<speak>{inside}</speak>").has_voices is has_voices


MARKED = "One <mark name='a'/>two. Th<mark name='b'/>ree<mark name='c'/>, f<mark name='d'/>our"


def test_marks_stay_in_a_passage() -> None:
    (passage,) = passages_of(read_ssml(f"<speak>{MARKED}</speak>"))
    assert isinstance(passage, Passage)
    assert PassageText(passage).text == "One two. Three, four"
    assert [mark.name for mark in passage.marks] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        (MARKED, ["One ", "a", "two. Three,", "b", "c", " four", "d"]),
        ("<mark name='a'/>One<mark name='b'/>", ["a", "One", "b"]),
        ("o<mark name='a'/>n<mark name='b'/>e two", ["one", "a", "b", " two"]),
        ("One<mark name='a'/><break/>two", ["One", "a", 0.75, "two"]),
        ("R<mark name='a'/>&amp;D<s>two</s>", ["R", "a", "&D\n\n", "", "two\n\n"]),
        ("one<mark name='a'/><prosody rate='2'>two</prosody> three", ["one", "a", "two", " three"]),
    ],
)
def test_a_passage_can_end_at_each_mark_but_in_no_word(inside: str, expected: list[object]) -> None:
    found = []
    for part in passages_of(read_ssml(f"<speak>{inside}</speak>"), ends_at_marks=True):
        match part:
            case Passage():
                found.append(PassageText(part).text)
            case Break(seconds):
                found.append(seconds)
            case Mark(name=name):
                found.append(name)
    assert found == expected


def test_the_border_of_a_sentence_is_one_of_a_segment() -> None:
    document = read_ssml("<speak><s>one</s><s>two\n\n\nthree</s> four</speak>")
    assert [segment.text for segment in segments(document)] == ["one", "two three", "four"]
    assert words(document) == [(word, word) for word in ("one", "two", "three", "four")]


def test_phonemes_hold_at_their_place_only() -> None:
    source = "I say [tomato](/təˈmɑːtoʊ/), you say [tomato](/təˈmeɪtoʊ/). Two a[b](/c/)d tomato."
    document = read_tags(source)
    assert [segment.text for segment in segments(document, ascii_only=True)] == [
        "I say ⟨təˈmɑːtoʊ⟩, you say ⟨təˈmeɪtoʊ⟩.",
        "Two a ⟨c⟩ d tomato.",
    ]
    assert words(document)[2] == ("tomato,", "[tomato](/təˈmɑːtoʊ/),")


def test_letters_of_a_text_never_become_phonemes() -> None:
    document = read_tags(f"{FIRST} a {FIRST}b [word](/wɜːd/) {FIRST}")
    (passage,) = passages(document)
    assert PassageText(passage).text.count(FIRST) == 1
    found = [segment.text for segment in segments(document, ascii_only=True)]
    assert found == ["a b ⟨wɜːd⟩"]
    plain = SegmentStream(TextOptions(ascii_only=True))
    assert [segment.text for segment in plain.split(f"{FIRST} a")] == ["a"]


def test_too_many_pronunciations_are_refused() -> None:
    document = read_tags("".join(f"[a](/{'x' * (n % 150 + 1)}{n}/) " for n in range(901)))
    (passage,) = passages(document)
    text = PassageText(passage)
    with pytest.raises(InvalidRequestError, match="more than 900"):
        TextOptions(phonemes=text.phonemes).check_pronunciations("input.tags")


def test_positions_of_replaced_and_referenced_text() -> None:
    document = read_ssml(
        "<speak>A &amp; B <sub alias='see Dee'>CD</sub>. "
        "<say-as interpret-as='cardinal'>12</say-as></speak>"
    )
    sub = "<sub alias='see Dee'>CD</sub>"
    assert words(document) == [
        ("A", "A &amp;"),  # "and" belongs to the word before
        ("B", "B"),
        ("see", sub),
        ("Dee.", sub + "."),
        ("twelve", "<say-as interpret-as='cardinal'>12</say-as>"),
    ]


PIECES = st.lists(
    st.sampled_from(["one", "two.", " ", "ü&", "<", "12", "\n", "a b", "!", FIRST]), max_size=12
)


@given(PIECES)
def test_plain_documents_have_the_segments_of_their_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    tagged = read_tags(text)
    assert segments(tagged) == list(SegmentStream(TextOptions()).split(text))
    document = read_ssml(f"<speak>{escape(text)}</speak>")
    flat = re.sub("\n", " ", text)
    expected = [s.text for s in SegmentStream(TextOptions()).split(flat)]
    assert [segment.text for segment in segments(document)] == expected
    for segment in segments(document):
        assert segment.start <= segment.end <= len(document.source)
        for word in segment.words:
            assert segment.start <= word.start <= word.end <= segment.end


def test_the_language_and_the_emphasis_do_not_split_a_passage() -> None:
    style = Style(rate=2.0)
    assert replace(style, language="de", emphasis="strong") != style
    document = read_ssml("<speak><prosody rate='2'>a <emphasis>b</emphasis> c</prosody></speak>")
    assert len(passages(document)) == 1


def test_letters_of_places_in_a_text_of_a_client_are_not_kept() -> None:
    hello = Pronunciation("hello", "həlˈoʊ", Alphabet.IPA)
    options = TextOptions(lexicons=(Lexicon.of([hello], ascii_only=True),))
    found = [segment.text for segment in SegmentStream(options).split(f"{FIRST} hello there.")]
    assert found == ["⟨həlˈoʊ⟩ there."]
