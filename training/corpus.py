"""The text corpus, from installed Debian packages (see `PACKAGES`).

    python -m training.corpus --out runs/corpus.txt

Running prose first (essays, guides, missions of a game, scripture, quotations), then dictionary
sentences, templates for numbers, dates and questions, and word lists for coverage. One line is one
utterance of 3 to 200 characters, printable ASCII; neighbours of running prose are joined now and
then, so that lines hold more than one sentence too.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import html
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from training.templates import fill

PACKAGES = (
    "wamerican", "wordnet-base", "dict-gcide", "dict-devil", "fortunes", "fortunes-min",
    "bible-kjv", "anarchism", "debian-handbook", "debian-faq", "developers-reference",
    "jargon-text", "endless-sky-data",
)  # fmt: skip
SHARE = Path("/usr/share")
ROOT = Path(__file__).parent.parent
HELD_OUT = [
    ROOT / "training" / "prose.txt",
    ROOT / "training" / "questions.txt",
    ROOT / "benchmarks" / "held_out.txt",
]
MIN_CHARACTERS, MAX_CHARACTERS = 3, 200
ALLOWED = re.compile(r"^[A-Za-z0-9 ,.;:?!'\-]+$")
HTML_PARAGRAPH = re.compile(r'<(?:p\b[^>]*|div class="para")>(.*?)</(?:p|div)>', re.S | re.I)
SUSPECT = re.compile(r"\d{5,}|\.\.|[A-Z]{5,}|(.)\1\1|\d[A-Za-z]|[A-Za-z]\d")
SENTENCE_END = re.compile(r"(?<=[.?!])['\"]?\s+(?=[A-Z'\"])")


def ascii_text(text: str) -> str:
    """Return the closest printable ASCII: quotes and dashes by a table, accents by
    decomposition.
    """
    table = {"’": "'", "‘": "'", "“": '"', "”": '"', "–": " - ", "—": ", ", "…": ".", "\u00a0": " "}
    text = "".join(table.get(c, c) for c in text)
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def clean(sentence: str) -> str:
    """Remove brackets, quotes and doubled punctuation."""
    sentence = re.sub(r"\([^)]*\)|\[[^\]]*\]|[\"`*_]|''", "", ascii_text(sentence))
    sentence = re.sub(r"\s*--+\s*", ", ", sentence)
    sentence = re.sub(r"\s+", " ", sentence).strip(" ,;:-")
    sentence = re.sub(r" ([,.;:?!])", r"\1", sentence)
    return re.sub(r"([,.;:?!])[,;:]+", r"\1", sentence)


class Vocabulary:
    """Known words of american-english."""

    def __init__(self) -> None:
        lines = (SHARE / "dict/american-english").read_text().split()
        self.words = set(lines)
        self.lower = {word.lower() for word in lines}

    def share(self, sentence: str) -> float:
        """Return the share of a sentence's words that are known; 0 when it has none."""
        found = re.findall(r"[A-Za-z']+", sentence)
        known = sum(w in self.words or w.lower().strip("'") in self.lower for w in found)
        return known / len(found) if found else 0.0


def unzip(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode("utf8", "ignore")


def html_paragraphs(pattern: str) -> Iterator[str]:
    for path in sorted(glob.glob(pattern, recursive=True)):
        text = Path(path).read_text(encoding="utf-8", errors="ignore")
        for paragraph in re.findall(HTML_PARAGRAPH, text):
            if "<code" not in paragraph and "<tt" not in paragraph:
                yield html.unescape(re.sub(r"<[^>]+>", "", paragraph))


def markdown_paragraphs(pattern: str) -> Iterator[str]:
    for path in sorted(glob.glob(pattern, recursive=True)):
        for paragraph in unzip(Path(path)).split("\n\n"):
            yield re.sub(r"\[([^\]]*)\]\([^)]*\)|[*_>#]", r"\1", paragraph)


def game_paragraphs() -> Iterator[str]:
    """Iterate over Endless Sky's conversations and descriptions: back-quoted strings."""
    for path in sorted((SHARE / "games/endless-sky/data").rglob("*.txt")):
        for paragraph in re.findall(r"`([^`]{20,})`", path.read_text(errors="ignore")):
            if "<" not in paragraph:
                yield paragraph


def fortune_paragraphs() -> Iterator[str]:
    for path in sorted((SHARE / "games/fortunes").glob("*")):
        if not path.suffix and path.is_file():
            for quote in path.read_text(encoding="latin1").split("\n%\n"):
                yield re.sub(r"\n\s*--.*", "", quote, flags=re.S)


def dictionary_paragraphs(name: str) -> Iterator[str]:
    text = unzip(SHARE / f"dictd/{name}.dict.dz")
    for paragraph in re.split(r"\n\s*\n", text):
        plain = re.sub(r"\{|\}|\\[^\\]*\\|--\s*[A-Z][\w. ]+\.", "", paragraph)
        for part in re.split(r";\s+", plain):
            yield re.sub(r"^\s*(\d+\.|\([a-z]\)|Note:|Syn:)\s*", "", part)


def jargon_paragraphs() -> Iterator[str]:
    yield from unzip(SHARE / "doc/jargon-text/jargon.txt.gz").split("\n\n")


def scripture_paragraphs() -> Iterator[str]:
    """Iterate over the King James Bible as printed by the package's `bible` program."""
    import subprocess

    printed = subprocess.run(
        ["bible", "-f", "Genesis1:1-Revelation22:21"], capture_output=True, text=True, check=False
    ).stdout
    for line in printed.splitlines():
        yield re.sub(r"^\S*\s?\S*\d+:\d+\s+", "", line)


def wordnet_paragraphs() -> Iterator[str]:
    for part in ("noun", "verb", "adj", "adv"):
        for line in (SHARE / f"wordnet/data.{part}").read_text().splitlines():
            if "| " in line and not line.startswith("  "):
                gloss = line.split("| ", 1)[1]
                yield from re.findall(r'"([^"]{8,})"', gloss)
                yield from re.sub(r'"[^"]*"', "", gloss).split(";")


def sentences(paragraphs: Iterable[str]) -> Iterator[list[str]]:
    """Iterate over cleaned sentences, paragraph by paragraph."""
    for paragraph in paragraphs:
        parts = SENTENCE_END.split(re.sub(r"\s+", " ", ascii_text(paragraph)).strip())
        yield [clean(part) for part in parts]


class Corpus:
    """Collects each utterance once, by source."""

    def __init__(self, held_out: Iterable[str], seed: int) -> None:
        self.rng = random.Random(seed)
        self.vocabulary = Vocabulary()
        self.lines: dict[str, str] = {}
        self.held_out = {self._key(line) for line in held_out}

    @staticmethod
    def _key(line: str) -> str:
        return re.sub(r"[^a-z ]", "", line.lower()).strip()

    def accepts(self, line: str, known: float) -> bool:
        return bool(
            MIN_CHARACTERS <= len(line) <= MAX_CHARACTERS
            and ALLOWED.match(line)
            and not SUSPECT.search(line)
            and self.vocabulary.share(line) >= known
            and self._key(line) not in self.held_out
        )

    def add(self, line: str, source: str, known: float) -> None:
        if line and not line[0].isupper() and self.rng.random() < 0.8:
            line = line[0].upper() + line[1:]
        if line and line[-1] not in ".?!" and self.rng.random() < 0.85:
            line += "."
        if self.accepts(line, known):
            self.lines.setdefault(line, source)

    def add_prose(self, paragraphs: Iterable[str], source: str, known: float, most: int) -> None:
        """Add sentences of running text; some short neighbours are joined into one utterance."""
        start = len(self.lines)
        for paragraph in sentences(paragraphs):
            waiting = ""
            for sentence in paragraph:
                joined = f"{waiting} {sentence}".strip()
                if len(joined) < 150 and self.rng.random() < 0.3:
                    waiting = joined
                    continue
                self.add(joined if len(joined) <= MAX_CHARACTERS else sentence, source, known)
                waiting = ""
            self.add(waiting, source, known)
            if len(self.lines) - start >= most:
                return

    def add_clauses(self, source: str, share: float) -> None:
        """Add clauses of existing lines, as they result from splitting text at commas."""
        for line in list(self.lines):
            if self.rng.random() < share:
                for clause in re.split(r"(?<=[,;:])\s+", line):
                    if len(clause) > 12 and self.accepts(clause, 0.9):
                        self.lines.setdefault(clause, source)

    def add_templates(self, count: int) -> None:
        words = sorted(self.vocabulary.words)
        names = [w for w in words if re.fullmatch(r"[A-Z][a-z]{2,8}", w)]
        for _ in range(count):
            self.add(fill(self.rng, names), "template", 0.5)

    def add_word_lists(self, rare_per_line: int, phrases: int, singles: int) -> None:
        """Add rare words for coverage of the lexicon, common words alone and in short runs."""
        pattern = re.compile(r"[A-Za-z][a-z']{1,13}")
        count = Counter(w.lower() for x in self.lines for w in re.findall(r"[A-Za-z']+", x))
        words = [w for w in sorted(self.vocabulary.words) if pattern.fullmatch(w)]
        rare = [w for w in words if count[w.lower()] < 4]
        self.rng.shuffle(rare)
        for i in range(0, len(rare), rare_per_line):
            joint = ", " if self.rng.random() < 0.3 else " "
            self.add(joint.join(rare[i : i + rare_per_line]), "rare", 0.5)
        common = [w for w, _ in count.most_common(12_000) if w in self.vocabulary.lower]
        for _ in range(phrases):
            self.add(" ".join(self.rng.choices(common, k=self.rng.randint(2, 7))), "phrase", 0.5)
        for word in common[:singles]:
            self.add(word, "word", 0.5)

    def finish(self) -> list[str]:
        """Return all lines, shuffled; a few in lower or upper case."""
        lines = list(self.lines)
        self.rng.shuffle(lines)
        for i, line in enumerate(lines):
            chance = self.rng.random()
            if chance < 0.03:
                lines[i] = line.lower()
            elif chance < 0.04 and len(line) < 60:
                lines[i] = line.upper()
        return lines


def build(held_out: Iterable[str], seed: int) -> Corpus:
    """Build the whole corpus from the installed packages."""
    corpus = Corpus(held_out, seed)
    doc = SHARE / "doc"
    prose = (
        ("anarchism", markdown_paragraphs(f"{doc}/anarchism/markdown/**/*.md.gz"), 0.97, 120_000),
        ("anarchism", html_paragraphs(f"{doc}/anarchism/html/**/*.html"), 0.97, 120_000),
        ("handbook", html_paragraphs(f"{doc}/debian-handbook/html/en-US/**/*.html"), 0.9, 30_000),
        ("faq", html_paragraphs(f"{doc}/debian/FAQ/**/*.html"), 0.9, 10_000),
        ("reference", html_paragraphs(f"{doc}/developers-reference/**/*.html"), 0.9, 10_000),
        ("jargon", jargon_paragraphs(), 0.95, 30_000),
        ("game", game_paragraphs(), 0.93, 120_000),
        ("fortunes", fortune_paragraphs(), 0.95, 40_000),
        ("devil", dictionary_paragraphs("devil"), 0.95, 10_000),
        ("scripture", scripture_paragraphs(), 0.93, 25_000),
        ("wordnet", wordnet_paragraphs(), 0.9, 110_000),
        ("gcide", dictionary_paragraphs("gcide"), 0.99, 110_000),
    )
    for source, paragraphs, known, most in prose:
        corpus.add_prose(paragraphs, source, known, most)
    corpus.add_clauses("clause", 0.15)
    corpus.add_templates(50_000)
    corpus.add_word_lists(rare_per_line=6, phrases=15_000, singles=9_000)
    return corpus


def reserve(lines: list[str], count: int) -> list[str]:
    """Remove `count` lines of all lengths from shuffled `lines`, for evaluation."""
    by_length = sorted(range(len(lines)), key=lambda i: (len(lines[i]), i))
    lengths = range(MIN_CHARACTERS, MAX_CHARACTERS + 1)
    taken: list[int] = []
    place = 0
    for number in range(count):
        wanted = lengths[number * len(lengths) // count]
        while place < len(by_length) - 1 and len(lines[by_length[place]]) < wanted:
            place += 1
        taken.append(by_length[place])
        place = min(place + 1, len(by_length) - 1)
    kept = [lines[i] for i in taken]
    for i in sorted(set(taken), reverse=True):
        del lines[i]
    return kept


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, nargs="*", default=HELD_OUT, help="never spoken")
    parser.add_argument("--reserve", type=int, default=500, help="lines kept out for evaluation")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args(argv)
    held_out = [line for path in args.held_out for line in path.read_text().splitlines()]
    corpus = build(held_out, args.seed)
    lines = corpus.finish()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept = reserve(lines, args.reserve)
    args.out.with_stem(args.out.stem + "_held_out").write_text("\n".join(kept) + "\n")
    args.out.write_text("\n".join(lines) + "\n")
    characters = sum(map(len, lines))
    print(f"{len(lines)} lines, {characters} characters, about {characters / 52_200:.0f} h")
    for source, count in Counter(corpus.lines.values()).most_common():
        print(f"  {source}: {count}")


if __name__ == "__main__":
    main()
