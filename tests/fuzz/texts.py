"""Random Unicode, whole and in pieces: segments, normalised words, prompts, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random

from llm import RequestError
from tests.fakes import CHAT_TEMPLATE, build_tiny_checkpoint
from tests.fuzz.base import Case, InvariantError, Target
from tests.fuzz.mutation import characters
from tts.checkpoint.chat import ChatMessage, ChatRole
from tts.errors import InvalidRequestError
from tts.families.base import Checkpoint
from tts.families.prompt import PromptBuilder
from tts.families.registry import find_family
from tts.text.lexicon.entries import Alphabet, Lexicon, Pronunciation
from tts.text.segmenter import (
    WIDE_SIZE,
    SegmentMode,
    SegmentStream,
    TextNormalization,
    TextOptions,
    TextSegment,
    split_text,
    spoken_size,
    spoken_text,
)
from tts.textgen.generator import StopMatcher

LONGEST = 10_000  # maximum number of characters of a request
FAMILY_EMOJI = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
WORDS = (
    *("Hello", "world.", "Dr.", "e.g.", "U.S.", "no.", "etc.", '"Stop!"', "...", "(a)", "J.", "'s"),
    *(
        "$5.20",
        "3:05",
        "p.m.",
        "21",
        "2026-11-21",
        "1/2",
        "-5",
        "1,000,000",
        "10km/h",
        "007",
        "5-6",
    ),
    *("http://", "www.", "a@b.c", "https://x.y/z?q=%20#", "://", "C:\\", "#1", "+1 555 123 4567"),
    *("<|s_1|>", "<laugh>", "[x](y)", "**b**", "50%", "€", "°C", "½", "²", "№", "Ⅳ", "①", "٣", "३"),
    *(
        "日本語。",
        "你好，",
        "！",
        "한국어",
        "مرحبا",
        "שלום",
        "\u202e",
        "\u2066",
        "\u200d",
        "e\u0301",
    ),
    *("a" + "\u0301" * 40, FAMILY_EMOJI, "\U0001f1e9\U0001f1ea", "ﬁ", "ﷺ", "\u1e9e", "İ", "ß", "Ω"),
)
GAPS = (" ", " ", " ", "", "\n", "\n\n", "\t", "\u3000", "\u2028", "\r\n", "  ", "-", ",", ".")


def some_text(chance: Random) -> str:
    """Return words, unusual characters, numbers and long runs, up to the maximum length."""
    parts: list[str] = []
    for _ in range(chance.choice((1, 3, 10, 40))):
        parts.append(chance.choice(_PARTS)(chance))
        parts.append(chance.choice(GAPS))
    return ("".join(parts) * (20 if chance.random() < 0.03 else 1))[:LONGEST]


def _digits(chance: Random) -> str:
    digits = "".join(chance.choices("0123456789", k=chance.choice((1, 4, 9, 40, 400))))
    sign, end = (
        chance.choice(("", "$", "-", "+", "#", ".")),
        chance.choice(("", "%", "th", "k", "s")),
    )
    return (
        sign
        + chance.choice(("", ".", ",", ":", "/", "-", " ")).join(
            (digits, digits[: chance.choice((0, 2, 4))])
        )
        + end
    )


def _long_run(chance: Random) -> str:
    unit = chance.choice(
        ("x", "9", "-", ".", "'", "a.", "日", "1,", "\u0301", "(", "a-", "1/", "$")
    )
    return unit * chance.choice((100, 1000, 4000))


_PARTS: tuple[Callable[[Random], str], ...] = (
    *[lambda chance: chance.choice(WORDS)] * 8,
    *[lambda chance: characters(chance, chance.choice((1, 5, 30)))] * 4,
    _digits,
    _digits,
    lambda chance: "".join(chance.sample(WORDS, 3)),
    lambda chance: _long_run(chance) if chance.random() < 0.1 else "and",
)


def in_pieces(text: str, chance: Random) -> list[str]:
    """Return the text, cut at random places."""
    cuts = sorted(chance.randint(0, len(text)) for _ in range(chance.choice((1, 5, 60))))
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


def _options(chance: Random) -> TextOptions:
    entries = (
        *(Pronunciation(*pair) for pair in (("Dr.", "doctor"), ("Hello", "日本"), ("é", "e"))),
        *(Pronunciation(phrase, "ˈiː ə", Alphabet.IPA) for phrase in ("1", "s", "(a)", "e.g.")),
    )
    chosen, ascii_only = chance.sample(entries, chance.choice((0, 0, 2))), chance.random() < 0.5
    any_case = chance.random() < 0.5
    lexicons = (Lexicon.of(chosen, ascii_only=ascii_only, any_case=any_case),) * bool(chosen)
    return TextOptions(
        max_characters=chance.choice((1, 3, 20, 200, 1000)),
        mode=chance.choice(tuple(SegmentMode)),
        normalization=chance.choice(tuple(TextNormalization)),
        lexicons=lexicons,
        ascii_only=ascii_only,
        tags=chance.choice(((), ("<laugh>",))),
    )


class _Reader:
    """Reads texts as a tiny checkpoint's requests do."""

    def __init__(self, folder: Path) -> None:
        checkpoint = Checkpoint(build_tiny_checkpoint(folder / "tiny"), CHAT_TEMPLATE)
        family = find_family(checkpoint)
        assert family is not None
        self._prompts = PromptBuilder(checkpoint, family)

    def try_one(self, chance: Random) -> None:
        text, options = some_text(chance), _options(chance)
        pieces = in_pieces(text, chance)
        whole = _segments([text], options)
        if whole != _segments(pieces, options):
            raise InvariantError("pieces of the text give other segments than the whole")
        if whole is not None:
            _check_segments(whole, text, options)
            spoken_text(text, options)
        self._check_prompts(text, pieces, chance)

    def _check_prompts(self, text: str, pieces: Sequence[str], chance: Random) -> None:
        """Check that the text of a prompt can be decoded from its ids; conversations are accepted
        or refused.
        """
        tokenizer = self._prompts.tokenizer
        try:
            ids = self._prompts.text_prompt(text)
            turns = [ChatMessage(chance.choice(tuple(ChatRole)), piece) for piece in pieces]
            self._prompts.chat_prompt(turns)
        except (RequestError, InvalidRequestError):
            return
        if tokenizer.decode(ids) != text:
            raise InvariantError("the ids of a text spell another one")
        stops = [piece for piece in pieces if 0 < len(piece) <= 1000]
        matcher = StopMatcher(stops)
        said = "".join(map(matcher.push, pieces)) + matcher.finish()
        if not text.startswith(said) or any(stop in said for stop in stops):
            raise InvariantError("a stop string was let through")


def _segments(pieces: Sequence[str], options: TextOptions) -> list[TextSegment] | None:
    """Return all segments; None if the text is refused."""
    stream = SegmentStream(options)
    try:
        return [s for piece in pieces for s in stream.feed(piece)] + stream.flush()
    except InvalidRequestError:
        return None


def _check_segments(segments: Sequence[TextSegment], text: str, options: TextOptions) -> None:
    limit = max(options.max_characters, WIDE_SIZE)
    for segment in segments:
        if not segment.text or spoken_size(segment.text) > limit:
            raise InvariantError(f"a segment of {spoken_size(segment.text)}, the limit is {limit}")
    starts = [0, *(segment.end for segment in segments)]
    if any(s.start != start or s.end < s.start for s, start in zip(segments, starts, strict=False)):
        raise InvariantError("the ranges of the segments do not join")
    if starts[-1] > len(text) or list(split_text(text[starts[-1] :], options)):
        raise InvariantError("the end of the text was not spoken")


@contextmanager
def _opened(folder: Path) -> Iterator[Case]:
    yield _Reader(folder).try_one


TEXTS = Target("texts", _opened)
