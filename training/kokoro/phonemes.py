"""Text to the teacher's phonemes: misaki with a tagger that needs no model of its own.

    python -m training.kokoro.phonemes --lines runs/lines.txt --package runs/teacher/package \
        --out runs/phonemes [--made-up 30000]
    python -m training.kokoro.phonemes --lines runs/spanish.txt --package runs/teacher/package \
        --out runs/phonemes --accents e

Needs the packages misaki, spacy, textblob, phonemizer-fork and espeakng-loader (training only).
misaki asks spaCy for English words with Penn tags. Here spaCy's rules split the words, and
TextBlob's tagger names their parts of speech; words that misaki's lexicon lacks are said as
espeak-ng does. Spanish is said as espeak-ng does, which is what misaki does for the teacher's own
Spanish. With --made-up each English accent has so many more lines, with words that exist in no
language (`training.kokoro.made_up`).
"""

from __future__ import annotations

import argparse
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.kokoro.made_up import Lines
from training.kokoro.packages import symbols

ENGLISH = {"a": False, "b": True}  # American, British
SPANISH = "e"  # that of Spain
ACCENTS = (*ENGLISH, SPANISH)
"""Letters of the teacher's voices; plans, takes and tokens have an accent's place here."""
# Tags that misaki compares, by what the word is; the tagger was made for words only.
PUNCTUATION = (
    (r"[.!?…]+", "."),
    (r",", ","),
    (r"[:;—–-]+", ":"),
    (r"[(\[{]", "-LRB-"),
    (r"[)\]}]", "-RRB-"),
    (r"[\"“]", "``"),
    (r"”", "''"),
    (r"[$£€]", "$"),
    (r"[\d.,:]+", "CD"),
)
MAX_SYMBOLS = 250  # of a line
PRONOUNS = frozenset(
    ("i", "me", "you", "he", "him", "she", "her", "it", "we", "us", "they", "them")
)
ARTICLES = frozenset(("a", "an", "the"))
VERB_FORMS = frozenset(("NN", "VBP", "VBD"))


@dataclass(frozen=True, slots=True)
class Word:
    """What misaki reads of a spaCy token."""

    text: str
    tag_: str
    whitespace_: str


class Tagger:
    """Words with tags, as misaki expects of spaCy's pipeline."""

    def __init__(self) -> None:
        import spacy
        from textblob.en.taggers import PatternTagger

        self._split = spacy.blank("en").tokenizer
        self._tagger = PatternTagger()

    def __call__(self, text: str) -> list[Word]:
        """Words of one line."""
        tokens = list(self._split(text))
        words = [token.text for token in tokens]
        guesses = self._guess(words)
        tagged: list[Word] = []
        for token, guess in zip(tokens, guesses, strict=True):
            before = tagged[-1].tag_ if tagged else ""
            tagged.append(Word(token.text, correct(token.text, guess, before), token.whitespace_))
        return tagged

    def _guess(self, words: list[str]) -> list[str]:
        """The tagger's tags; nouns where it sees other words than spaCy."""
        line = " ".join(re.sub(r"\s", "_", word) or "_" for word in words)
        tags = [tag for _, tag in self._tagger.tag(line, tokenize=False)] if words else []
        return tags if len(tags) == len(words) else ["NN"] * len(words)


def correct(word: str, guess: str, before: str) -> str:
    """The tag of a word whose left neighbour is tagged `before`: rules for what decides between
    two ways to say a word, where the tagger looks at the word alone."""
    for pattern, tag in PUNCTUATION:
        if re.fullmatch(pattern, word):
            return tag
    lower, plain = word.lower(), guess.split("-", maxsplit=1)[0] or "NN"
    if lower in ("'s", "’s"):
        return "POS" if before.startswith("NN") else "VBZ"
    fixed = _closed_class(lower)
    if fixed:
        return fixed
    if before in ("MD", "TO") and plain in VERB_FORMS:
        return "VB"
    if before == "PRP" and plain in ("NN", "VB"):
        return "VBP"
    return "NN" if before in ("DT", "PRP$", "JJ") and plain in ("VB", "VBP") else plain


def _closed_class(lower: str) -> str:
    if lower in PRONOUNS:
        return "PRP"
    if lower in ARTICLES:
        return "DT"
    return {"to": "TO", "n't": "RB"}.get(lower, "")


class Speller:
    """Text to phonemes of one accent."""

    def __init__(self, accent: str) -> None:
        from misaki import en, espeak

        if accent == SPANISH:
            self._rules = espeak.EspeakG2P(language="es")
            return
        british = ENGLISH[accent]
        self._rules = en.G2P.__new__(en.G2P)  # its own start would fetch spaCy's model
        self._rules.version, self._rules.british, self._rules.unk = None, british, ""
        self._rules.nlp, self._rules.lexicon = Tagger(), en.Lexicon(british)
        self._rules.fallback = espeak.EspeakFallback(british=british)

    def __call__(self, text: str) -> str:
        """Phonemes, stress marks, punctuation and spaces."""
        return self._rules(text)[0]


def ids_of(phonemes: str, known: dict[str, int]) -> list[int]:
    """The ids of the symbols that the teacher knows."""
    return [known[symbol] for symbol in phonemes if symbol in known]


def spell_lines(lines: Sequence[str], accent: str, known: dict[str, int]) -> Iterator[str]:
    """Phonemes of every line, without what the teacher does not know; an empty one where a line has
    more symbols than it can say at once."""
    speller = Speller(accent)
    for line in lines:
        phonemes = "".join(symbol for symbol in speller(line) if symbol in known)
        yield phonemes if len(phonemes) <= MAX_SYMBOLS else ""


def table(folder: Path, accent: str) -> Path:
    """Where an accent's lines are: phonemes, and after a tab the text."""
    return folder / f"{accent}.tsv.xz"


def accents_in(folder: Path) -> list[str]:
    """The accents of a folder's tables: both of English, and Spanish where there is a table."""
    return [accent for accent in ACCENTS if accent in ENGLISH or table(folder, accent).exists()]


def write_table(rows: Sequence[str], path: Path) -> None:
    """Rows of text."""
    path.write_bytes(lzma.compress(("\n".join(rows) + "\n").encode()))


def read_table(path: Path) -> list[str]:
    """What `write_table` wrote."""
    return lzma.decompress(path.read_bytes()).decode().splitlines()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of ACCENT.tsv.xz")
    parser.add_argument("--accents", nargs="+", choices=ACCENTS, default=list(ENGLISH))
    parser.add_argument("--made-up", type=int, default=0, help="lines with made-up words")
    parser.add_argument("--seed", type=int, default=1, help="of those")
    args = parser.parse_args(argv)
    known = symbols(args.package)
    lines = args.lines.read_text(encoding="utf-8").splitlines()
    args.out.mkdir(parents=True, exist_ok=True)
    for accent in args.accents:
        pairs = zip(spell_lines(lines, accent, known), lines, strict=True)
        rows = [f"{phonemes}\t{line}" for phonemes, line in pairs if phonemes.strip()]
        count = args.made_up if accent in ENGLISH else 0
        made_up = list(Lines(rows, accent, args.seed).take(count))
        write_table([*rows, *made_up], table(args.out, accent))
        print(f"{accent}: {len(rows)} of {len(lines)} lines, {len(made_up)} with made-up words")


if __name__ == "__main__":
    main()
