"""Words and how the teacher pronounces them, from its lexicon and letter-to-sound rules.

    python -m training.lexicon --corpus runs/corpus.txt --out runs/words.tsv

Writes `word <TAB> phones` for every word of american-english and of the corpus. A fixed share of
the words (by a hash of their letters) goes to runs/words_held_out.tsv instead: no document of the
phoneme task shows one of them, alone or in a sentence. For words that are in no list the teacher
has rules; runs/words_made.tsv, words that are put together from pieces of the others, shows them.
"""

from __future__ import annotations

import argparse
import random
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

DICTIONARY = Path("/usr/share/dict/american-english")
HELD_OUT, MADE = "words_held_out.tsv", "words_made.tsv"  # beside the words to train on
HELD_OUT_SHARE = 128  # one word in this many
MIN_LETTERS = 4
MAX_LETTERS = 20
PIECE = 3  # letters that decide which one may follow in a made-up word
WORD = re.compile(r"[a-z']+")


def is_held_out(word: str) -> bool:
    """Whether the phoneme task never trains on a (lower-case) word."""
    letters = word.strip("'")
    return len(letters) >= MIN_LETTERS and zlib.crc32(letters.encode()) % HELD_OUT_SHARE == 0


def words_of(line: str) -> list[str]:
    """Lower-case words of a line."""
    return WORD.findall(line.lower())


def known_words(lines: Iterable[str]) -> list[str]:
    """Every word, sorted."""
    words = {word.strip("'") for line in lines for word in words_of(line)}
    return sorted(word for word in words if 0 < len(word) <= MAX_LETTERS)


def made_words(words: Sequence[str], count: int, seed: int) -> list[str]:
    """Up to so many new words, all different, sorted; every `PIECE` + 1 letters of each follow each
    other in one of `words`, too. None is to be held out."""
    followers: dict[str, list[str]] = defaultdict(list)
    for word in words:
        padded = " " * PIECE + word + " "
        for place in range(len(word) + 1):
            followers[padded[place : place + PIECE]].append(padded[place + PIECE])
    rng, known, made = random.Random(seed), set(words), set[str]()
    for _ in range(20 * count):
        if len(made) == count:
            break
        word = " " * PIECE
        while len(word) == PIECE or (word[-1] != " " and len(word) < MAX_LETTERS + PIECE):
            word += rng.choice(followers[word[-PIECE:]])
        word = word.strip()
        fits = len(word) >= MIN_LETTERS and word.isalpha() and word not in known
        if fits and not is_held_out(word):
            made.add(word)
    return sorted(made)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    from training.recipe import parse  # not where only the words are asked for
    from training.teacher import Teacher

    args, recipe = parse(parser, "lexicon", argv)
    teacher = Teacher(recipe.synthesis.libraries)
    lines = args.corpus.read_text().splitlines()
    words = known_words([*lines, *DICTIONARY.read_text().splitlines()])
    train = [word for word in words if not is_held_out(word)]
    for name, chosen in (
        (args.out.name, train),
        (HELD_OUT, [word for word in words if is_held_out(word)]),
        (MADE, made_words(train, args.made, args.seed)),
    ):
        text = "".join(f"{word}\t{teacher.pronounce(word)}\n" for word in chosen)
        args.out.with_name(name).write_text(text)
        print(f"{name}: {len(chosen)} words", flush=True)


if __name__ == "__main__":
    main()
