"""Random JSON schemas, valid and invalid, for the functions that compile and follow them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from llm import RequestError, check_json_schema
from llm.structured.grammar import GrammarCompiler
from tests.fakes import build_tiny_checkpoint
from tests.fuzz.base import Case, InvariantError, Target
from tests.fuzz.mutation import changed_json, json_text, mutated, some_text, some_value
from tts.checkpoint.tokenizer import TextTokenizer

STEPS = 12  # tokens that are generated for a schema that can be compiled
TYPES = (
    "object",
    "array",
    "string",
    "integer",
    "number",
    "boolean",
    "null",
    "any",
    "",
    ["null", "x"],
)
PATTERNS = (
    "^a+$",
    "(",
    "(a|b)*c",
    "(?=a)b",
    "\\d{2,4}",
    "[",
    "a{1000}",
    "((a{99}){99}){99}",
    "\\p{L}",
)
PATTERNS += ("(a*)*b", "^$", ".", "\\", "[^\\x00-\\uffff]", "(?i)é", "(?<n>a)\\k<n>")
FORMATS = ("date-time", "email", "uuid", "ipv6", "uri", "regex", "none", "date", "hostname")
REFS = ("#", "#/$defs/a", "#/$defs/b", "#/properties/p", "http://x.y", "#/", "#a", "a.json", "")


def schema(chance: Random, depth: int = 4) -> Any:
    """Return a schema whose keywords mostly match."""
    if depth == 0 or chance.random() < 0.03:
        return chance.choice((True, False, {}, None, 5, [], {"type": "string"}))
    made: dict[str, Any] = {}
    for _ in range(chance.choice((1, 1, 2, 4))):
        made |= chance.choice(_KEYWORDS)(chance, depth - 1)
    return made


def _object(chance: Random, depth: int) -> dict[str, Any]:
    names = [chance.choice(("p", "q", some_text(chance))) for _ in range(chance.randint(0, 4))]
    return {
        "type": "object",
        "properties": {name: schema(chance, depth) for name in names},
        "required": chance.choice(([], names, ["absent"], "p")),
        "additionalProperties": chance.choice((True, False, schema(chance, depth))),
    }


def _array(chance: Random, depth: int) -> dict[str, Any]:
    counts = (0, 1, 3, 100, 10**6, 2**40, -1, 0.5)
    return {
        "type": "array",
        "items": schema(chance, depth),
        "prefixItems": [schema(chance, depth) for _ in range(chance.randint(0, 2))],
        "minItems": chance.choice(counts),
        "maxItems": chance.choice(counts),
    }


def _text(chance: Random, _: int) -> dict[str, Any]:
    lengths = (0, 1, 100, 10**5, 2**33, -1)
    made: dict[str, Any] = {"type": "string"}
    if chance.random() < 0.5:
        made["pattern"] = chance.choice(PATTERNS) * chance.choice((1, 1, 1, 30))
    if chance.random() < 0.3:
        made["format"] = chance.choice(FORMATS)
    return made | {"minLength": chance.choice(lengths), "maxLength": chance.choice(lengths)}


def _number(chance: Random, _: int) -> dict[str, Any]:
    values = (0, -1, 1e-300, 1e300, 10**40, 2**63, 0.1, "1", float("nan"))
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    kept = {key: chance.choice(values) for key in keys if chance.random() < 0.4}
    return {"type": chance.choice(("integer", "number")), **kept}


def _enum(chance: Random, _: int) -> dict[str, Any]:
    count = chance.choice((0, 1, 5, 5, 3000))
    if count > 5:
        return {"enum": [f"{chance.getrandbits(30):x}" for _ in range(count)]}
    return {"enum": [some_value(chance, 1) for _ in range(count)]}


def _combined(chance: Random, depth: int) -> dict[str, Any]:
    parts = [schema(chance, depth) for _ in range(chance.choice((0, 1, 2, 3)))]
    return {chance.choice(("anyOf", "oneOf", "allOf", "not", "prefixItems")): parts}


def _reference(chance: Random, depth: int) -> dict[str, Any]:
    defined = {name: schema(chance, depth) for name in ("a", "b") if chance.random() < 0.7}
    return {"$ref": chance.choice(REFS), "$defs": defined}


def _odd(chance: Random, _: int) -> dict[str, Any]:
    keys = (
        "x-guidance",
        "$id",
        "$schema",
        "if",
        "uniqueItems",
        "patternProperties",
        "const",
        "type",
    )
    return {chance.choice(keys): chance.choice((some_value(chance), chance.choice(TYPES)))}


_KEYWORDS = (_object, _object, _array, _text, _number, _enum, _combined, _reference, _odd)


def text_of_schema(chance: Random) -> str:
    """Return a schema in the form of a request."""
    kind, made = chance.random(), schema(chance)
    if kind < 0.1:
        deep = chance.choice(('{"items":', '{"anyOf":[', '{"not":', '{"properties":{"a":'))
        return deep * chance.choice((30, 300, 5000))
    if kind < 0.15:
        for _ in range(chance.choice((20, 60, 200))):
            made = {"items": made, "type": "array"}
    if kind < 0.3:
        made = changed_json(made, chance)
    text = json_text(made, chance)
    if kind > 0.95:
        text = mutated(text.encode("utf-8", "replace"), chance).decode("utf-8", "replace")
    return text.encode("utf-8", "replace").decode()  # protobuf does not support single surrogates


class _Compiler:
    def __init__(self, folder: Path) -> None:
        tokenizer = TextTokenizer(build_tiny_checkpoint(folder / "tiny") / "tokenizer.json")
        self._vocab_size = tokenizer.num_tokens
        self._compiler = GrammarCompiler(tokenizer, self._vocab_size)
        self._stops = (self._vocab_size - 1,)

    def try_one(self, chance: Random) -> None:
        text = text_of_schema(chance)
        try:
            check_json_schema(text)
            self._follow(text, chance)
        except RequestError as error:
            if "\n" in str(error):
                raise InvariantError(f"an error of several lines: {error}") from error

    def _follow(self, text: str, chance: Random) -> None:
        """Write a document token by token, with tokens that the mask allows."""
        matcher = self._compiler.compile(text)
        words = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        written: list[int] = []
        for _ in range(STEPS):
            matcher.fill(words, self._stops, may_stop=True)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            token = chance.choice(np.flatnonzero(bits).tolist())
            if token in self._stops:
                return
            written.append(token)
            matcher.advance(written)


@contextmanager
def _opened(folder: Path) -> Iterator[Case]:
    yield _Compiler(folder).try_one


SCHEMAS = Target("schemas", _opened)
