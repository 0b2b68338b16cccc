"""Conversion of written to spoken text that keeps the origin of each character.

cleaned words → addresses → abbreviations … numbers … signs → tidy: letters and , . ; : ? ! ' -
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from re import Match, Pattern

from tts.text.english.codes import IDENTIFIER_RULES, PHONE_RULES, VERSION_RULES
from tts.text.english.emoji import EMOJI_RULES
from tts.text.english.formulas import FILE_RULES, OPERATOR_RULES, POWER_RULES
from tts.text.english.numbers import AMOUNT_RULES, DATE_AND_TIME_RULES, NUMBER_RULES, Rule
from tts.text.english.places import ENDS_OF_STREETS, PLACE_RULES
from tts.text.english.words import (
    ABBREVIATION_RULES,
    ABBREVIATIONS,
    ACRONYM_RULES,
    ADDRESS_RULES,
    CALENDAR_NAMES,
    CALENDAR_RULES,
    CAPITAL_RULES,
    PAUSE_RULES,
    ROMAN_RULES,
    SIGN_RULES,
)
from tts.text.languages.registry import is_english, rules_of


@dataclass(frozen=True, slots=True)
class AlignedText:
    """Text with the index of the input word for each character."""

    text: str
    origins: tuple[int, ...]

    @classmethod
    def of_words(cls, words: Iterable[str], joined: Collection[int] = ()) -> AlignedText:
        """Return words with single spaces between them, but not before those with an index in
        `joined`.

        The origin of a space is the word before it.
        """
        texts: list[str] = []
        origins: list[int] = []
        for index, word in enumerate(words):
            if texts and word and index not in joined:
                texts.append(" ")
                origins.append(origins[-1])
            texts.append(word)
            origins += [index] * len(word)
        return cls("".join(texts), tuple(origins))

    def sub(self, pattern: Pattern[str], replace: Callable[[Match[str]], str]) -> AlignedText:
        """Replace each match; the origin of a replacement is the word where the match starts."""
        return self.replaced((*m.span(), replace(m)) for m in pattern.finditer(self.text))

    def replaced(self, spans: Iterable[tuple[int, int, str]]) -> AlignedText:
        """Replace each span [start, end), in order; origins are as for `sub`."""
        found = iter(spans)
        first = next(found, None)
        if first is None:
            return self
        texts: list[str] = []
        origins: list[int] = []
        done = 0
        for start, end, words in chain((first,), found):
            texts += (self.text[done:start], words)
            origins += self.origins[done:start]
            origins += [self.origins[min(start, len(self.origins) - 1)]] * len(words)
            done = end
        return AlignedText("".join((*texts, self.text[done:])), (*origins, *self.origins[done:]))

    def apply(self, rules: Iterable[Rule]) -> AlignedText:
        """Apply all rules in order."""
        result = self
        for pattern, replace in rules:
            if pattern.search(result.text) is not None:  # most rules find nothing
                result = result.sub(pattern, replace)
        return result

    def cut(self, start: int, end: int) -> AlignedText:
        """Return the characters [start, end) without surrounding white space."""
        piece = self.text[start:end]
        start += len(piece) - len(piece.lstrip())
        end -= len(piece) - len(piece.rstrip())
        return AlignedText(self.text[start:end], self.origins[start:end])

    def divided(self, index: int) -> tuple[AlignedText, AlignedText]:
        """Return the text of the words before input word `index`, and that from it on.

        Origins in the second part count from that word.
        """
        start = next((i for i, word in enumerate(self.origins) if word >= index), len(self.text))
        rest = self.cut(start, len(self.text))
        return self.cut(0, start), AlignedText(rest.text, tuple(n - index for n in rest.origins))


def _tidy_rule(pattern: str, template: str) -> Rule:
    return re.compile(pattern), lambda match: match.expand(template)


_TIDY: tuple[Rule, ...] = (
    _tidy_rule(r"\.{2,}(?=\s*[a-z])", ","),
    _tidy_rule(r"[^\w\s,.;:?!'-]|_", " "),
    _tidy_rule(r"(?<!\w)['-]+|['-]+(?!\w)", " "),
    _tidy_rule(r"['-]{2,}", "-"),
    _tidy_rule(r"\s+(?=[,.;:?!])", ""),
)
_TIDY_RUNS: tuple[Rule, ...] = (
    _tidy_rule(r"[,.;:?!]*\?[,.;:?!]*", "?"),
    _tidy_rule(r"[,.;:!]*![,.;:!]*", "!"),
    _tidy_rule(r"[,.;:]*\.[,.;:]*", "."),
    _tidy_rule(r"[,;:]*([;:])[,;:]*|,{2,}", r"\1,"),
    _tidy_rule(r"([;:]),", r"\1"),
)
_TIDY_SPACES: tuple[Rule, ...] = (
    _tidy_rule(r"([,.;:?!])(?=\w)", r"\1 "),
    _tidy_rule(r"^[\s,.;:?!]+|[\s,;:]+$", ""),
    _tidy_rule(r"\s{2,}|[^\S ]", " "),
)
_CLEANING: tuple[tuple[Pattern[str], tuple[Rule, ...]], ...] = tuple(
    (re.compile(trigger), rules)
    for trigger, rules in (
        (r"", _TIDY),
        (r"[,.;:?!]{2}", _TIDY_RUNS),
        (r"", _TIDY_SPACES),
    )
)
_ENGLISH: tuple[tuple[Pattern[str], tuple[Rule, ...]], ...] = tuple(
    (re.compile(trigger), rules)
    for trigger, rules in (
        (r"\w\.\w|@|//|\]\(|[:;=8]-?[)(DPpOo|\\/]|\.\s\d", ADDRESS_RULES),
        (
            r"\b[NSEW]\b\.?[\s,]|[A-Z]{2}\s\d{5}|,\s[A-Z]{2}\b|[Zz][Ii][Pp]|" + ENDS_OF_STREETS,
            PLACE_RULES,
        ),
        (r"[\^×!]|\d[eE*x/]|\d\s[*x/]|squared|cubed|\b[fgh]\(", POWER_RULES),
        (r"::|#|0[xX]|\d\(|:\d|\d\.\d+\.\d|[A-Z]\w?[- ]?\d|[a-z.]\s\d{2}|:\w\w:", IDENTIFIER_RULES),
        (r"\d", DATE_AND_TIME_RULES),
        (r"\d{3}|[Ee]xt\b", PHONE_RULES),
        (r"\d\.[\dx*]|[vV]\.?\s?\d", VERSION_RULES),
        (r"\d", AMOUNT_RULES),
        (r"[a-z][A-Z]|pH|[A-Z]{3}[a-z]", CAPITAL_RULES),
        (ABBREVIATIONS, ABBREVIATION_RULES),
        (CALENDAR_NAMES, CALENDAR_RULES),
        (r"\s[IVXLC]+\b|\s[ivx]{2,}\b|\b[IVX]{2}", ROMAN_RULES),
        (r"[A-Z]{2}", ACRONYM_RULES),
        (r"\d", NUMBER_RULES),
        (r"#|[!<>]=|&&|\|\||Ctrl|\*\.|(?<![\w/<.])~?/|[A-Za-z]\+|(?<!\S)\.", OPERATOR_RULES),
        (r"\.[A-Za-z]", FILE_RULES),
        (r"[^\w\s,.;:?!'\"()`-]|[^\x00-\x7f]|\.[A-Za-z]", SIGN_RULES),
        (r"[^\x00-\x7f]", EMOJI_RULES),
        (r"[-–—()\[\]{}]|=>", PAUSE_RULES),
    )
)
"""Rules in their order; a stage whose pattern is not in the text is skipped."""


def speak_words(text: AlignedText, language: str = "") -> AlignedText:
    """Apply all rules of a language and clean up. The result has no digits and is stable.

    `language` is the BCP-47 code of a language with a reader; "": English.
    """
    text = _applied(text, _ENGLISH) if is_english(language) else text.apply(rules_of(language))
    return _applied(text, _CLEANING)


def _applied(
    text: AlignedText, stages: Iterable[tuple[Pattern[str], tuple[Rule, ...]]]
) -> AlignedText:
    for trigger, rules in stages:
        if trigger.search(text.text):
            text = text.apply(rules)
    return text
