"""Random changes of bytes, texts and JSON values, each drawn from a given `random.Random`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

EDGE_INTS = (0, 1, -1, 2, 7, 127, 128, 255, 256, 65_535, 2**31 - 1, -(2**31), 2**32, 2**53)
HUGE_INTS = (2**63 - 1, -(2**63), 2**64, 10**30)
EDGE_FLOATS = (0.0, -0.0, 1e-45, 1e38, -1e38, 0.5, 1.0, math.inf, -math.inf, math.nan)
PLAIN_TEXTS = ("", "a", "Hello there.", "hazel", "en-US", "codec", "none", "{}", "<|s_{}|>", "0")
EDGE_TEXTS = ("\0", "a\0b", "../../etc/passwd", "\u202e", "\ufeff", "\U0010ffff", "{", "%s", "\n")
RANGES = (
    (0x20, 0x7E),
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x300, 0x36F),  # combining marks
    (0x370, 0x5FF),
    (0x600, 0x6FF),
    (0x2000, 0x206F),  # spaces, bidirectional controls
    (0x2070, 0x2BFF),
    (0x3000, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xFB00, 0xFFFD),
    (0x1D400, 0x1D7FF),  # mathematical letters and digits
    (0x1F000, 0x1FAFF),
    (0x20000, 0x2FA1F),
    (0xE0000, 0x10FFFF),
)


def characters(chance: Random, count: int) -> str:
    """Return characters of any plane, without surrogates, in runs of one block."""
    made: list[str] = []
    while len(made) < count:
        low, high = chance.choice(RANGES)
        made += (chr(chance.randint(low, high)) for _ in range(chance.randint(1, 6)))
    return "".join(made[:count])


def some_text(chance: Random) -> str:
    """Return a text for a field: plain, at a limit, or of random characters."""
    kind = chance.random()
    if kind < 0.4:
        return chance.choice(PLAIN_TEXTS)
    if kind < 0.7:
        return chance.choice(EDGE_TEXTS)
    return characters(chance, chance.choice((1, 3, 20, 300)))


def mutated(data: bytes, chance: Random, others: Sequence[bytes] = ()) -> bytes:
    """Return bytes with one to eight random changes; parts of `others` are inserted."""
    result = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        chance.choice(_CHANGES)(result, chance, others)
    return bytes(result)


Change = Callable[[bytearray, Random, Sequence[bytes]], None]


def _flip(data: bytearray, chance: Random, _: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _overwrite(data: bytearray, chance: Random, _: Sequence[bytes]) -> None:
    at, size = chance.randint(0, len(data)), chance.choice((1, 2, 4, 8))
    value = chance.choice((b"\0", b"\xff", b"\x7f", b"\x80", chance.randbytes(1)))
    data[at : at + size] = value * size


def _insert(data: bytearray, chance: Random, _: Sequence[bytes]) -> None:
    at = chance.randint(0, len(data))
    data[at:at] = chance.randbytes(chance.choice((1, 2, 5, 40)))


def _truncate(data: bytearray, chance: Random, _: Sequence[bytes]) -> None:
    del data[chance.randint(0, len(data)) :]


def _remove(data: bytearray, chance: Random, _: Sequence[bytes]) -> None:
    at = chance.randint(0, len(data))
    del data[at : at + chance.choice((1, 2, 4, 16, 100))]


def _repeat(data: bytearray, chance: Random, _: Sequence[bytes]) -> None:
    at = chance.randint(0, len(data))
    data[at:at] = data[at : at + chance.choice((1, 4, 30))] * chance.choice((1, 3, 100))


def _splice(data: bytearray, chance: Random, others: Sequence[bytes]) -> None:
    other = chance.choice(others) if others else bytes(data)
    start, at = chance.randint(0, len(other)), chance.randint(0, len(data))
    part = other[start : start + chance.choice((1, 8, 64, 1000))]
    data[at : at + chance.choice((0, len(part)))] = part


_CHANGES: tuple[Change, ...] = (_flip, _overwrite, _insert, _truncate, _remove, _repeat, _splice)


def some_value(chance: Random, depth: int = 2) -> Any:
    """Return a JSON value of any kind; it may have NaN, infinities, and texts with single
    surrogates.
    """
    maker = chance.choice(_VALUES if depth else _LEAVES)
    return maker(chance, depth - 1)


def _list(chance: Random, depth: int) -> list[Any]:
    return [some_value(chance, depth) for _ in range(chance.choice((1, 2, 50)))]


def _object(chance: Random, depth: int) -> dict[str, Any]:
    return {some_text(chance): some_value(chance, depth) for _ in range(chance.randint(1, 3))}


_LEAVES: tuple[Callable[[Random, int], Any], ...] = (
    lambda chance, _: chance.choice((None, True, False)),
    lambda chance, _: chance.choice(EDGE_INTS + HUGE_INTS),
    lambda chance, _: chance.choice(EDGE_FLOATS),
    *[lambda chance, _: some_text(chance)] * 2,
    lambda chance, _: chance.choice(("\ud800", "a\udfff", [], {})),
)
_VALUES = (*_LEAVES, _list, _object)


def changed_json(value: Any, chance: Random) -> Any:
    """Return a copy of a JSON value with one to three changes."""
    result = json.loads(json.dumps(value))
    for _ in range(chance.choice((1, 1, 2, 3))):
        result = _changed(result, chance)
    return result


def _changed(value: Any, chance: Random) -> Any:
    """Change one place at a random depth."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return _changed_leaf(value, chance)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = chance.choice(keys)
    kind = chance.random()
    if kind < 0.1:
        del value[key]
    elif kind < 0.2 and isinstance(value, dict):
        value[some_text(chance)] = value.pop(key)
    elif kind < 0.3 and isinstance(value, list):
        value.insert(key, json.loads(json.dumps(value[key])))
    else:
        value[key] = _changed(value[key], chance)
    return value


def _changed_leaf(value: Any, chance: Random) -> Any:
    if chance.random() < 0.3:
        if isinstance(value, bool) or value is None:
            return not value
        if isinstance(value, int | float):
            return chance.choice((-value, value + 1, value * 1000, float(value), str(value)))
        if isinstance(value, str):
            return mutated(value.encode("utf-8", "replace"), chance).decode("utf-8", "replace")
    return some_value(chance)


def json_text(value: Any, chance: Random) -> str:
    """Return a value as JSON; one of fifty is nested more deeply than parsers support."""
    if chance.random() < 0.02:
        mark = chance.choice(("[", '{"a":'))
        return mark * chance.choice((500, 3_000, 100_000))
    return json.dumps(value, ensure_ascii=chance.random() < 0.5)
