"""Texts in which a voice may skip or repeat words: names, numbers, repeated words, tongue twisters.

Every kind has the same share of the words. The same seed gives the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random

FIRST_NAMES = (
    "Agnes", "Bernard", "Camilla", "Desmond", "Eleanor", "Fabian", "Gloria", "Harvey", "Isabel",
    "Jasper", "Katherine", "Leonard", "Miranda", "Nathaniel", "Olivia", "Patrick", "Rosalind",
    "Sebastian", "Theodore", "Veronica", "Winston", "Yolanda", "Anna", "Peter", "Oscar", "Ruby",
)  # fmt: skip
LAST_NAMES = (
    "Abernathy", "Blackwood", "Carmichael", "Donovan", "Ellsworth", "Ferguson", "Galloway",
    "Henderson", "Ivanov", "Johansson", "Kowalski", "Lindgren", "Montgomery", "Nakamura",
    "Okafor", "Petersen", "Quintero", "Rosenberg", "Schneider", "Thompson", "Underwood",
    "Vasquez", "Whitaker", "Yamamoto", "Zimmerman", "Bell", "Cole", "Frost", "Young",
)  # fmt: skip
PLACES = (
    "Birmingham", "Chicago", "Dublin", "Edinburgh", "Florence", "Geneva", "Helsinki", "Istanbul",
    "Johannesburg", "Kyoto", "Lisbon", "Montreal", "Nairobi", "Oslo", "Philadelphia", "Rome",
    "San Francisco", "Toronto", "Vienna", "Warsaw",
)  # fmt: skip
THINGS = (
    "apples", "blankets", "candles", "dictionaries", "envelopes", "forks", "gloves", "hammers",
    "instruments", "jackets", "kettles", "lanterns", "mirrors", "needles", "onions", "pencils",
    "ropes", "screwdrivers", "tomatoes", "umbrellas", "violins", "wheels", "ladders", "bottles",
)  # fmt: skip
QUALITIES = (
    "cold", "long", "late", "strange", "beautiful", "quiet", "expensive", "dangerous", "simple",
    "heavy", "important", "small", "bright", "slow", "far away", "old", "happy", "complicated",
)  # fmt: skip
SINGLE = (
    "Yes.", "No.", "Stop!", "Hello.", "Thanks.", "Really?", "Tomorrow.", "Perhaps.", "Why?",
    "Welcome.", "Absolutely.", "Goodbye.", "Wait!", "Never.", "Seven.", "Monday.", "Help!",
    "Congratulations!", "Unbelievable.", "Exactly.", "Somewhere.", "Listen.", "Again?", "Sorry.",
    "Understood.", "Photosynthesis.", "Wonderful!", "Left.", "September.", "Okay.", "Silence!",
    "Unfortunately.", "Careful.", "Breakfast.", "Who?", "Eleven.", "Done.", "Maybe.", "Next.",
)  # fmt: skip
TWISTERS = (
    "Six slick sisters sliced sixty sticky plums for sixty sick sailors.",
    "Brave Brenda brought a broken blue broom back to Brad's brother's barn.",
    "The thirty third thrush thought the other three thrushes threw thistles.",
    "Fresh fish fried in thin foil feels fine for fifty fussy fishermen.",
    "Which witch wished to wash which wristwatch at the white Swiss well?",
    "Three grey geese grazed in a green glade while nine grey goats gazed.",
    "Lucky Larry loves a lot of little red lorries and long yellow lorries.",
    "Betty bought a bit of bitter butter, but better batter beats bitter butter.",
    "Shy Sheila shall surely show Sean the shiny seashell shop on the shore.",
    "Greta's great grey crate creaked as Greg's crew quickly crept across.",
    "Quick kids kick thick sticks while sick chicks pick at thick bricks.",
    "Pale pink pillows please plump Paul's proud parents in Portugal.",
    "She sews shirts seldom, so she sold her sewing shears to Sue's son.",
    "A proper copper coffee pot is not a copper proper coffee cup.",
)
CLAUSES = (
    "the train from the coast was already an hour late", "the man in the office gave no reason",
    "a woman with two suitcases asked the guard for help", "the rain came down on the glass roof",
    "the children counted the wagons of a passing freight train", "he folded his newspaper twice",
    "an announcement echoed through the hall without a single clear word",
    "the man at the kiosk sold his last cup of tea", "a boy began to laugh near the stairs",
    "the old clock above the platform had stopped at quarter past nine",
    "the driver waved from the window of his cabin", "everyone picked up their bags at once",
    "the doors opened with a long and tired sigh", "the lamps along the track turned green",
    "the conductor walked slowly from one end of the carriage to the other",
    "two students shared a sandwich and a map of the mountains",
)  # fmt: skip
LINKS = (", and ", ", but ", ", while ", ", so ", ", because ", "; then ")
LONGEST = 300  # characters


def names(draw: Random) -> str:
    """Return a sentence full of names."""
    people = [f"{draw.choice(FIRST_NAMES)} {draw.choice(LAST_NAMES)}" for _ in range(4)]
    listed = f"{', '.join(people[:-1])} and {people[-1]}"
    near, far = draw.sample(PLACES, 2)
    return draw.choice(
        (
            f"{listed} travelled from {near} to {far}.",
            f"The letter to {listed} was sent to {near} instead of {far}.",
            f"We met {listed} in {near}, not in {far}.",
        )
    )


def numbers(draw: Random) -> str:
    """Return a sentence with figures."""
    low, high, year = draw.randrange(2, 99), draw.randrange(100, 999), draw.randrange(1801, 1999)
    thing, place = draw.choice(THINGS), draw.choice(PLACES)
    few = [draw.randrange(2, 99) for _ in range(4)]
    digits = " ".join(str(draw.randrange(10)) for _ in range(5))
    return draw.choice(
        (
            f"Of the {high} {thing} in room {low}, only {few[0]} were sold by {year}.",
            f"Take bus {low} to stop {few[0]}, then walk {high} steps to house number {few[1]}.",
            f"Count with me: {low}, {', '.join(map(str, few))}.",
            f"The codes for {place} are {digits} and {digits[::-1]}.",
            f"In {year}, {place} had {low} bridges, {few[0]} churches and {high} gardens.",
        )
    )


def repeated(draw: Random) -> str:
    """Return a sentence that repeats words."""
    quality, other, thing = *draw.sample(QUALITIES, 2), draw.choice(THINGS)
    name, word = draw.choice(FIRST_NAMES), draw.choice(("very", "really", "so", "too", "much"))
    count = draw.randrange(2, 6)
    return draw.choice(
        (
            f"It was {' '.join(['very'] * count)} {quality}, and {' '.join(['very'] * 3)} {other}.",
            f"{', '.join(['no'] * count).capitalize()}, the {thing} are not {quality}.",
            f"The {thing} that that man had had had had no {thing} inside.",
            f"{name} said that {name} knows that {name} is {' '.join([word] * count)} {quality}.",
            f"Step by step by step, {name} carried {thing} and {thing} and more {thing}.",
            f"Again and again and again they asked: is it {other}, {other}, or {quality}?",
            f"Knock, knock, knock. Who is there? {name}. {name} who? {name} and the {thing}.",
            f"{name}! {name}! {name}! Bring the {thing}, bring the {thing}, bring the {thing}!",
        )
    )


def listed(draw: Random) -> str:
    """Return a sentence with a long list of things."""
    things = draw.sample(THINGS, 9)
    return f"We need {', '.join(things[:-1])} and {things[-1]}."


def twisted(draw: Random) -> str:
    """Return a tongue twister."""
    return draw.choice(TWISTERS)


def single(draw: Random) -> str:
    """Return a text of one word."""
    return draw.choice(SINGLE)


def long(draw: Random) -> str:
    """Return a sentence of almost `LONGEST` characters."""
    text = ""
    for clause in draw.sample(CLAUSES, len(CLAUSES)):
        longer = f"{text}{draw.choice(LINKS) if text else ''}{clause}"
        if len(longer) >= LONGEST:
            break
        text = longer
    return f"{text[0].upper()}{text[1:]}."


KINDS: Mapping[str, Callable[[Random], str]] = {
    function.__name__: function
    for function in (names, numbers, repeated, listed, twisted, single, long)
}


def hard_texts(num_words: int, seed: int = 1) -> Iterator[tuple[str, str]]:
    """Iterate over kinds and texts until there are so many words.

    The kind with the fewest words so far is next.
    """
    draw, counts = Random(seed), dict.fromkeys(KINDS, 0)
    while sum(counts.values()) < num_words:
        kind = min(counts, key=counts.__getitem__)
        text = KINDS[kind](draw)
        counts[kind] += len(text.split())
        yield kind, text
