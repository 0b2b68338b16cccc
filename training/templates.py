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
    text = re.sub(r"\{d\}", lambda _: rng.choice(ONES[:10]), template).format(**values)
    return text[0].upper() + text[1:]
