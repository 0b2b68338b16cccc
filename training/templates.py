"""Sentences from templates: numbers, dates, names, questions, spelled letters."""

from __future__ import annotations

import random
import re
import string
import tomllib
from pathlib import Path

WORDS = {
    name: value.split() if isinstance(value, str) else value
    for name, value in tomllib.loads((Path(__file__).parent / "words.toml").read_text()).items()
}
ONES, TENS = WORDS["ones"], WORDS["tens"]
VERBS_WITH_A_THING, TAILS = 0.6, 0.4  # shares of questions
MOST_ASKED = 9  # words of a question
PLURALS = {
    "child": "children",
    "knife": "knives",
    "potato": "potatoes",
    "scarf": "scarves",
    "shelf": "shelves",
}
THINGS = (
    " the {n}",
    " the {n}",
    " the {a} {n}",
    " a {n}",
    " your {n}",
    " my {a} {n}",
    " it",
    " them",
)


def number(n: int, rng: random.Random) -> str:
    """Return an integer below a billion in words, with the usual variations."""
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


def letters(rng: random.Random) -> str:
    """Return two to five capitals, spelled out ("F B I")."""
    return " ".join(rng.choices(string.ascii_uppercase, k=rng.randint(2, 5)))


def fill(rng: random.Random, first_names: list[str]) -> str:
    """Return one sentence of a random template."""
    size = rng.choice((20, 100, 1000, 20_000, 3_000_000))
    values = {
        **{key: rng.choice(WORDS["nouns"]) for key in "nmk"},
        **{key: rng.choice(WORDS["adjectives"]) for key in "ab"},
        "v": rng.choice(WORDS["verbs"]),
        "S": rng.choice(WORDS["subjects"]),
        "p": rng.choice(WORDS["places"]),
        "t": rng.choice(WORDS["times"]),
        "D": rng.choice(WORDS["days"]),
        "M": rng.choice(WORDS["months"]),
        "O": rng.choice(WORDS["ordinals"]),
        "F": rng.choice(first_names),
        "Z": rng.choice(("a m", "p m", "A M", "P M")),
        "H": number(rng.randint(1, 12), rng),
        "h": rng.choice(("quarter", "half", "ten", "five")),
        "Y": f"{number(rng.randint(11, 20), rng)} {number(rng.randint(10, 99), rng)}",
        "N": number(rng.randrange(size), rng),
        "L": letters(rng),
    }
    template = rng.choice(WORDS["templates"])
    for key in "nm":
        template = template.replace(f"{{{key}}}s", plural(values[key]))
    text = re.sub(r"\{d\}", lambda _: rng.choice(ONES[:10]), template).format(**values)
    return text[0].upper() + text[1:]


def question(rng: random.Random, first_names: list[str], kind: str = "asked") -> str:
    """Return a short question: `asked` (answered with yes or no), `tagged` (a statement with a
    question behind it) or `wh` (who, what, where; and one thing or the other)."""
    while len((text := _asked(rng, first_names, kind)).split()) > MOST_ASKED:
        pass
    return text


def _asked(rng: random.Random, first_names: list[str], kind: str) -> str:
    values: dict[str, str] = {
        **{key: rng.choice(WORDS["nouns"]) for key in "nmk"},
        **{key: rng.choice(WORDS["adjectives"]) for key in "ab"},
        **{key: rng.choice(first_names) for key in "FG"},
        "v": rng.choice(WORDS["verbs"]),
        "p": rng.choice(WORDS["places"]),
        "t": rng.choice(WORDS["times"]),
        "r": rng.choice(WORDS["persons"]),
        "D": rng.choice(WORDS["days"]),
        "M": rng.choice(WORDS["months"]),
        "H": number(rng.randint(1, 12), rng),
    }
    takes = rng.random() < VERBS_WITH_A_THING
    verb = rng.choice(WORDS["takers" if takes else "doers"])
    thing = rng.choice(THINGS) if takes else ""
    tail = f" {rng.choice(WORDS['tails'])}" if rng.random() < TAILS else ""
    parts = {"P": rng.choice(WORDS["people"]), "s": rng.choice(WORDS["states"])}
    forms = enumerate(verb.split())
    parts |= {str(n): f"{form.replace('~', ' ')}{thing}{tail}" for n, form in forms}
    whole = rng.choice(WORDS[kind])

    def put(found: re.Match[str]) -> str:
        text = (parts | values)[found[1]]
        return plural(text) if found[2] else text

    for _ in range(2):  # parts have fields of their own
        whole = re.sub(r"\{(\w)\}(s\b)?", put, whole)
    whole = re.sub(r"\ba (?=[aeio]|u(?!ni|se))", "an ", whole)
    return whole[0].upper() + whole[1:]


def plural(noun: str) -> str:
    """Return several of what the noun means."""
    if noun in PLURALS:
        return PLURALS[noun]
    noun = re.sub(r"(?<=[^aeiou])y$", "ie", noun)
    return re.sub(r"(?<=ch|sh|.s|.x)$", "e", noun) + "s"
