"""`Lexicon`: pronunciations by phrase, found in a text in time that its size does not change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from re import Match

from tts.text.clean import clean_phrase

MAX_PHRASE_CHARACTERS = 200  # also of a pronunciation
_TOKENS = re.compile(r"\w+|[^\w\s]")
_ONE_TOKEN = (1,)


class Alphabet(Enum):
    """Signs of a pronunciation."""

    LETTERS = "letters"  # a respelling
    IPA = "ipa"
    ARPABET = "arpabet"


@dataclass(frozen=True, slots=True)
class Pronunciation:
    """A phrase, and what is spoken in its place."""

    phrase: str
    spoken: str
    alphabet: Alphabet = Alphabet.LETTERS


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Pronunciations by phrase. Phrases are whole words, and signs between them.

    `entries` has phrases with a capital as they are: they match that case only. Other phrases are
    case-folded and match any case. `lengths` has the numbers of tokens (words and signs) of all
    phrases that begin with a case-folded token, longest first, where there are some of several.
    """

    entries: Mapping[str, Pronunciation] = field(default_factory=dict)
    lengths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    language: str = ""  # BCP-47; empty: any

    def __repr__(self) -> str:
        return f"Lexicon({len(self.entries)} phrases)"

    @classmethod
    def of(
        cls,
        entries: Iterable[Pronunciation],
        *,
        ascii_only: bool,
        any_case: bool = False,
        language: str = "",
    ) -> Lexicon:
        """Return the lexicon of entries; the last of two with the same phrase counts.

        `ascii_only`: as in the text's options; `any_case`: capitals match any case, too. Raises
        ValueError for a phrase that matches no word.
        """
        by_phrase: dict[str, Pronunciation] = {}
        lengths: dict[str, tuple[int, ...]] = {}
        for entry in entries:
            for phrase in keys_of(entry.phrase, ascii_only=ascii_only):
                folded = phrase.casefold()
                is_exact = not any_case and phrase != phrase.lower()
                by_phrase[phrase if is_exact else folded] = entry
                tokens = _TOKENS.findall(folded)
                known = lengths.get(tokens[0], _ONE_TOKEN)
                if len(tokens) not in known:
                    lengths[tokens[0]] = tuple(sorted((*known, len(tokens)), reverse=True))
        return cls(by_phrase, lengths, language)

    def get(self, phrase: str) -> Pronunciation | None:
        """Return the entry of a phrase of a text; one for this case is preferred."""
        return self.entries.get(phrase) or self.entries.get(phrase.casefold())


def keys_of(phrase: str, *, ascii_only: bool) -> set[str]:
    """Return a phrase as it stands in cleaned texts, with and without their signs; of an
    `ascii_only` model also as it stands in those of another language that it reads.

    Raises ValueError for one that matches no word.
    """
    if phrase.isascii():
        found = {" ".join(phrase.split())}
    else:
        found = _cleaned(phrase, ascii_only=ascii_only)
    if not all(map(_TOKENS.search, found)):
        raise ValueError("the phrase has no letters")
    return found | _cleaned(phrase, ascii_only=False) if ascii_only else found


def _cleaned(phrase: str, *, ascii_only: bool) -> set[str]:
    return {clean_phrase(phrase, ascii_only=ascii_only, keep_signs=keep) for keep in (True, False)}


def find_phrases(
    text: str, lexicons: Sequence[Lexicon]
) -> Iterator[tuple[int, int, Pronunciation]]:
    """Yield [start, end) and the entry of each phrase of a cleaned text, from left to right.

    The longest phrase counts; of equally long ones that of the first lexicon.
    """
    tokens = list(_TOKENS.finditer(text))
    at = 0
    while at < len(tokens):
        found = _longest_at(text, tokens, at, lexicons)
        if found is None:
            at += 1
            continue
        count, entry = found
        yield tokens[at].start(), tokens[at + count - 1].end(), entry
        at += count


def may_continue(text: str, lexicons: Sequence[Lexicon]) -> bool:
    """Return whether a phrase may begin in a cleaned text and end behind it."""
    tokens = _TOKENS.findall(text.casefold())
    return any(
        lexicon.lengths.get(token, _ONE_TOKEN)[0] > len(tokens) - index
        for lexicon in lexicons
        for index, token in enumerate(tokens)
    )


def _longest_at(
    text: str, tokens: Sequence[Match[str]], at: int, lexicons: Sequence[Lexicon]
) -> tuple[int, Pronunciation] | None:
    """Return the number of tokens of the longest phrase that begins at a token, and its entry."""
    start, first = tokens[at].start(), tokens[at].group().casefold()
    if start and _is_word(text[start - 1]) and not _is_word(text[start]):
        return None  # a sign inside a word
    lengths = {n for lexicon in lexicons for n in lexicon.lengths.get(first, _ONE_TOKEN)}
    for count in sorted(lengths, reverse=True):
        if at + count > len(tokens):
            continue
        end = tokens[at + count - 1].end()
        if _is_word(text[end : end + 1]) and not _is_word(text[end - 1]):
            continue
        for lexicon in lexicons:
            entry = lexicon.get(text[start:end])
            if entry is not None:
                return count, entry
    return None


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()
