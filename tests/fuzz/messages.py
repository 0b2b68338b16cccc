"""Random protobuf messages, created from descriptors: valid ones, hostile ones, and raw bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz.mutation import EDGE_FLOATS, PLAIN_TEXTS, mutated, some_text

Field = FieldDescriptor
VARINT, FIXED64, DELIMITED, GROUP, GROUP_END, FIXED32 = range(6)
MAX_DEPTH = 4
INT_BITS = {
    Field.CPPTYPE_INT32: (32, True),
    Field.CPPTYPE_INT64: (64, True),
    Field.CPPTYPE_UINT32: (32, False),
    Field.CPPTYPE_UINT64: (64, False),
}
USUAL_TEXTS = (*PLAIN_TEXTS, "Hello there. How are you?", '{"type": "integer"}', "tiny", "owen")
NOT_UTF8 = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a\x80", b"\xe2\x82")


class Maker:
    """Creates messages. `clips` are the usual values of a field of bytes."""

    def __init__(self, clips: tuple[bytes, ...]) -> None:
        self._clips = clips

    def body(self, kind: Descriptor, chance: Random, *, first: bool = False) -> bytes:
        """Return the bytes of one message of a kind: valid, hostile, mutated, or random.

        `first`: usually the first member of its oneof, as streams begin.
        """
        how = chance.random()
        if how < 0.05:
            return chance.randbytes(chance.choice((0, 1, 5, 40, 1000)))
        if how < 0.15:
            return b"".join(self._raw_fields(kind, chance, 0))
        message = self.message(kind, chance, chance.choice((0.0, 0.0, 0.05, 0.3, 1.0)))
        if first and kind.fields and chance.random() < 0.8:
            self._set(message, kind.fields[0], chance, 0.0, 0)
        data = message.SerializeToString()
        if how < 0.4:
            return mutated(data, chance, (b"".join(self._raw_fields(kind, chance, 0)), data))
        return data

    def message(self, kind: Descriptor, chance: Random, hostility: float, depth: int = 0) -> Any:
        """Return a message; each value is hostile with the given probability."""
        made: Message = GetMessageClass(kind)()
        density = chance.choice((0.15, 0.4, 0.9))
        for field in kind.fields:
            if chance.random() < density and depth < MAX_DEPTH:
                self._set(made, field, chance, hostility, depth)
        return made

    def _set(
        self, message: Any, field: FieldDescriptor, chance: Random, hostility: float, depth: int
    ) -> None:
        count = chance.choice((0, 1, 2, 3, 400 if chance.random() < hostility else 1))
        if field.message_type is not None:
            for _ in range(count if field.is_repeated else 1):
                inner = self.message(field.message_type, chance, hostility, depth + 1)
                value = getattr(message, field.name)
                if field.message_type.GetOptions().map_entry:
                    value[inner.key] = inner.value
                else:
                    (value.add() if field.is_repeated else value).CopyFrom(inner)
        elif field.is_repeated:
            values = [self._value(field, chance, hostility) for _ in range(count)]
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, self._value(field, chance, hostility))

    def _value(self, field: FieldDescriptor, chance: Random, hostility: float) -> Any:
        is_hostile = chance.random() < hostility
        kind = field.cpp_type
        if kind == Field.CPPTYPE_STRING:
            return self._text_or_bytes(field, chance, is_hostile)
        if kind == Field.CPPTYPE_BOOL:
            return chance.random() < 0.5
        if kind in (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE):
            return chance.choice(EDGE_FLOATS) if is_hostile else chance.choice((0.5, 0.9, 1.0))
        if kind == Field.CPPTYPE_ENUM:
            numbers = [value.number for value in field.enum_type.values]
            return chance.choice((-1, 99, 2**31 - 1) if is_hostile else numbers)
        bits, is_signed = INT_BITS[kind]
        if not is_hostile:
            return chance.choice((0, 1, 3, 16, 8000, 16_000))
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if is_signed else (0, 2**bits)
        return chance.choice((low, high - 1, chance.randrange(low, high)))

    def _text_or_bytes(self, field: FieldDescriptor, chance: Random, is_hostile: bool) -> Any:
        if field.type == Field.TYPE_BYTES:
            clip = chance.choice(self._clips)
            return mutated(clip, chance, self._clips) if is_hostile else clip
        if not is_hostile:
            return chance.choice(USUAL_TEXTS)
        return some_text(chance) * chance.choice((1, 1, 1, 100, 3000))

    def _raw_fields(self, kind: Descriptor, chance: Random, depth: int) -> Iterator[bytes]:
        """Iterate over fields in any order, repeated or not, of any wire type, with invalid
        texts.
        """
        for _ in range(chance.choice((1, 2, 5, 20))):
            known = bool(kind.fields) and chance.random() < 0.85
            field = chance.choice(kind.fields) if known else None
            number = field.number if field else chance.choice((0, 15, 16, 2**29 - 1, 19_000))
            inner = field.message_type if field else None
            if inner is not None and depth < MAX_DEPTH and chance.random() < 0.8:
                value = b"".join(self._raw_fields(inner, chance, depth + 1))
                yield tag(number, DELIMITED) + varint(len(value)) + value
            else:
                wire_type = chance.choice((VARINT, FIXED64, DELIMITED, DELIMITED, FIXED32, 3, 4, 7))
                yield tag(number, wire_type) + _payload(wire_type, chance)


def _payload(wire_type: int, chance: Random) -> bytes:
    makers: dict[int, Callable[[], bytes]] = {
        VARINT: lambda: varint(chance.choice((0, 1, 2**31, 2**63, 2**64 - 1))),
        FIXED64: lambda: struct.pack("<d", chance.choice(EDGE_FLOATS)),
        FIXED32: lambda: chance.randbytes(4),
        GROUP: lambda: tag(1, GROUP) * chance.choice((1, 99, 5000)),
        DELIMITED: lambda: _delimited(chance),
    }
    return makers.get(wire_type, lambda: b"\xff" * chance.randint(0, 12))()


def _delimited(chance: Random) -> bytes:
    value = chance.choice((*NOT_UTF8, b"hazel", b"", b"\xff" * 300, chance.randbytes(9)))
    wrong = chance.choice((2**31 - 1, 2**32, 2**63, len(value) + 1))
    size = len(value) if chance.random() < 0.85 else wrong
    return varint(size) + value


def tag(number: int, wire_type: int) -> bytes:
    """Return the key before a field."""
    return varint(number << 3 | wire_type)


def varint(value: int) -> bytes:
    """Return an integer of at least 0 in groups of seven bits, the lowest first."""
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes((*made, value))
