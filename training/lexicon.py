"""Words and how the teacher pronounces them, from its lexicon and letter-to-sound rules.

    python -m training.lexicon --corpus runs/corpus.txt --out runs/words.tsv

Writes `word <TAB> phones` for every word of american-english and of the corpus. A fixed share of
the words (by a hash of their letters) goes to runs/words_held_out.tsv instead: no document of the
phoneme task shows one of them, alone or in a sentence.
"""

from __future__ import annotations

import argparse
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

DICTIONARY = Path("/usr/share/dict/american-english")
HELD_OUT_SHARE = 128  # one word in this many
MIN_LETTERS = 4
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
    return sorted(word for word in words if 0 < len(word) <= 20)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, help="values other than those of recipe.toml")
    args = parser.parse_args(argv)
    from training.recipe import load_recipe  # not where only the words are asked for
    from training.teacher import Teacher

    teacher = Teacher(load_recipe(args.config).synthesis.libraries)
    lines = args.corpus.read_text().splitlines()
    dictionary = DICTIONARY.read_text().splitlines()
    held_out = args.out.with_stem(args.out.stem + "_held_out")
    counts = [0, 0]
    with args.out.open("w") as train, held_out.open("w") as test:
        for word in known_words([*lines, *dictionary]):
            is_test = is_held_out(word)
            (test if is_test else train).write(f"{word}\t{teacher.pronounce(word)}\n")
            counts[is_test] += 1
    print(f"{counts[0]} words to train on, {counts[1]} held out")


if __name__ == "__main__":
    main()
