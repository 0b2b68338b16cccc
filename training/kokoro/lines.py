"""Which lines are spoken: shares of kinds of text, out of the corpus, and kinds it has too few of.

    python -m training.kokoro.lines --corpus runs/corpus.txt --count 24000 --out runs/lines.txt

Dictionaries fill most of the corpus; a voice also has to ask, exclaim, count, quote and list.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from training.corpus import HELD_OUT
from training.templates import WORDS, fill, letters, number, question

SHARES = {  # of lines that do not ask
    "long": 0.17,  # 120 characters and more
    "prose": 0.27,
    "exclamation": 0.06,
    "dialogue": 0.08,
    "list": 0.07,
    "template": 0.10,  # numbers, dates, names
    "clause": 0.06,  # without an end: a line that stops at a comma
    "short": 0.04,  # a word or two
    "alike": 0.06,  # words that begin with the same letter, as in a tongue twister
    "repeated": 0.05,  # words or phrases that come several times
    "digits": 0.02,  # figures, one by one
    "word": 0.02,  # one of a few common words, each many times
}
ASKED = {  # of questions; all but the first kind are short ones by templates
    "question": 0.25,
    "yes or no": 0.5,
    "tag": 0.1,  # "..., isn't it?"
    "open": 0.15,  # who, what, where; and "... or ...?"
}
QUESTIONS = 0.24  # of all lines
LEAST_ALIKE = 40  # words of an initial
WHOLE_WORD = r"(?<![\w'’])[a-z]{3,9}(?![\w'’])"
OPENERS = ("Oh", "Well", "Look", "Listen", "Yes", "No", "Stop", "Wait", "Help", "Great", "Sorry")
SINGLE_WORDS = (
    "Look!", "Later.", "Soon.", "Nothing.", "Almost.", "Once.", "Enough!", "Quick!", "Ready?",
    "Sure.", "Which?", "Sunday.", "Twelve.", "What?", "When?", "Where?", "How?", "Here?", "Now?",
    "Always.", "Today.", "Right.", "Go!", "Good.", "Fine.", "Please.", "Whose?", "Ten.", "Him?",
)  # fmt: skip
REPETITIONS = (
    "{w}, {w}, {w}, {s}.", "{w} {w} {w} {s}.", "{S}, {s}, and {s} again.", "{S} and {s} and {s}.",
    "{F} is {v} {v} {a}.", "They were {v} {v} {v} {a} and {v} {b}.", "The {a}, {a}, {a} {n}.",
    "{F}, {F}, come here!", "A {n}, a {n}, my kingdom for a {n}!",
    "She had had that {n} that that {m} is like.", "Each {n} he had had had been {a}.",
    "Not {a}, not {b}, not {a}.", "Row, row, row, then {s}.",
)  # fmt: skip
SMALL_WORDS = ("the", "a", "and", "for", "of", "with", "in", "from", "to")
SAID = ("said", "asked", "answered", "whispered", "shouted", "replied", "cried", "called")
NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry",
    "Ivy", "Jack", "Kate", "Leo", "Maria", "Noah", "Olivia",
    "Peter", "Rose", "Sam", "Tom", "Wendy",
)  # fmt: skip


def kind_of(line: str) -> str:
    """The kind of a corpus line; empty for one that is left out."""
    if len(line.split()) <= 2:
        return "short" if re.fullmatch(r"[A-Z][a-z]+( [a-z]+)?[.!?]?", line) else ""
    if line.isupper() or re.search(r"\d|\b[a-z]\.|, [a-z]\.$", line):
        return ""
    if line.endswith("."):
        return _kind_of_statement(line)
    ends = {"?": "question", "!": "exclamation", ",": "clause", ";": "clause", ":": "clause"}
    return ends.get(line[-1], "")


def _kind_of_statement(line: str) -> str:
    if not line[0].isupper() or len(line.split()) < 4:
        return ""
    return "long" if len(line) >= 120 else "prose"


def dialogue(rng: random.Random, parts: Sequence[str]) -> str:
    """Make direct speech of two short sentences."""
    first, second = (part.rstrip(".!?,;:") for part in rng.sample(parts, 2))
    end = rng.choice(",?!")
    name, verb = rng.choice(NAMES), rng.choice(SAID)
    if rng.random() < 0.5:
        return f"“{first}{end}” {verb} {name}."
    return f"“{first}{end}” {verb} {name}. “{second}.”"


def listing(rng: random.Random) -> str:
    """Things in a row."""
    things = rng.sample(WORDS["nouns"], rng.randint(3, 6))
    head = rng.choice(("We need", "I bought", "There were", "She packed", "They sell", "Bring"))
    joint = rng.choice((", and ", " and ", ", or "))
    return f"{head} {', '.join(things[:-1])}{joint}{things[-1]}."


def exclamation(rng: random.Random, parts: Sequence[str]) -> str:
    """A call, or a sentence said aloud."""
    sentence = rng.choice(parts).rstrip(".!?,;:")
    lower = sentence[0].lower() + sentence[1:]
    return rng.choice(
        (f"{rng.choice(OPENERS)}, {lower}!", f"{sentence}!", f"{rng.choice(OPENERS)}!")
    )


def counted(rng: random.Random) -> str:
    """A template's sentence, a number or letters."""
    roll = rng.random()
    if roll < 0.8:
        return fill(rng, list(NAMES))
    if roll < 0.9:
        return f"{number(rng.randrange(2_000_000), rng).capitalize()}."
    return f"It says {letters(rng)}."


def alike(rng: random.Random, words: Sequence[str]) -> str:
    """Words of one initial letter, some with a small word in front."""
    row = rng.sample(words, rng.randint(4, 8))
    text = " ".join(f"{rng.choice(SMALL_WORDS)} {w}" if rng.random() < 0.25 else w for w in row)
    return f"{text[0].upper()}{text[1:]}{rng.choice('....!')}"


def repeated(rng: random.Random, parts: Sequence[str]) -> str:
    """A sentence with words or phrases that come several times."""
    sentence = rng.choice(parts).rstrip(".!?,;:")
    adjectives, nouns = rng.sample(WORDS["adjectives"], 2), rng.sample(WORDS["nouns"], 2)
    text = rng.choice(REPETITIONS).format(
        S=sentence, s=sentence[0].lower() + sentence[1:], F=rng.choice(NAMES),
        w=rng.choice(("no", "yes", "please", "again", "now", "more", "well", "step")),
        v=rng.choice(("very", "really", "so", "too", "much")),
        a=adjectives[0], b=adjectives[1], n=nouns[0], m=nouns[1],
    )  # fmt: skip
    return text[0].upper() + text[1:]


def digits(rng: random.Random) -> str:
    """Figures that are said one by one."""
    row = rng.choices(WORDS["ones"][:10], k=rng.randint(3, 8))
    head = rng.choice(("", "The code is ", "It is ", "Call ", "Room ", "The number is ", "Dial "))
    text = head + rng.choice((" ", ", ")).join(row)
    return f"{text[0].upper()}{text[1:]}."


def words_by_initial(lines: Sequence[str]) -> list[list[str]]:
    """Words of three to nine letters that lines have three times and more, of each initial."""
    counts = Counter(word for line in lines for word in re.findall(WHOLE_WORD, line))
    found: dict[str, list[str]] = defaultdict(list)
    for word in sorted(word for word, count in counts.items() if count > 2):
        found[word[0]].append(word)
    return [words for words in found.values() if len(words) >= LEAST_ALIKE]


def shares(questions: float) -> dict[str, float]:
    """Shares of all kinds where this share of the lines asks."""
    others = {kind: (1 - questions) * share for kind, share in SHARES.items()}
    return others | {kind: questions * share for kind, share in ASKED.items()}


def choose(corpus: Sequence[str], count: int, seed: int, questions: float = QUESTIONS) -> list[str]:
    """About `count` lines, of which a share are questions, shuffled. Only single words come several
    times.
    """
    rng = random.Random(seed)
    by_kind: dict[str, list[str]] = defaultdict(list)
    for line in corpus:
        by_kind[kind_of(line)].append(line)
    short = [line for line in by_kind["prose"] if len(line) < 60]
    initials = words_by_initial(by_kind["prose"]) or [WORDS["nouns"]]
    makers = {
        "alike": lambda: alike(rng, rng.choice(initials)),
        "repeated": lambda: repeated(rng, short),
        "digits": lambda: digits(rng),
        "dialogue": lambda: dialogue(rng, short),
        "list": lambda: listing(rng),
        "exclamation": lambda: exclamation(rng, short),
        "template": lambda: counted(rng),
        "yes or no": lambda: question(rng, list(NAMES)),
        "tag": lambda: question(rng, list(NAMES), "tagged"),
        "open": lambda: question(rng, list(NAMES), "wh"),
    }
    judged = {line for path in HELD_OUT for line in path.read_text(encoding="utf-8").splitlines()}
    chosen: dict[str, None] = {}
    wanted_of = {kind: round(share * count) for kind, share in shares(questions).items()}
    words = rng.choices(SINGLE_WORDS, k=wanted_of.pop("word"))
    for kind, wanted in wanted_of.items():
        found = by_kind[kind] if kind != "dialogue" else []
        lines = rng.sample(found, min(wanted, len(found)))
        if kind in makers:
            lines += [makers[kind]() for _ in range(wanted - len(lines))]
        chosen.update(dict.fromkeys(lines))
    lines = [*words, *(line for line in chosen if line not in judged)]
    rng.shuffle(lines)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--count", type=int, default=24_000)
    parser.add_argument("--questions", type=float, default=QUESTIONS, help="share of the lines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    corpus = args.corpus.read_text().splitlines()
    lines = choose(corpus, args.count, args.seed, args.questions)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} lines, {sum(map(len, lines))} characters")


if __name__ == "__main__":
    main()
