"""Text to speak, from Debian packages installed by name (see `PACKAGES`).

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
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = (
    "wamerican wordnet-base dict-gcide dict-devil fortunes fortunes-min bible-kjv-text anarchism "
    "debian-handbook debian-faq developers-reference jargon-text endless-sky-data"
).split()
SHARE = Path("/usr/share")
MIN_CHARACTERS, MAX_CHARACTERS = 3, 200
ALLOWED = re.compile(r"^[A-Za-z0-9 ,.;:?!'\-]+$")
SUSPECT = re.compile(r"\d{5,}|\.\.|[A-Z]{5,}|(.)\1\1|\d[A-Za-z]|[A-Za-z]\d")
SENTENCE_END = re.compile(r"(?<=[.?!])['\"]?\s+(?=[A-Z'\"])")


def ascii_text(text: str) -> str:
    """Closest printable ASCII: quotes and dashes by hand, accents by decomposition."""
    table = {"’": "'", "‘": "'", "“": '"', "”": '"', "–": " - ", "—": ", ", "…": ".", "\u00a0": " "}
    text = "".join(table.get(c, c) for c in text)
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def clean(sentence: str) -> str:
    """Drop brackets, quotes and doubled punctuation."""
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
        """Share of a sentence's words that are known; 0 when it has none."""
        found = re.findall(r"[A-Za-z']+", sentence)
        known = sum(w in self.words or w.lower().strip("'") in self.lower for w in found)
        return known / len(found) if found else 0.0


def html_paragraphs(pattern: str) -> Iterator[str]:
    for path in sorted(glob.glob(pattern, recursive=True)):
        text = Path(path).read_text(encoding="utf-8", errors="ignore")
        for paragraph in re.findall(r"<p\b[^>]*>(.*?)</p>", text, re.S | re.I):
            if "<code" not in paragraph and "<tt" not in paragraph:
                yield html.unescape(re.sub(r"<[^>]+>", "", paragraph))


def markdown_paragraphs(pattern: str) -> Iterator[str]:
    for path in sorted(glob.glob(pattern, recursive=True)):
        for paragraph in gzip.open(path, "rt", errors="ignore").read().split("\n\n"):
            yield re.sub(r"\[([^\]]*)\]\([^)]*\)|[*_>#]", r"\1", paragraph)


def game_paragraphs() -> Iterator[str]:
    """Endless Sky's conversations and descriptions: back-quoted strings."""
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
    text = gzip.open(SHARE / f"dictd/{name}.dict.dz").read().decode("utf8", "ignore")
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = re.sub(r"\{|\}|\\[^\\]*\\|--\s*[A-Z][\w. ]+\.", "", paragraph)
        for part in re.split(r";\s+", paragraph):
            yield re.sub(r"^\s*(\d+\.|\([a-z]\)|Note:|Syn:)\s*", "", part)


def jargon_paragraphs() -> Iterator[str]:
    path = SHARE / "doc/jargon-text/jargon.txt.gz"
    yield from gzip.open(path).read().decode("utf8", "ignore").split("\n\n")


def scripture_paragraphs() -> Iterator[str]:
    """The King James Bible as the package's own `bible` program prints it."""
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
    """Cleaned sentences, paragraph by paragraph."""
    for paragraph in paragraphs:
        parts = SENTENCE_END.split(re.sub(r"\s+", " ", ascii_text(paragraph)).strip())
        yield [clean(part) for part in parts]


ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "x x twenty thirty forty fifty sixty seventy eighty ninety".split()


def number(n: int, rng: random.Random) -> str:
    """An integer below a billion in words, with the usual variations."""
    if n < 20:
        return ONES[n]
    if n < 100:
        rest = "" if n % 10 == 0 else "-" + ONES[n % 10]
        return TENS[n // 10] + rest
    for size, name in ((1_000_000, "million"), (1000, "thousand"), (100, "hundred")):
        if n >= size:
            joint = " and " if size == 100 and rng.random() < 0.5 else " "
            rest = joint + number(n % size, rng) if n % size else ""
            return f"{number(n // size, rng)} {name}{rest}"
    return ONES[0]


NOUNS = (
    "table chair window door house garden kitchen office school teacher doctor friend brother "
    "sister mother father child dog cat horse bird river lake mountain road street train bus car "
    "plane boat ticket letter message phone computer book newspaper picture camera bottle glass "
    "cup plate knife fork bread butter cheese milk coffee tea sugar salt water juice apple orange "
    "lemon salad soup meat fish chicken rice market shop store hotel room bed lamp light coat hat "
    "shoe shirt umbrella bag box key money price bank city town village country park tree flower "
    "grass rain snow wind storm sun moon star morning evening night week month year meeting party "
    "dinner lunch breakfast question answer problem idea plan project job game team player song "
    "movie story language word page paper pencil server engineer report customer account update"
).split()
ADJECTIVES = (
    "big small old new young long short high low good bad happy sad warm cold hot cool dry wet "
    "clean dirty quick slow early late easy hard heavy light dark bright red blue green yellow "
    "black white brown quiet loud strong weak rich poor full empty open closed soft smooth rough "
    "sharp deep wide narrow fresh sweet bitter kind brave clever funny nice lovely huge tiny broken"
).split()
VERBS = (
    "saw found bought sold lost took gave made opened closed washed moved carried dropped painted "
    "fixed kept left watched liked wanted needed remembered forgot used pulled pushed cut burned "
    "broke hid showed sent brought ordered checked cleaned lifted threw caught"
).split()
SUBJECTS = (
    "I|You|We|They|He|She|The man|The woman|My brother|Her sister|Our neighbor|The teacher|"
    "The children|The doctor|A stranger|The driver|The workers|Nobody|Everyone|Someone"
).split("|")
PLACES = "on the|under the|near the|behind the|beside the|in the|next to the|over the".split("|")
TIMES = (
    "yesterday|last week|this morning|in the afternoon|on Monday|every day|at night|before dinner|"
    "after lunch|two days ago|last year|in the evening|at noon|right now|once more|for a while"
).split("|")
MONTHS = (
    "January February March April May June July August September October November December"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth twenty-first "
    "twenty-second twenty-third twenty-fourth twenty-fifth twenty-sixth twenty-seventh "
    "twenty-eighth twenty-ninth thirtieth thirty-first"
).split()
TEMPLATES = (
    "Where is the {n}?|Have you seen my {n}?|How much is the {a} {n}?|Could you pass me the {n}, "
    "please?|When does the {n} open?|Why did you leave the {n} {p} {m}?|What is the name of the "
    "{n}?|Do you like this {a} {n}?|Can you help me find the {n}?|Is the {n} {a}?|Who took the "
    "{n}?|May I use your {n}?|Did you bring the {n} {t}?|{S} {v} the {a} {n} {t}.|{S} {v} a {a} "
    "{n} {p} {m}.|The {a} {n} was {p} {m}.|There is a {n} {p} {m}.|The {n} costs {N} dollars and "
    "{N} cents.|It was {D}, the {O} of {M}.|My phone number is {d} {d} {d}, {d} {d} {d} {d}.|We "
    "have {N} {n}s and {N} {m}s.|Please put the {n} {p} {m}.|The {n} is {a}, but the {m} is {b}.|"
    "Thank you for the {a} {n}.|I think the {n} is too {a}.|{S} {v} {N} {n}s {t}.|Turn left at the "
    "{n} and go straight on.|The {n} will arrive in {N} minutes.|Hello, my name is {F}.|Good "
    "morning, {F}.|Please call {F} {t}.|Chapter {N}.|The answer is {N}.|Page {N}.|It is {N} "
    "degrees outside.|On {M} {O}, {Y}, the {n} was {a}.|I would like a {n} with {m} and {k}.|If it "
    "rains, we will stay near the {n}.|She said that the {n} was {a}.|Let me know when the {n} is "
    "{a}.|Hello!|Hello, {F}, how are you today?|{N}.|{N} percent of the {n}s were {a}.|{N} point "
    "{d} {d}.|The meeting is on {D} at {H} {Z}.|{H} {Z}.|It is {h} past {H}.|Yes, the {n} is {a}.|"
    "No, I do not have a {n}.|Wait, where did {F} put the {n}?|Welcome back, {F}.|In {Y}, the {n} "
    "was {b}."
).split("|")


def fill(template: str, rng: random.Random, first_names: list[str]) -> str:
    """One sentence of a template."""
    size = rng.choice((20, 100, 1000, 20_000, 3_000_000))
    values = {
        "n": rng.choice(NOUNS), "m": rng.choice(NOUNS), "k": rng.choice(NOUNS),
        "a": rng.choice(ADJECTIVES), "b": rng.choice(ADJECTIVES), "v": rng.choice(VERBS),
        "S": rng.choice(SUBJECTS), "p": rng.choice(PLACES), "t": rng.choice(TIMES),
        "D": rng.choice(DAYS), "M": rng.choice(MONTHS), "O": rng.choice(ORDINALS),
        "d": rng.choice(ONES[:10]), "F": rng.choice(first_names), "Z": rng.choice(("a m", "p m")),
        "H": number(rng.randint(1, 12), rng), "h": rng.choice(("quarter", "half", "ten", "five")),
        "Y": f"{number(rng.randint(11, 20), rng)} {number(rng.randint(10, 99), rng)}",
        "N": number(rng.randrange(size), rng),
    }  # fmt: skip
    text = re.sub(r"\{d\}", lambda _: rng.choice(ONES[:10]), template).format(**values)
    return text[0].upper() + text[1:]


class Corpus:
    """Collects utterances once each, by source."""

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
        """Sentences of running text; short neighbours are joined into one utterance sometimes."""
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
        """Clauses of lines already there, as they come when text is split at commas."""
        for line in list(self.lines):
            if self.rng.random() < share:
                for clause in re.split(r"(?<=[,;:])\s+", line):
                    if len(clause) > 12 and self.accepts(clause, 0.9):
                        self.lines.setdefault(clause, source)

    def add_templates(self, count: int) -> None:
        words = sorted(self.vocabulary.words)
        names = [w for w in words if re.fullmatch(r"[A-Z][a-z]{2,8}", w)]
        for _ in range(count):
            self.add(fill(self.rng.choice(TEMPLATES), self.rng, names), "template", 0.5)

    def add_word_lists(self, rare_per_line: int, phrases: int, singles: int) -> None:
        """Rare words for coverage of the lexicon, common words alone and in short runs."""
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
        """All lines, shuffled; a few in lower or upper case."""
        lines = list(self.lines)
        self.rng.shuffle(lines)
        for i, line in enumerate(lines):
            chance = self.rng.random()
            if chance < 0.03:
                lines[i] = line.lower()
            elif chance < 0.04 and len(line) < 60:
                lines[i] = line.upper()
        return lines


def build(held_out: Iterable[str], seed: int = 7) -> Corpus:
    """The whole corpus from the installed packages."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, nargs="*", default=[], help="lines to leave out")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    held_out = [line for path in args.held_out for line in path.read_text().splitlines()]
    corpus = build(held_out, args.seed)
    lines = corpus.finish()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(lines) + "\n")
    characters = sum(map(len, lines))
    print(f"{len(lines)} lines, {characters} characters, about {characters / 52_200:.0f} h")
    for source, count in Counter(corpus.lines.values()).most_common():
        print(f"  {source}: {count}")


if __name__ == "__main__":
    main()
