"""Words and how the teacher pronounces them, from its lexicon and letter-to-sound rules.

    python -m training.lexicon --corpus runs/corpus.txt --out runs/words.tsv

Writes `word <TAB> sounds`, a word a line, one sound a letter (see `training.sounds`):

    words_lexicon.tsv         every word of the teacher's lexicon, and those of the corpus that
                              use it. They are exceptions from the rules: to be memorised
    words.tsv                 all other words of the corpus and of the word lists
    words_held_out.tsv        one in `HELD_OUT_SHARE` of these, by a hash of its letters: no
                              document of the phoneme task shows one, alone or in a sentence
    words_made.tsv            synthetic words (see `training.made_words`), for the rules
    words_made_held_out.tsv   synthetic words that are held out by their hash
"""

from __future__ import annotations

import argparse
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from training.alignment import Alignment
from training.rules import Rules
from training.strings import Strings
from training.teacher import Teacher

# in addition to the words to train on
LEXICON, HELD_OUT = "words_lexicon.tsv", "words_held_out.tsv"
MADE, MADE_HELD_OUT = "words_made.tsv", "words_made_held_out.tsv"
HELD_OUT_SHARE = 128  # one word in this many
MIN_LETTERS = 4
MAX_LETTERS = 20
WORD = re.compile(r"[a-z']+")
POSSESSIVE = "'s"


def is_held_out(word: str) -> bool:
    """Whether a (lower-case) word that follows the rules is held out of the phoneme task."""
    letters = word.strip("'")
    return len(letters) >= MIN_LETTERS and zlib.crc32(letters.encode()) % HELD_OUT_SHARE == 0


def words_of(line: str) -> list[str]:
    """Return the lower-case words of a line."""
    return WORD.findall(line.lower())


def known_words(lines: Iterable[str]) -> list[str]:
    """Return every word, sorted."""
    words = {word.strip("'") for line in lines for word in words_of(line)}
    return sorted(word for word in words if 0 < len(word) <= MAX_LETTERS)


def listed_words(paths: Iterable[str]) -> list[str]:
    """Return the words of lists, ASCII only; possessives are those of the corpus.

    A list has one word per line, or is the index of dictd (headword, tab, ...) or of WordNet
    (head_word, space, ...; see dict(5) and wndb(5WN) for the formats).
    """
    lines = (line for p in paths for line in Path(p).read_text(errors="replace").splitlines())
    words = (line.partition("\t" if "\t" in line else " ")[0].replace("_", " ") for line in lines)
    return [w for w in words if w and w.isascii() and not w.endswith(POSSESSIVE)]


class Pronouncer:
    """The teacher's pronunciation, with a fast path for words that follow the rules."""

    def __init__(self, folder: str = "") -> None:
        self.rules, self.teacher = Rules(folder), Teacher(folder)
        self.alignment = Alignment(self.rules)
        self.lexicon = frozenset(self.rules.lexicon())

    def is_exception(self, word: str) -> bool:
        """Whether the word, or the word it is the possessive of, is in the lexicon."""
        return word.removesuffix(POSSESSIVE) in self.lexicon

    def say(self, words: Sequence[str]) -> list[bytes]:
        """Return the sounds of every word, each a line of a file."""
        spelled = [word.encode("ascii") for word in words]
        ruled = [
            letters.isalpha() and word not in self.lexicon and self.rules.apply(letters)
            for word, letters in zip(words, spelled, strict=True)
        ]
        said = self.rules.sounds(
            Strings([x for x, short in zip(spelled, ruled, strict=True) if short])
        )
        place = iter(range(len(said)))
        return [
            b"%s\t%s\n" % (letters, said[next(place)].tobytes() if short else self._look_up(word))
            for word, letters, short in zip(words, spelled, ruled, strict=True)
        ]

    def _look_up(self, word: str) -> bytes:
        return self.alignment.text(word, self.teacher.pronounce(word))


def write(path: Path, lines: Sequence[bytes]) -> None:
    path.write_bytes(b"".join(lines))
    print(f"{path.name}: {len(lines)} words", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    from training.made_words import write_made_words
    from training.recipe import parse  # not needed when only words are read

    args, recipe = parse(parser, "lexicon", argv)
    pronouncer = Pronouncer(recipe.synthesis.libraries)
    lines = args.corpus.read_text().splitlines()
    words = known_words([*lines, *listed_words(args.lists)])
    ruled = [word for word in words if not pronouncer.is_exception(word)]
    exceptions = pronouncer.lexicon.union(w for w in words if pronouncer.is_exception(w))
    train = [word for word in ruled if not is_held_out(word)]
    for name, chosen in (
        (LEXICON, sorted(exceptions)),
        (args.out.name, train),
        (HELD_OUT, [word for word in ruled if is_held_out(word)]),
    ):
        write(args.out.with_name(name), pronouncer.say(chosen))
    write_made_words(args.out.parent, words, pronouncer, args.drawn, args.seed)


if __name__ == "__main__":
    main()
