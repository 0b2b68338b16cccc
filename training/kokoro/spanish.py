"""Spanish lines: prose of installed Debian packages, templates and words.

    apt-get install $(python -m training.kokoro.spanish --packages)
    python -m training.kokoro.spanish --count 60000 --out runs/spanish.txt

Prose comes from the conversations of a game (Battle for Wesnoth), quotations, scripture in a
translation of 1909 and a handbook; rare words from a list. There are no figures: the service reads
them as words before the model sees them.
"""

from __future__ import annotations

import argparse
import random
import re
import struct
import subprocess
import tomllib
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from num2words import num2words

from training.corpus import SHARE, html_paragraphs
from training.kokoro.lines import QUESTIONS, shares

PACKAGES = (
    "fortunes-es", "sword-text-sparv", "diatheke", "debian-handbook", "wspanish",
    "wesnoth-1.16-data",
    *(f"wesnoth-1.16-{campaign}" for campaign in (
        "did", "dm", "dw", "ei", "httt", "l", "low", "nr", "sof", "sota", "sotbe", "thot", "trow",
        "tsg", "ttb", "utbs",
    )),
)  # fmt: skip
ROOT = Path(__file__).parents[1]
HELD_OUT = ROOT / "spanish.txt"
"""Sentences that judge a voice."""
WORDS = {
    name: value.split() if isinstance(value, str) else value
    for name, value in tomllib.loads((ROOT / "spanish.toml").read_text("utf-8")).items()
}
MIN_CHARACTERS, MAX_CHARACTERS = 3, 200
LETTERS = "a-záéíóúüñ"
CAPITALS = "A-ZÁÉÍÓÚÜÑ"
ALLOWED = re.compile(rf"[{LETTERS}{CAPITALS} ,.;:?!¿¡“”«»'-]+")
SENTENCE_END = re.compile(rf"(?<=[.?!])\s+(?=[¿¡{CAPITALS}])")
MARKUP = re.compile(r"<[^>]*>|\([^)]*\)|\[[^\]]*\]|[\"“”«»*_`]")
FUNCTION_WORDS = frozenset(WORDS["function_words"])
LEAST_FUNCTION_WORDS = 0.12  # of a line's words
ENGLISH_WORDS = frozenset(WORDS["english_words"])
OLD = {
    "á": "a",
    "ó": "o",
    "é": "e",
    "ú": "u",
    "fué": "fue",
    "fuí": "fui",
    "dió": "dio",
    "vió": "vio",
}
"""Spellings of 1909."""
SCRIPTURE_LINES = 14_000
RARE_PER_LINE = 6
JOINED = 0.3  # of short sentences: the next one follows in the same line
RARE_SHARE = 0.05  # of all lines, which templates give up
ENGLISH_ONLY = ("alike", "repeated", "digits", "word")  # kinds of lines; prose takes their place
TEMPLATES = 0.05  # of all lines
DESCRIBED = 0.4  # of things: with an adjective
BEFORE_AGUA = {"la": "el", "una": "un", "esta": "este"}
CONTRACTED = (
    (r"\ba el\b", "al"), (r"\bde el\b", "del"), (r"\by (?=[hH]?[iIíÍ](?![eé]))", "e "),
    (r"\bo (?=[hH]?[oOóÓ])", "u "),
)  # fmt: skip


def clean(text: str) -> str:
    """Return text without markup, quotes and brackets; what is left open becomes a pause."""
    text = unicodedata.normalize("NFC", text).replace("’", "'").replace("\u00a0", " ")
    text = re.sub(r"\s+", " ", MARKUP.sub("", text))
    text = re.sub(r"\s*(?:\.{2,}|…)\s*(?=[?!])", "", text)
    text = re.sub(rf"\s*(?:\.{{2,}}|…)\s*(?=[{LETTERS}])", ", ", text)
    text = re.sub(r"\s*(?:\.{2,}|…)\s*", ". ", text)
    text = re.sub(r"\s*[—–]\s*|\s-+\s", ", ", text)
    text = re.sub(r"\s+([,.;:?!])", r"\1", text)
    text = re.sub(r"([,;:])(?:\s*[,;:.])+", r"\1", text)
    return re.sub(r"^[\s,.;:-]+|[\s,;:-]+$", "", re.sub(r"([.?!])[,;:.]+", r"\1", text))


def is_spanish(line: str) -> bool:
    """Return whether a line has letters and signs of Spanish only, and some of its small words."""
    words = re.findall(rf"[{LETTERS}]+", line.lower())
    if not (MIN_CHARACTERS <= len(line) <= MAX_CHARACTERS and ALLOWED.fullmatch(line)):
        return False
    if ENGLISH_WORDS & set(words) or re.search(rf"[{CAPITALS}]{{3}}|(\w)\1\1", line):
        return False
    return (
        len(words) < 4
        or sum(word in FUNCTION_WORDS for word in words) / len(words) > LEAST_FUNCTION_WORDS
    )


def sentences(paragraphs: Iterator[str], rng: random.Random) -> Iterator[str]:
    """Iterate over lines of one sentence, or of short neighbours."""
    for paragraph in paragraphs:
        waiting = ""
        for sentence in SENTENCE_END.split(clean(paragraph)):
            line = f"{waiting} {sentence}".strip()
            waiting = ""
            if len(line) < 120 and rng.random() < JOINED:
                waiting = line
            elif len(line) <= MAX_CHARACTERS:
                yield line
        if waiting:
            yield waiting


def game_paragraphs() -> Iterator[str]:
    """Iterate over the translated texts of Battle for Wesnoth."""
    for path in sorted(SHARE.glob("games/wesnoth/*/locale/es/LC_MESSAGES/*.mo")):
        for text in translations(path.read_bytes()):
            if not re.search(r"[$|%{]|\d", text):
                yield from re.split(r"\n\s*\n", text)


def translations(compiled: bytes) -> Iterator[str]:
    """Iterate over the texts of a compiled catalogue (.mo) of gettext, plural forms one by one."""
    count, texts = struct.unpack_from("<8xI4xI", compiled)
    after_header = compiled[texts + 8 : texts + 8 * count]  # its source is "", so it is the first
    for size, start in struct.iter_unpack("<2I", after_header):
        yield from compiled[start : start + size].decode().split("\0")


def fortune_paragraphs() -> Iterator[str]:
    for path in sorted((SHARE / "games/fortunes/es").glob("*.fortunes")):
        for quote in path.read_text("utf-8").split("\n%\n"):
            yield re.sub(r"\n\s*--.*", "", quote, flags=re.S)


def scripture_paragraphs() -> Iterator[str]:
    """Iterate over the Reina-Valera Bible, in today's spelling."""
    printed = subprocess.run(
        ["diatheke", "-b", "spaRV1909eb", "-f", "plain", "-k", "Genesis-Revelation"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    for line in printed.splitlines():
        verse = re.sub(r"<[^>]*>", " ", re.sub(r"^[\w ]+ \d+:\d+:", "", line))
        yield " ".join(OLD.get(word, word) for word in verse.split())


def prose(rng: random.Random) -> list[str]:
    """Return all lines of the packages, each once."""
    handbook = f"{SHARE}/doc/debian-handbook/html/es-ES/**/*.html"
    lines: dict[str, None] = {}
    sources = (game_paragraphs(), fortune_paragraphs(), html_paragraphs(handbook))
    for source in sources:
        lines.update(dict.fromkeys(filter(is_spanish, sentences(source, rng))))
    verses = [line for line in sentences(scripture_paragraphs(), rng) if is_spanish(line)]
    lines.update(dict.fromkeys(rng.sample(verses, min(SCRIPTURE_LINES, len(verses)))))
    return list(lines)


def rare_words() -> list[str]:
    """Return the words of the list that are written in small letters."""
    words = (SHARE / "dict/spanish").read_text("utf-8").split()
    return [word for word in words if re.fullmatch(rf"[{LETTERS}]{{2,16}}", word)]


def kind_of(line: str) -> str:
    """Return the kind of a line of prose; "" for one that is left out."""
    words = line.split()
    if line.endswith("?"):
        return "question" if line.startswith("¿") else ""
    if line.endswith("!"):
        return "exclamation" if line.startswith("¡") else ""
    if len(words) <= 2:
        return "short"
    if not line.endswith(".") or not re.match(rf"[¿¡]?[{CAPITALS}]", line):
        return ""
    return "long" if len(line) >= 120 else "prose"


def plural(word: str) -> str:
    """Return several of what a noun or an adjective means."""
    if word.endswith("z"):
        return word[:-1] + "ces"
    if re.search(r"[aeiouáéó]$", word):
        return word + "s"
    if re.search(r"[áéíóú]n$", word):
        return word[:-2] + word[-2].translate(str.maketrans("áéíóú", "aeiou")) + "nes"
    return word + "es"


def agree(adjective: str, *, feminine: bool, several: bool = False) -> str:
    """Return an adjective in the form of its noun."""
    if feminine and adjective.endswith("o"):
        adjective = adjective[:-1] + "a"
    return plural(adjective) if several else adjective


def noun_phrase(rng: random.Random, articles: Sequence[str], *, several: bool = False) -> str:
    """Return a noun with its article of `articles` (masculine, feminine), now and then with an
    adjective."""
    feminine = rng.random() < 0.5
    noun, article = rng.choice(WORDS["feminine" if feminine else "masculine"]), articles[feminine]
    if noun == "agua":
        article = BEFORE_AGUA.get(article, article)
    words = [article, plural(noun) if several else noun]
    if rng.random() < DESCRIBED:
        words.append(agree(rng.choice(WORDS["adjectives"]), feminine=feminine, several=several))
    return " ".join(words)


def definite(rng: random.Random) -> str:
    return noun_phrase(
        rng, rng.choice((("el", "la"), ("el", "la"), ("mi", "mi"), ("este", "esta")))
    )


def indefinite(rng: random.Random) -> str:
    if rng.random() < 0.25:
        return noun_phrase(rng, rng.choice((("unos", "unas"), ("dos", "dos"))), several=True)
    return noun_phrase(rng, ("un", "una"))


def number(n: int) -> str:
    return str(num2words(n, lang="es"))


def _count(rng: random.Random) -> str:
    """Return a number of things that does not end in one, which would follow their gender."""
    n = rng.randrange(2, rng.choice((20, 100, 1000, 20_000, 3_000_000)))
    return number(n + (n % 10 == 1))


def _hour(rng: random.Random) -> str:
    h = rng.randint(1, 12)
    whole = "la una" if h == 1 else f"las {number(h)}"
    return whole + rng.choice(("", "", " y media", " y cuarto", " menos diez", " en punto"))


def _listed(rng: random.Random, things: Sequence[str]) -> str:
    joint = rng.choice((" y ", " y ", " o "))
    return f"{', '.join(things[:-1])}{joint}{things[-1]}"


def _some(rng: random.Random, name: str) -> str:
    return _listed(rng, rng.sample(WORDS[name], rng.randint(3, 5)))


FIELDS: dict[str, Callable[[random.Random], str]] = {
    "N": definite,
    "I": indefinite,
    "NM": lambda rng: f"el {rng.choice(WORDS['masculine'])}",
    "UM": lambda rng: f"un {rng.choice(WORDS['masculine'])}",
    "x": lambda rng: rng.choice(WORDS["masculine"]),
    "a": lambda rng: rng.choice(WORDS["adjectives"]),
    "W": lambda rng: rng.choice(WORDS["names"]),
    "s": lambda rng: rng.choice(WORDS["surnames"]),
    "C": lambda rng: rng.choice(WORDS["cities"]),
    "K": lambda rng: rng.choice(WORDS["countries"]),
    "S": lambda rng: rng.choice(WORDS["subjects"]),
    "v": lambda rng: rng.choice(WORDS["verbs"]),
    "inf": lambda rng: rng.choice(WORDS["infinitives"]),
    "p": lambda rng: rng.choice(WORDS["places"]),
    "t": lambda rng: rng.choice(WORDS["times"]),
    "d": lambda rng: rng.choice(WORDS["days"]),
    "m": lambda rng: rng.choice(WORDS["months"]),
    "n": _count,
    "c": lambda rng: number(rng.choice((*range(2, 21), *range(22, 31), 40, 55, 60, 99))),
    "D": lambda rng: number(rng.randint(2, 31)),
    "Y": lambda rng: number(rng.randint(1492, 2040)),
    "num": lambda rng: " ".join(number(rng.randrange(10)) for _ in range(rng.randint(3, 9))),
    "h": _hour,
    "list": lambda rng: _listed(rng, [indefinite(rng) for _ in range(rng.randint(3, 5))]),
    "people": lambda rng: _some(rng, "names"),
    "cities": lambda rng: _some(rng, "cities"),
}


def fill(rng: random.Random, kind: str) -> str:
    """Return a sentence of one of a kind's templates."""
    text = rng.choice(WORDS[kind])
    while "{" in text:
        text = re.sub(r"\{(\w+)\}", lambda found: FIELDS[found[1]](rng), text)
    for wrong, right in CONTRACTED:
        text = re.sub(wrong, right, text)
    return _capital(text)


def _capital(text: str) -> str:
    """Return a sentence that begins with a capital, behind its opening sign."""
    first = next(n for n, sign in enumerate(text) if sign.isalpha())
    return text[:first] + text[first].upper() + text[first + 1 :]


def dialogue(rng: random.Random, parts: Sequence[str]) -> str:
    """Return direct speech of two short sentences."""
    first, second = (part.rstrip(".,;:") for part in rng.sample(parts, 2))
    name, verb = rng.choice(WORDS["names"]), rng.choice(WORDS["said"])
    said = rng.choice((f"“¿{first}?”", f"“¡{first}!”", f"“{first}”,"))
    if rng.random() < 0.5:
        return f"{said} {verb} {name}."
    return f"{said} {verb} {name}. “{second}.”"


def exclamation(rng: random.Random, parts: Sequence[str]) -> str:
    """Return a call, or a sentence said aloud."""
    sentence, opener = rng.choice(parts).rstrip(".,;:"), rng.choice(WORDS["openers"])
    lower = sentence[0].lower() + sentence[1:]
    return rng.choice((
        fill(rng, "exclamations"), fill(rng, "exclamations"), f"¡{sentence}!",
        f"¡{opener}, {lower}!", f"¡{opener}!",
    ))  # fmt: skip


def clause(rng: random.Random, parts: Sequence[str]) -> str:
    """Return a part of a line that stops at a comma."""
    found = re.split(r"(?<=[,;:])\s+", rng.choice(parts))
    return rng.choice(found[:-1] or found)


def short(rng: random.Random) -> str:
    """Return a word or two."""
    noun = rng.choice(WORDS[rng.choice(("masculine", "feminine", "names", "cities", "days"))])
    one = rng.choice(
        (noun, definite(rng), rng.choice(WORDS["openers"]), rng.choice(WORDS["times"]))
    )
    return _capital(one) + rng.choice((".", ".", "", ",", "!"))


def choose(corpus: Sequence[str], rare: Sequence[str], count: int, seed: int) -> list[str]:
    """Return about `count` different lines, shuffled: lines of the same kinds as English ones
    (`training.kokoro.lines`), and `rare` words in rows."""
    rng = random.Random(seed)
    judged = set(HELD_OUT.read_text("utf-8").splitlines())
    by_kind: dict[str, list[str]] = defaultdict(list)
    for line in corpus:
        if line not in judged:
            by_kind[kind_of(line)].append(line)
    near = [line for line in by_kind["prose"] if len(line) < 60] or ["Todo está bien."] * 2
    pool = rng.sample(rare, len(rare))
    makers: dict[str, Callable[[], str]] = {
        "dialogue": lambda: dialogue(rng, near),
        "list": lambda: fill(rng, "lists"),
        "exclamation": lambda: exclamation(rng, near),
        "template": lambda: fill(rng, "statements"),
        "clause": lambda: clause(rng, by_kind["long"] or near),
        "short": lambda: short(rng),
        "rare": lambda: f"{', '.join(pool.pop() for _ in range(min(RARE_PER_LINE, len(pool))))}.",
        "yes or no": lambda: fill(rng, "questions"),
        "tag": lambda: fill(rng, "tagged"),
        "open": lambda: fill(rng, "open"),
    }
    wanted = shares(QUESTIONS) | {"rare": RARE_SHARE, "template": TEMPLATES}
    wanted["prose"] += sum(wanted.pop(kind) for kind in ENGLISH_ONLY)
    chosen: dict[str, None] = {}
    for kind, share in wanted.items():
        size = round(share * count)
        found = by_kind[kind]
        lines = rng.sample(found, min(size, len(found)))
        while kind in makers and len(lines) < size and (kind != "rare" or pool):
            lines.append(makers[kind]())
        chosen.update(dict.fromkeys(lines))
    lines = [line for line in chosen if line not in judged and len(line) <= MAX_CHARACTERS]
    rng.shuffle(lines)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", action="store_true", help="print the Debian packages")
    parser.add_argument("--count", type=int, default=60_000, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.packages:
        print(*PACKAGES)
        return
    if not args.out:
        parser.error("--out is required")
    corpus = prose(random.Random(args.seed))
    lines = choose(corpus, rare_words(), args.count, args.seed)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(
        f"{len(lines)} lines, {sum(map(len, lines))} characters; {len(corpus)} of prose were found"
    )


if __name__ == "__main__":
    main()
