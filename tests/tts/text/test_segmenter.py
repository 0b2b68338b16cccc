"""Splitting text: sentences, clauses, caps, ranges, and independence of how the text arrives."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tts.errors import InvalidRequestError
from tts.text.clean import TextError, check_text
from tts.text.lexicon.entries import Alphabet, Lexicon, Pronunciation
from tts.text.normalize import AlignedText
from tts.text.segmenter import (
    FIRST_STAND_IN,
    MAX_EAGER,
    MAX_PHONEMES,
    SegmentMode,
    SegmentStream,
    TextNormalization,
    TextOptions,
    TextSegment,
    pieces_of,
    split_text,
    spoken_size,
    spoken_text,
)

SPLITTING = (SegmentMode.SENTENCE, SegmentMode.CLAUSE)
PIECES = st.sampled_from(
    [
        *("Hello", "world.", "Dr.", "Smith", "e.g.", "U.S.", "The", "no.", "5", "No.", "etc."),
        *("$5.20", "3:05", "p.m.", "21", "November", "2026,", "said", '"Stop!"', "he", "..."),
        *("wait...", "what?", "(really)", "1.", "-", "😀", "x" * 150, "9" * 40, "café", "Ω"),
        *("one,", "two;", "three", "four", "—", "。", "日本語。", "J.", "I.", "St.", "Main"),
    ]
)
SPACES = st.sampled_from([" ", " ", " ", "  ", "\n", "\n\n", "\t", "\r\n\r\n", ""])
TEXTS = st.lists(st.tuples(PIECES, SPACES), max_size=40).map(
    lambda parts: "".join(word + space for word, space in parts)
)


def texts(text: str, mode: SegmentMode = SegmentMode.SENTENCE, limit: int = 200) -> list[str]:
    """Return the text of each segment, without normalization."""
    options = TextOptions(limit, mode, TextNormalization.OFF)
    return [segment.text for segment in split_text(text, options)]


def segments_of(fragments: list[str], options: TextOptions) -> list[TextSegment]:
    stream = SegmentStream(options)
    return [s for part in fragments for s in stream.feed(part)] + stream.flush()


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Dr. Smith left. He ran.", ["Dr. Smith left.", "He ran."]),
        ("It has 3.5 and 1,000. Next.", ["It has 3.5 and 1,000.", "Next."]),
        ("The U.S. Senate met. It sat.", ["The U.S. Senate met.", "It sat."]),
        ("He is in the U.S. The end.", ["He is in the U.S.", "The end."]),
        ("At 3 p.m. Then at 4 p.m. sharp.", ["At 3 p.m.", "Then at 4 p.m. sharp."]),
        ("Cats, dogs, etc. Birds too.", ["Cats, dogs, etc.", "Birds too."]),
        ("Cats, etc. are fine.", ["Cats, etc. are fine."]),
        ("See e.g. Fig. 3 or No. 5. Done.", ["See e.g. Fig. 3 or No. 5.", "Done."]),
        ("No. I will not.", ["No.", "I will not."]),
        ("J. R. R. Tolkien wrote. A lot.", ["J. R. R. Tolkien wrote.", "A lot."]),
        ("Choose plan B. The rest is easy.", ["Choose plan B.", "The rest is easy."]),
        ("Well... maybe. Well... Maybe.", ["Well... maybe.", "Well...", "Maybe."]),
        ('"Stop!" he said. "Go." She went.', ['"Stop!" he said.', '"Go."', "She went."]),
        ("On Main St. The shop. In St. Louis.", ["On Main St.", "The shop.", "In St. Louis."]),
        ("1. First thing. 2. Second.", ["1. First thing.", "2. Second."]),
        ("A title\n\nA text", ["A title", "A text"]),
        ("one line\nsame sentence", ["one line same sentence"]),
        ("List:\n- one\n- two\n2) three", ["List:", "- one", "- two", "2) three"]),
        ("Paid on Jan. 5. Good.", ["Paid on Jan. 5.", "Good."]),
        ("Go to example.com. Now.", ["Go to example.com.", "Now."]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert texts(text) == sentences


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        (
            "When the long rain stops, we walk; all of us will be so happy.",
            ["When the long rain stops,", "we walk; all of us will be so happy."],
        ),
        ("Yes, no, yes. Done.", ["Yes, no, yes.", "Done."]),
        (
            "The whole party is on November 21, 2026, in the big garden.",
            ["The whole party is on November 21, 2026,", "in the big garden."],
        ),
        (
            "The price of it all was 1,000 — which is quite a lot",
            ["The price of it all was 1,000 -", "which is quite a lot"],
        ),
    ],
)
def test_clauses(text: str, clauses: list[str]) -> None:
    assert texts(text, SegmentMode.CLAUSE) == clauses


def test_one_segment_without_splitting() -> None:
    assert texts("One. Two.\n\nThree", SegmentMode.NONE) == ["One. Two. Three"]
    assert texts("x" * 10, SegmentMode.NONE, 10) == ["x" * 10]


@pytest.mark.parametrize("text", ["word " * 41, "word " * 5000])
def test_text_that_must_not_be_split_must_fit(text: str) -> None:
    with pytest.raises(TextError, match="does not fit into one segment of 200 characters"):
        texts(text, SegmentMode.NONE)


def test_unsplit_text_must_fit_after_normalization() -> None:
    options = TextOptions(40, SegmentMode.NONE)
    with pytest.raises(TextError, match="does not fit"):
        list(split_text("1234567 7654321", options))


def test_long_runs_are_cut_at_pauses_then_spaces_then_anywhere() -> None:
    pauses = texts("a b c d e f, g h i j k l m n o p q r s t", limit=20)
    assert pauses[0] == "a b c d e f,"
    spaces = texts("word " * 20, limit=23)
    assert set(spaces) == {"word word word word"}
    assert [len(s) for s in texts("y" * 120, limit=50)] == [50, 50, 20]


def test_the_cap_does_not_split_a_date_or_an_amount() -> None:
    text = "so many words that never stop come before the party on 21 November 2026 here"
    for limit in range(30, 60):
        spoken = [s.text for s in split_text(text * 3, TextOptions(limit))]
        assert "twenty-first of November" in " ".join(spoken)
        assert max(map(len, spoken)) <= limit


def test_segments_come_as_soon_as_they_are_certain() -> None:
    stream = SegmentStream(TextOptions())
    assert stream.feed("Hello there.") == []
    assert [s.text for s in stream.feed(" ")] == ["Hello there."]
    assert stream.feed("It is 3 p.m. ") == []
    assert [s.text for s in stream.feed("The ")] == ["It is three P M."]
    assert [s.text for s in stream.flush()] == ["The"]
    assert stream.flush() == []


def test_ranges_and_indices_continue_after_a_flush() -> None:
    stream = SegmentStream(TextOptions())
    first = stream.feed("One two") + stream.flush()
    second = stream.feed(" three. Four") + stream.flush()
    assert [(s.index, s.text, s.start, s.end) for s in first + second] == [
        (0, "One two", 0, 7),
        (1, "three.", 7, 14),
        (2, "Four", 14, 19),
    ]
    assert stream.num_characters == 19


def test_discarded_text_is_not_returned() -> None:
    stream = SegmentStream(TextOptions())
    assert [s.text for s in stream.feed("Said. Never sa")] == ["Said."]
    stream.discard()
    later = stream.feed("Again. ")
    assert [(s.index, s.text, s.start, s.end) for s in later] == [(1, "Again.", 14, 20)]


def test_unspeakable_characters_are_counted() -> None:
    stream = SegmentStream(TextOptions())
    stream.feed("Hello Привет 日本 😀")
    stream.flush()
    assert stream.num_lost == 8
    assert "characters=17" in repr(stream)


def test_letters_of_no_language_that_the_model_reads_are_removed_and_counted() -> None:
    options = TextOptions(ascii_only=False, letters=frozenset("ñ"), language="es")
    stream = SegmentStream(options)
    (segment,) = stream.feed("El año en Łódź: la 1.ª яñ de π Привет Αθήνα日. ") + stream.flush()
    assert segment.text == "El año en Łódź: la primera ñ de π."
    assert stream.num_lost == 13
    assert options.clean("Привет año 日本") == "año"


@pytest.mark.parametrize("bad", ["\0", "\x07", "\x1b", "\x7f", "\x9f", "\ud800"])
def test_control_characters_are_refused(bad: str) -> None:
    with pytest.raises(TextError, match=f"control character U\\+{ord(bad):04X} at position 3"):
        split_text(f"abc{bad}def", TextOptions())
    stream = SegmentStream(TextOptions())
    stream.feed("a")
    with pytest.raises(InvalidRequestError, match="at position 3"):
        stream.feed(f"bc{bad}")


def test_tabs_and_line_ends_are_accepted() -> None:
    check_text("a\tb\r\nc\x0b\x0c\x85\u2028d")
    assert texts("a\tb\r\nc") == ["a b c"]


def test_a_cap_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_characters"):
        TextOptions(max_characters=0)


@given(TEXTS, st.sampled_from(SPLITTING), st.sampled_from(TextNormalization), st.integers(1, 90))
def test_segments_respect_the_cap_and_cover_the_text(
    text: str, mode: SegmentMode, normalization: TextNormalization, limit: int
) -> None:
    options = TextOptions(limit, mode, normalization)
    segments = list(split_text(text, options))
    assert all(0 < len(s.text) <= limit for s in segments)
    assert all(any(c.isalnum() for c in s.text) for s in segments)
    assert [s.index for s in segments] == list(range(len(segments)))
    if segments:
        assert segments[0].start == 0
        assert all(a.end == b.start and a.start <= a.end for a, b in pairwise(segments))
        assert list(split_text(text[segments[-1].end :], options)) == []


@given(TEXTS, st.data(), st.sampled_from(SPLITTING), st.integers(0, MAX_EAGER))
def test_segments_do_not_depend_on_how_the_text_arrives(
    text: str, data: st.DataObject, mode: SegmentMode, eager: int
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    bounds = [0, *cuts, len(text)]
    fragments = [text[a:b] for a, b in pairwise(bounds)]
    lexicon = Lexicon.of([Pronunciation("the U.S.", "us")], ascii_only=True)
    options = TextOptions(60, mode, lexicons=(lexicon,), eager=eager)
    assert (
        segments_of(fragments, options)
        == segments_of([text], options)
        == segments_of(list(text), options)
    )


NAMES = Lexicon.of([Pronunciation("New York City", "the big apple")], ascii_only=True)


@pytest.mark.parametrize(
    ("text", "clauses", "words"),
    [
        (
            "When it rains, we stay at home.",
            ["When it rains", "we stay at home."],
            ["When it rains", "we stay at home."],
        ),
        (
            "We all stay at home when it rains, or we get wet.",
            ["We all stay at home when it rains", "or we get wet."],
            ["We all stay at home", "when it rains, or we get wet."],
        ),
        ("Oh, we all know it.", None, ["Oh, we all know", "it."]),
        ("It costs me about 20 dollars.", None, None),
        ("It is there on the 5 May bill.", None, None),
        ("It is version five point two of it.", None, ["It is version five point two", "of it."]),
        ("He knows Mary Ann well enough.", None, ["He knows Mary Ann", "well enough."]),
        ("She and Dr. Smith left early.", None, ["She and Doctor Smith", "left early."]),
        ("We flew to New York City again.", None, ["We flew to the big apple", "again."]),
        (
            "He came last Sunday, 5 May, alone.",
            ["He came last Sunday", "the fifth of May, alone."],
            ["He came last Sunday", "the fifth of May, alone."],
        ),
        (
            "They live in Springfield, IL 62701, today.",
            ["They live in Springfield, Illinois, six two seven zero one", "today."],
            ["They live in Springfield, Illinois, six two seven zero one", "today."],
        ),
        ("Then I left. We all know it, too.", None, None),
    ],
)
def test_an_eager_utterance_begins_with_a_part_of_its_first_sentence(
    text: str, clauses: list[str] | None, words: list[str] | None
) -> None:
    whole = [s.text for s in split_text(text, TextOptions(lexicons=(NAMES,)))]
    for eager, expected in ((1, clauses), (2, words)):
        segments = segments_of([text], TextOptions(lexicons=(NAMES,), eager=eager))
        assert [segment.text for segment in segments] == (expected or whole), eager
        assert segments[0].is_open == (expected is not None)
        if expected:
            assert [segment.sentence for segment in segments] == ["", *whole]


@given(TEXTS, st.sampled_from(SPLITTING), st.integers(1, MAX_EAGER))
def test_eager_parts_are_read_as_their_sentence(text: str, mode: SegmentMode, eager: int) -> None:
    options = TextOptions(10_000, mode)
    segments = segments_of([text], replace(options, eager=eager))
    joined = [segment.sentence or segment.text for segment in segments if not segment.is_open]
    whole = [segment.text for segment in split_text(text, options)]
    if segments and segments[-1].is_open:  # nothing is spoken behind it
        joined.append(segments[-1].text)
        whole[-1] = whole[-1].rstrip(",;: ")
    assert joined == whole


def test_an_eager_part_is_ready_with_the_word_that_follows() -> None:
    stream = SegmentStream(TextOptions(eager=2))
    assert stream.feed("We all know him quit") == []
    (segment,) = stream.feed("e ")
    assert (segment.text, segment.is_open) == ("We all know him", True)
    stream = SegmentStream(TextOptions(eager=1))
    assert stream.feed("If that is so, I") == []
    (segment,) = stream.feed(" ")
    assert (segment.text, segment.is_open) == ("If that is so", True)


def test_a_paragraph_does_not_continue_an_eager_part() -> None:
    stream = SegmentStream(TextOptions(eager=1))
    segments = stream.feed("My dear Mister Miller,\n\nThank you. ") + stream.flush()
    assert [(s.text, s.is_open, s.sentence) for s in segments] == [
        ("My dear Mister Miller", False, ""),
        ("Thank you.", False, ""),
    ]


def test_an_utterance_begins_again_after_a_flush_and_a_cancellation() -> None:
    options = TextOptions(eager=1)
    stream = SegmentStream(options)
    once = stream.feed("If that is so, I go. If that is so, I go. ")
    assert [segment.is_open for segment in once] == [True, False, False]
    stream.flush()
    assert [segment.is_open for segment in stream.feed("If that is so, I ")] == [True]
    (rest,) = stream.flush()
    assert (rest.text, rest.sentence) == ("I", "If that is so, I")
    assert [segment.is_open for segment in stream.feed("If that is so, I ")] == [True]
    stream.discard()
    (again,) = stream.feed("But if not, I stay.")[:1]
    assert (again.text, again.is_open, again.sentence) == ("But if not", True, "")


def test_a_sentence_too_long_for_one_call_is_not_continued() -> None:
    options = TextOptions(40, eager=1)
    text = "If that is so, I will walk with you to the station."
    assert [(s.is_open, s.sentence) for s in segments_of([text], options)] == [
        (True, ""),
        (False, ""),
    ]


@given(TEXTS)
def test_the_words_are_those_of_the_whole_text(text: str) -> None:
    """Splitting loses nothing and adds nothing."""
    whole = TextOptions(100_000, SegmentMode.NONE, TextNormalization.OFF)
    together = " ".join(s.text for s in split_text(text, whole))
    split = "".join(
        s.text for s in split_text(text, TextOptions(70, normalization=whole.normalization))
    )
    assert [c for c in split if c.isalnum()] == [c for c in together if c.isalnum()]


@pytest.mark.parametrize(
    "text",
    ["word " * 8_000, "Some sentence here. " * 2_000, "z" * 40_000, " " * 40_000, "9" * 40_000],
)
def test_memory_stays_steady_on_long_text(text: str) -> None:
    list(split_text(text[:2000], TextOptions()))  # lazy imports and caches
    tracemalloc.start()
    try:
        for _ in split_text(text, TextOptions()):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000


def test_a_wide_character_counts_as_three_letters() -> None:
    sentence = "今天天气很好，我们一起去公园散步，然后在湖边的小饭馆里吃午饭，" * 3 + "最后回家。"
    options = TextOptions(ascii_only=False, normalization=TextNormalization.OFF)
    texts = [segment.text for segment in split_text(sentence, options)]
    assert len(texts) >= 2
    assert max(map(spoken_size, texts)) <= 200
    assert all(text[-1] in ",." for text in texts)
    assert "".join(texts) == sentence.replace("，", ",").replace("。", ".")
    assert spoken_size("abc é") == 5
    assert spoken_size("你好 abc") == 10


@pytest.mark.parametrize("mark", ["", "，", "a"])
@pytest.mark.parametrize("normalization", TextNormalization)
def test_a_run_of_wide_characters_gets_no_space_where_it_is_cut(
    mark: str, normalization: TextNormalization
) -> None:
    run = "天" * 127 + (mark or "气") + "天" * 70
    options = TextOptions(800, ascii_only=False, normalization=normalization)
    (segment,) = split_text(run + " 很好", options)
    spoken = run.replace("，", ", " if normalization is TextNormalization.ON else ",")
    assert segment.text == f"{spoken} 很好"
    assert (segment.start, segment.end) == (0, len(run) + 3)
    assert [(word.start, word.end) for word in segment.words] == [
        (0, 128),
        (128, len(run)),
        (len(run) + 1, len(run) + 3),
    ]


def test_a_whole_text_is_one_segment() -> None:
    options = TextOptions(60, ascii_only=False)
    assert spoken_text("", options) == ""
    assert spoken_text("It is 2. So\nwhat?", options) == "It is two. So what?"
    assert spoken_text("天" * 300 + " 很好", options) == "天" * 300 + " 很好"


@given(text=st.text("ab 你好，.", min_size=1), limit=st.integers(1, 20))
def test_pieces_respect_the_limit_and_cover_the_text(text: str, limit: int) -> None:
    pieces = [piece.text for piece in pieces_of(AlignedText.of_words(text.split()), limit)]
    assert "".join(pieces).replace(" ", "") == "".join(text.split())
    assert all(spoken_size(piece) <= limit or len(piece) == 1 for piece in pieces)


def test_phonemes_stand_between_marks_and_are_not_normalised() -> None:
    pairs = (("cafe au lait", "kæfˈeɪ oʊ lˈeɪ"), ("dr.", "dˈɒktə"), ("3", "θɹˈiː"))
    said = [Pronunciation(phrase, ipa, Alphabet.IPA) for phrase, ipa in pairs]
    lexicon = Lexicon.of([*said, Pronunciation("me", "us")], ascii_only=True)
    for mode in TextNormalization:
        options = TextOptions(normalization=mode, lexicons=(lexicon,))
        (segment,) = split_text("Give me 3 café au lait, Dr. No ⟨x⟩!", options)
        text = "Give us ⟨θɹˈiː⟩ ⟨kæfˈeɪ⟩ ⟨oʊ⟩ ⟨lˈeɪ⟩, ⟨dˈɒktə⟩ No x!"
        assert segment.text == text
        assert [word.spoken for word in segment.words][3] == "⟨kæfˈeɪ⟩ ⟨oʊ⟩ ⟨lˈeɪ⟩"
        assert segment.pronunciations == (Pronunciation("me", "us"), said[2], said[0], said[1])


@pytest.mark.parametrize("normalization", TextNormalization)
def test_a_text_has_no_marks_of_phonemes_and_none_of_their_letters(
    normalization: TextNormalization,
) -> None:
    """Also for models that read all letters: only a lexicon writes phonemes."""
    letter = chr(FIRST_STAND_IN)
    lexicon = Lexicon.of([Pronunciation("b", "biː", Alphabet.IPA)], ascii_only=False)
    options = TextOptions(lexicons=(lexicon,), ascii_only=False, normalization=normalization)
    (segment,) = split_text(f"⟨x⟩ {letter} b", options)
    assert segment.text == f"x {letter} ⟨biː⟩"


def test_phrases_in_ipa_are_bounded() -> None:
    options = TextOptions(phonemes=(("a", "ə"),) * (MAX_PHONEMES + 1))
    with pytest.raises(InvalidRequestError, match="more than 900"):
        options.check_pronunciations("field")
