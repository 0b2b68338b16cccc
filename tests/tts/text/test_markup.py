"""SSML and tags as documents: what is spoken and how, positions, errors, limits, plain text."""

from __future__ import annotations

import re
import time
from typing import Any
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tts.text.clean import TextError
from tts.text.markup.document import (
    MAX_CHARACTERS,
    MAX_PARTS,
    Border,
    Break,
    Document,
    Mark,
    MarkKind,
    Part,
    Spoken,
    Style,
)
from tts.text.markup.say_as import say_as
from tts.text.markup.ssml import read_ssml
from tts.text.markup.tags import read_tags

SPACES = re.compile("[\n\r\f\v\x85\u2028\u2029]")
W3C = """<?xml version="1.0"?>
<speak version="1.1" xmlns="http://www.w3.org/2001/10/synthesis"
       xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
       xsi:schemaLocation="http://www.w3.org/2001/10/synthesis synthesis.xsd" xml:lang="en-GB">
  <metadata>not <b>spoken</b></metadata>
  <p>
    <s>Your parcel is from <voice name="amy">Ann Lee</voice>.</s>
    <s>It comes on the <say-as interpret-as="ordinal">3</say-as>,
       <break strength="weak"/> <prosody rate="-10%">at noon</prosody>.</s>
  </p>
</speak>"""
GOOGLE = """<speak>
  Listen: <say-as interpret-as="characters">SSML</say-as><break time="3s"/>
  <say-as interpret-as="cardinal">10</say-as>, <say-as interpret-as="ordinal">10</say-as>,
  <say-as interpret-as="verbatim">a1</say-as>; <sub alias="World Wide Web">WWW</sub>.
  <mark name="end"/><emphasis level="strong">Now!</emphasis>
</speak>"""
AMAZON = """<speak>
  <lang xml:lang="fr-FR">Paris</lang> <w role="amazon:VB">read</w>
  <phoneme alphabet="ipa" ph="pɪˈkɑːn">pecan</phoneme>
  <prosody volume="+6dB" rate="150%">loud</prosody>
  <say-as interpret-as="spell-out">ab</say-as> <say-as interpret-as="time">1'21"</say-as>
</speak>"""
AZURE = """<speak version="1.0" xmlns="http://www.w3.org/2001/10/synthesis"
  xmlns:mstts="https://www.w3.org/2001/mstts" xml:lang="en-US">
  <voice name="leo"><prosody volume="50" rate="+30.00%">Hello</prosody>
  <break/><say-as interpret-as="date" format="dmy">10-12-2016</say-as></voice></speak>"""


def spoken(document: Document) -> list[str]:
    pieces = (part for part in document.parts if isinstance(part, Spoken))
    return [piece.text.strip() for piece in pieces if piece.text.strip()]


def ssml(inside: str, **options: bool) -> Document:
    return read_ssml(f"<speak>{inside}</speak>", **options)


def piece(inside: str) -> Spoken:
    return next(part for part in ssml(inside).parts if isinstance(part, Spoken))


def test_a_document_of_the_recommendations_structure() -> None:
    document = read_ssml(W3C)
    words = ["Your parcel is from", "Ann Lee", ".", "It comes on the", "third", ",", "at noon", "."]
    assert spoken(document) == words
    named = [p for p in document.parts if isinstance(p, Spoken) and p.style.voice]
    assert [(p.text, p.style.voice) for p in named] == [("Ann Lee", "amy")]
    slow = next(p for p in document.parts if isinstance(p, Spoken) and p.text == "at noon")
    assert slow.style == Style(language="en-GB", rate=0.9)
    borders = [part.is_paragraph for part in document.parts if isinstance(part, Border)]
    assert borders == [True, False, False, False, False, True]


def test_a_document_of_googles_structure() -> None:
    document = read_ssml(GOOGLE)
    words = ["Listen:", "S S M L", "ten", ",", "tenth", ",", "A one", ";", "World Wide Web", "."]
    assert spoken(document) == [*words, "Now!"]
    assert [p.seconds for p in document.parts if isinstance(p, Break)] == [3.0]
    (mark,) = (part for part in document.parts if isinstance(part, Mark))
    tag = '<mark name="end"/>'
    start = GOOGLE.index(tag)
    assert mark == Mark(MarkKind.MARK, "end", start, start + len(tag))
    assert document.parts[-2] == Spoken(
        "Now!", GOOGLE.index("Now!"), GOOGLE.index("Now!") + 4, Style(emphasis="strong")
    )


def test_a_document_of_amazons_structure() -> None:
    document = read_ssml(AMAZON)
    pieces = {p.text: p for p in document.parts if isinstance(p, Spoken)}
    assert pieces["Paris"].style.language == "fr-FR"
    assert pieces["pecan"].ipa == "pɪˈkɑːn"
    assert pieces["loud"].style == Style(rate=1.5, gain_db=6.0)
    assert "A B" in pieces
    assert "one minute and twenty-one seconds" in pieces


def test_a_document_of_azures_structure() -> None:
    document = read_ssml(AZURE)
    assert spoken(document) == ["Hello", "December tenth, twenty sixteen"]
    (hello, *_) = (p for p in document.parts if isinstance(p, Spoken) and p.text == "Hello")
    assert hello.style.rate == pytest.approx(1.3)
    assert hello.style.gain_db == pytest.approx(-6.02, abs=0.01)
    assert [p.seconds for p in document.parts if isinstance(p, Break)] == [0.75]


@pytest.mark.parametrize(
    ("inside", "found"),
    [
        # the recommendation: two marks in a sentence, structure, a sub, a nested emphasis
        (
            "Walk from <mark name='a'/> here to <mark name='b'/> there.",
            ["Walk from ", ("mark", "a"), " here to ", ("mark", "b"), " there."],
        ),
        (
            "<p><s>First one.</s><s>Then two.</s></p>",
            ["¶", "|", ("sentence", ""), "First one.", *"||", ("sentence", ""), "Then two.", *"|¶"],
        ),
        ("<sub alias='World Wide Web Consortium'>W3C</sub>", ["World Wide Web Consortium"]),
        (
            "A <emphasis> big </emphasis> car, a <emphasis level='strong'> huge </emphasis> bill",
            ["A ", " big ", " car, a ", " huge ", " bill"],
        ),
        ("Breathe <break/> and press <break time='3s'/>", ["Breathe ", 0.75, " and press ", 3.0]),
        ("Wait. <break strength='weak'/> Now.", ["Wait. ", 0.5, " Now."]),
        (
            "It is <prosody rate='-10%'>exactly</prosody> <say-as interpret-as='currency'>$45.20"
            "</say-as>",
            ["It is ", "exactly", " ", "forty-five dollars and twenty cents"],
        ),
        ("<lang xml:lang='ja'>Totoro</lang> again", ["Totoro", " again"]),
        # Google: a mark in front of a word, numbers, times, units, paragraphs with a break
        ("Look <mark name='now'/>there.", ["Look ", ("mark", "now"), "there."]),
        ("<say-as interpret-as='fraction'>5+1/2</say-as>", ["five and a half"]),
        ("<say-as interpret-as='unit'>10 foot</say-as>", ["ten foot"]),
        ("<say-as interpret-as='time' format='hms12'>2:30pm</say-as>", ["two thirty P M"]),
        (
            "<say-as interpret-as='date' format='yyyymmdd' detail='1'>1960-09-10</say-as>",
            ["September tenth, nineteen sixty"],
        ),
        ("<say-as interpret-as='bleep'>word</say-as>", ["beep"]),
        ("<prosody rate='slow' volume='loud'>You can hear me?</prosody>", ["You can hear me?"]),
        ("<voice language='fr-FR' gender='female'>Bonjour</voice>", ["Bonjour"]),
        # Amazon: a mark with words around it, a strong pause, letters, an address
        (
            "She had a <mark name='animal'/>small lamb.",
            ["She had a ", ("mark", "animal"), "small lamb."],
        ),
        ("One. <break strength='x-strong'/>Two.", ["One. ", 1.25, "Two."]),
        ("The element is <sub alias='mercury'>Hg</sub>.", ["The element is ", "mercury", "."]),
        ("Spell <say-as interpret-as='characters'>hi</say-as>", ["Spell ", "H I"]),
        ("I <w role='amazon:VBD'>read</w> it.", ["I ", "read", " it."]),
        # Azure: voices in turns, breaks by time, an address, a style for a sentence
        (
            "<voice name='a'><s>Hello.</s></voice><voice name='b'>Good bye.</voice>",
            ["|", ("sentence", ""), "Hello.", "|", "Good bye."],
        ),
        ("Welcome <break time='750ms'/> to us", ["Welcome ", 0.75, " to us"]),
    ],
)
def test_examples_of_the_recommendation_and_of_services(inside: str, found: list[Any]) -> None:
    """Structures that their documentation shows, with other words."""
    assert [shown(part) for part in ssml(inside).parts] == found


def shown(part: Part) -> Any:
    match part:
        case Spoken(text):
            return text
        case Break(seconds):
            return seconds
        case Mark(kind, name):
            return kind.value, name
        case Border(is_paragraph=is_paragraph):
            return "¶" if is_paragraph else "|"


def test_marks_have_the_range_of_their_tag_or_sentence() -> None:
    source = "<speak><s a:b='>'>One <mark name='a>b'/>two.</s><s/><s>three</s></speak>"
    marks = [part for part in read_ssml(source).parts if isinstance(part, Mark)]
    assert [(m.name, source[m.start : m.end]) for m in marks] == [
        ("", "One <mark name='a>b'/>two."),
        ("a>b", "<mark name='a>b'/>"),
        ("", ""),
        ("", "three"),
    ]


def test_positions_are_those_of_the_source() -> None:
    source = "<speak>Ünï &amp; <![CDATA[a<b]]>\r\nc &#x1F600;<sub alias='d e'>f</sub></speak>"
    document = read_ssml(source)
    found = [(p.text, source[p.start : p.end]) for p in document.parts if isinstance(p, Spoken)]
    assert found == [
        ("Ünï ", "Ünï "),
        ("&", "&amp;"),
        (" ", " "),
        ("a<b", "a<b"),
        (" ", "\r\n"),
        ("c ", "c "),
        ("\U0001f600", "&#x1F600;"),
        ("d e", "<sub alias='d e'>f</sub>"),
    ]


@pytest.mark.parametrize(
    ("inside", "style"),
    [
        ('<prosody rate="slow">a</prosody>', Style(rate=0.64)),
        ('<prosody rate="0.5"><prosody rate="200%">a</prosody></prosody>', Style(rate=1.0)),
        ('<prosody volume="soft">a</prosody>', Style(gain_db=-6.0)),
        ('<prosody volume="silent">a</prosody>', Style(gain_db=-96.0)),
        ('<prosody volume="-3dB"><prosody volume="+1dB">a</prosody></prosody>', Style(gain_db=-2)),
        ('<prosody pitch="+2st">a</prosody>', Style(pitch=2.0)),
        ('<prosody pitch="+100%"><prosody pitch="-2.5st">a</prosody></prosody>', Style(pitch=9.5)),
        ('<prosody pitch="-50%">a</prosody>', Style(pitch=-12.0)),
        ('<prosody pitch="-3st"><prosody pitch="x-high">a</prosody></prosody>', Style(pitch=6.0)),
        ('<prosody pitch="-3st"><prosody pitch="default">a</prosody></prosody>', Style()),
        ('<prosody pitch="+2st"><prosody pitch="+0Hz">a</prosody></prosody>', Style(pitch=2.0)),
        ('<prosody pitch="-3st"><prosody pitch="0%">a</prosody></prosody>', Style(pitch=-3.0)),
        ('<voice xml:lang="de">a</voice>', Style(voice_language="de", language="de")),
        ('<voice language="en-US">a</voice>', Style(voice_language="en-US", language="en-US")),
        ('<lang xml:lang="fr"><voice name="x">a</voice></lang>', Style(voice="x")),
        (
            '<voice name="x" xml:lang="de">a</voice>',
            Style(voice="x", voice_language="de", language="de"),
        ),
        ("<emphasis>a</emphasis>", Style(emphasis="moderate")),
        ('<emphasis level="none">a</emphasis>', Style()),
    ],
)
def test_styles(inside: str, style: Style) -> None:
    assert piece(inside).style == style


@pytest.mark.parametrize(
    ("attributes", "seconds"),
    [
        ("", 0.75),
        ('strength="none"', 0.0),
        ('strength="x-strong"', 1.25),
        ('time="250ms"', 0.25),
        ('time=".5s" strength="none"', 0.5),
        ('time="60s"', 10.0),
    ],
)
def test_breaks(attributes: str, seconds: float) -> None:
    document = ssml(f"a<break {attributes}/>b")
    (found,) = (part for part in document.parts if isinstance(part, Break))
    assert found.seconds == seconds
    assert bool(document.warnings) == ("60s" in attributes)


@pytest.mark.parametrize(
    ("kind", "layout", "text", "words"),
    [
        ("cardinal", "", "1024", "one thousand and twenty-four"),
        ("cardinal", "", "-2.50", "minus two point five zero"),
        ("ordinal", "", "22", "twenty-second"),
        ("ordinal", "", "1,000th", "one thousandth"),
        ("digits", "", "407", "four zero seven"),
        ("characters", "", "a-1", "A dash one"),
        ("date", "mdy", "12/31/2026", "December thirty-first, twenty twenty-six"),
        ("date", "yyyymmdd", "20260102", "January second, twenty twenty-six"),
        ("date", "ym", "2026-01", "January, twenty twenty-six"),
        ("date", "d", "3", "third"),
        ("date", "", "2026-01-02", "January second, twenty twenty-six"),
        ("time", "hms12", "2:30pm", "two thirty P M"),
        ("time", "hms24", "14:30", "fourteen thirty"),
        ("time", "", "2'", "two minutes"),
        ("telephone", "", "+1 (800) 555-01", "plus one, eight zero zero, five five five, zero one"),
        ("currency", "", "$42.01", "forty-two dollars and one cent"),
        ("currency", "", "3 EUR", "three euros"),
        ("fraction", "", "9/11", "nine elevenths"),
        ("fraction", "", "3+1/2", "three and a half"),
        ("unit", "", "10km", "ten kilometers"),
        ("expletive", "", "darn", "beep"),
    ],
)
def test_say_as(kind: str, layout: str, text: str, words: str) -> None:
    assert say_as(kind, text, layout) == words


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "line 1, column 1: no element found"),
        ("hello", "line 1, column 1: syntax error"),
        ("<speak>\n <b>a</b></speak>", "line 2, column 2: <b> is no element of SSML"),
        ("<speak>ü<p>\n</speak>", "line 2, column 3: mismatched tag"),
        ("<p>a</p>", "the root, and only the root, must be <speak>"),
        ("<speak><speak/></speak>", "line 1, column 8: the root"),
        ("<speak><p x='1'/></speak>", "<p> has no attribute x"),
        ("<speak><break time='soon'/></speak>", "<break>: time must be a number of seconds"),
        ("<speak><break strength='big'/></speak>", "strength must be one of none"),
        ("<speak><prosody rate='900%'/></speak>", "rate must be in 25% to 400%"),
        ("<speak><prosody rate='quick'/></speak>", "rate must be one of"),
        ("<speak><prosody volume='101'/></speak>", "volume must be one of"),
        (
            "<speak>\n<prosody pitch='200Hz'/></speak>",
            "line 2, column 1: <prosody>: a pitch in Hz is not",
        ),
        ("<speak><prosody pitch='+2'/></speak>", "pitch must be one of x-low, low"),
        ("<speak><prosody pitch='+12.1st'/></speak>", "must be within 12 semitones"),
        ("<speak><prosody pitch='-100%'/></speak>", "must be within 12 semitones"),
        ("<speak><prosody contour='(0%,+1Hz)'/></speak>", "contour of <prosody> is not available"),
        ("<speak><say-as>1</say-as></speak>", "<say-as> needs the attribute interpret-as"),
        ("<speak><say-as interpret-as='x'>1</say-as></speak>", "interpret-as must be one of"),
        ("<speak><say-as interpret-as='date' format='x'>1</say-as></speak>", "format must be one"),
        (
            "<speak><say-as interpret-as='cardinal'>one</say-as></speak>",
            "its text cannot be read as cardinal",
        ),
        ("<speak><say-as interpret-as='ordinal'><p/></say-as></speak>", "may only have text"),
        ("<speak><sub>a</sub></speak>", "<sub> needs the attribute alias"),
        ("<speak><phoneme>a</phoneme></speak>", "<phoneme> needs the attribute ph"),
        ("<speak><phoneme alphabet='x-sampa' ph='a'>a</phoneme></speak>", "must be ipa"),
        ("<speak><mark/></speak>", "<mark> needs the attribute name"),
        ("<speak><emphasis level='huge'/></speak>", "level must be one of strong"),
        ("<speak><audio src='http://a/b.wav'/></speak>", "no addresses are read"),
        ("<speak>&#x9b;</speak>", "column 8: a character reference names a control character"),
        ("<speak>\0</speak>", "control character U+0000 at position 7"),
        ("<speak>&nbsp;</speak>", "undefined entity"),
        ("<!DOCTYPE speak SYSTEM 'a.dtd'><speak/>", "a DOCTYPE is not allowed"),
    ],
)
def test_errors_name_the_position(source: str, message: str) -> None:
    with pytest.raises(TextError, match=re.escape(message)) as raised:
        read_ssml(source)
    assert [violation.field for violation in raised.value.violations] == ["input.ssml"]


def test_lenient_reading_skips_with_a_warning() -> None:
    inside = "<amazon:effect name='w'>a</amazon:effect> <audio src='b'>c</audio><p q='r'>d</p>"
    document = ssml(inside + "<prosody rate='quick'>e</prosody>", lenient=True)
    assert "".join(document.text.split()) == "acde"
    assert len(document.warnings) == 4
    assert document.warnings[0] == (
        "line 1, column 8: <amazon:effect> is no element of SSML: skipped"
    )


def test_an_unknown_level_of_emphasis_is_skipped() -> None:
    document = ssml(
        "<emphasis level='strong'><emphasis level='x'>a</emphasis></emphasis>", lenient=True
    )
    (spoken,) = (part for part in document.parts if isinstance(part, Spoken))
    assert spoken.style == Style(emphasis="strong")
    (warning,) = document.warnings
    assert warning == (
        "line 1, column 33: level must be one of strong, moderate, reduced, none: skipped"
    )


def test_entities_are_not_expanded() -> None:
    laughs = "".join(f"<!ENTITY l{n} '{f'&l{n - 1};' * 10}'>" for n in range(1, 12))
    source = f"<!DOCTYPE speak [<!ENTITY l0 'ha'>{laughs}]><speak>&l11;</speak>"
    outside = "<!DOCTYPE speak [<!ENTITY f SYSTEM 'file:///etc/passwd'>]><speak>&f;</speak>"
    for refused in (source, outside):
        with pytest.raises(TextError, match="a DOCTYPE is not allowed"):
            read_ssml(refused)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("<speak>" + "<p>" * 10_000 + "</p>" * 10_000 + "</speak>", "more than 64 elements inside"),
        ("<speak>" + "<break/>" * 100_000 + "</speak>", f"more than {MAX_PARTS} elements"),
        ("<speak>" + "a" * MAX_CHARACTERS + "</speak>", f"more than {MAX_CHARACTERS} characters"),
    ],
)
def test_large_documents_are_refused_quickly(source: str, message: str) -> None:
    start_s = time.thread_time()
    with pytest.raises(TextError, match=message):
        read_ssml(source)
    assert time.thread_time() - start_s < 2.0


def test_a_text_of_many_lines_is_read_in_linear_time() -> None:
    start_s = time.thread_time()
    document = ssml("é\n" * 100_000)
    assert len(document.parts) == 1
    assert time.thread_time() - start_s < 10.0  # a quadratic reader decodes 30 GB


TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc"), include_characters="\n\t"))


@given(TEXTS)
def test_any_text_is_spoken_unchanged_in_ssml(text: str) -> None:
    allowed = re.sub("[\ufffe\uffff]", "", text)  # no characters of XML
    document = ssml(escape(allowed))
    assert document.text == SPACES.sub(" ", allowed)
    assert all(isinstance(part, Spoken) for part in document.parts)


@given(TEXTS)
def test_any_text_without_tags_is_spoken_unchanged(text: str) -> None:
    plain = text.replace("[", "(")
    document = read_tags(plain)
    assert document.parts == ((Spoken(plain, 0, len(plain)),) if plain else ())


@given(st.text("<>/&;'\"=!-[]() speakprotime0x\n", max_size=60))
def test_any_source_is_read_or_refused(text: str) -> None:
    for source in (text, f"<speak>{text}</speak>", f"<speak>{text}"):
        for lenient in (False, True):
            try:
                document = read_ssml(source, lenient=lenient)
            except TextError:
                continue
            assert all(part.start <= len(source) for part in document.parts)
    pieces = [part for part in read_tags(text).parts if isinstance(part, Spoken)]
    assert all(piece.ipa or piece.text == text[piece.start : piece.end] for piece in pieces)


def test_tags() -> None:
    source = "One [pause:1.5s]two. [voice:amy]Say [tomato](/təˈmɑːtoʊ/). [voice:]Me."
    parts = read_tags(source).parts
    amy = Style(voice="amy")
    at = source.index
    assert parts == (
        Spoken("One ", 0, 4),
        Break(1.5, 4, 16),
        Spoken("two. ", 16, 21),
        Spoken("Say ", at("Say"), at("[tomato"), amy),
        Spoken("tomato", at("[tomato"), at(". [voice:]"), amy, "təˈmɑːtoʊ"),
        Spoken(". ", at(". [voice:]"), at("[voice:]"), amy),
        Spoken("Me.", at("Me."), len(source)),
    )


@pytest.mark.parametrize(
    "text",
    ["[pause:1.5]", "[pause: 1s]", "[a](http://b)", "[voice:a b]", "[]", "[x](//)", "<speak>a</b>"],
)
def test_what_is_no_tag_is_plain(text: str) -> None:
    assert read_tags(text).parts == (Spoken(text, 0, len(text)),)


def test_limits_of_tags() -> None:
    document = read_tags("a[pause:11s]b")
    assert document.parts[1] == Break(10.0, 1, 12)
    assert document.warnings == ("line 1, column 2: the break is shortened to 10 s",)
    with pytest.raises(TextError, match="line 1, column 100001: has more than 10000 tags"):
        read_tags("[pause:1s]" * 100_000)
