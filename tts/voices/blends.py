"""Blends of voices, as names: "hazel(2)+owen(1)" is two parts of hazel and one of owen."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from decoder import blend_voices
from tts.errors import InvalidRequestError, Precondition, PreconditionError
from tts.voices.types import VOICE_ID, Voice, VoicePrompt

MAX_PARTS = 8
MAX_CHARACTERS = 1_000
MAX_CACHED = 256
EXAMPLE = "hazel(2)+owen(1)"
_PART = re.compile(r"\s*(?P<name>[^\s()]*)\s*(?P<weight>\(.*)?", re.DOTALL)
_WEIGHT = re.compile(r"\(\s*([0-9]{1,4}(?:\.[0-9]{1,4})?)\s*\)\s*")


@dataclass(frozen=True, slots=True)
class Blend:
    """Names of voices, sorted, with whole weights without a common factor."""

    parts: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """Name that all spellings of the blend share."""
        return "+".join(f"{name}({weight})" for name, weight in self.parts)


def is_blend(name: str) -> bool:
    """Return whether a name is to be read as a blend; no voice's own name has these signs."""
    return "+" in name or "(" in name


def read_blend(text: str, field: str) -> Blend:
    """Return the blend that a text describes. A voice without a weight has the weight 1.

    Raises InvalidRequestError, which names `field`, with the position of what is wrong.
    """
    pieces = text.split("+")
    if len(text) > MAX_CHARACTERS or not 2 <= len(pieces) <= MAX_PARTS:
        most = f"at most {MAX_CHARACTERS} characters"
        problem = f"a blend has 2 to {MAX_PARTS} voices and {most}, such as {EXAMPLE}"
        raise InvalidRequestError.of(field, problem)
    weights: dict[str, Fraction] = {}
    start = 0
    for piece in pieces:
        name, weight = _read_part(piece, start, field)
        weights[name] = weights.get(name, Fraction(0)) + weight
        start += len(piece) + 1
    scale = math.lcm(*(weight.denominator for weight in weights.values()))
    whole = {name: int(weight * scale) for name, weight in weights.items()}
    divisor = math.gcd(*whole.values())
    return Blend(tuple((name, whole[name] // divisor) for name in sorted(whole)))


def _read_part(piece: str, start: int, field: str) -> tuple[str, Fraction]:
    """Return the name and the weight of a part, which begins at a position of the text."""

    def error(position: int, problem: str) -> InvalidRequestError:
        return InvalidRequestError.of(field, f"at character {start + position + 1}: {problem}")

    found = _PART.match(piece)
    assert found is not None  # it matches nothing at all, too
    if VOICE_ID.fullmatch(found["name"]) is None:
        raise error(found.start("name"), f"a voice's name is missing or wrong: write {EXAMPLE}")
    if found.end() < len(piece):
        raise error(found.end(), f"only a weight can follow a name: write {EXAMPLE}")
    if found["weight"] is None:
        return found["name"], Fraction(1)
    weight = _WEIGHT.fullmatch(found["weight"])
    if weight is None or not Fraction(weight[1]):
        problem = "a weight is a number above 0 in parentheses, such as (2) or (0.5), below 10,000"
        raise error(found.start("weight"), f"{problem} and with at most 4 decimals")
    return found["name"], Fraction(weight[1])


@lru_cache(MAX_CACHED)
def blended(parts: tuple[tuple[Voice, int], ...], levels: tuple[int, ...]) -> Voice:
    """Return the blend of voices with weights, which speaks the languages of all its parts.

    `levels` are `CodecSpec.voice_levels`. Raises PreconditionError for a voice without codes.
    """
    for voice, _ in parts:
        if voice.prompt is None:
            raise PreconditionError(
                Precondition.VOICE_BLEND,
                f"voice '{voice.name}' is a recording and cannot be blended; create a voice from "
                "it, and blend that",
            )
    heaviest = sorted(parts, key=lambda part: -part[1])
    languages = dict.fromkeys(code for voice, _ in heaviest for code in voice.language_codes)
    rows = [voice.prompt.codes for voice, _ in parts if voice.prompt]
    codes = blend_voices(rows, [weight for _, weight in parts], levels)
    name = Blend(tuple((voice.name, weight) for voice, weight in parts)).name
    return Voice(name, name, tuple(languages), prompt=VoicePrompt(codes))
