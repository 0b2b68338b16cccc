"""Random schemas, random walks through their masks: the results parse and match."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm import RequestError, check_json_schema
from llm.structured.grammar import GrammarCompiler
from tests.llm.structured.test_structured import BYTES, STOPS, VOCAB_SIZE, is_valid

MAX_STEPS = 2_000

scalars = st.none() | st.booleans() | st.integers(-99, 99) | st.text('aé"\\\n🙂', max_size=3)
leaves = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}]),
    st.lists(scalars, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    scalars.map(lambda value: {"const": value}),
    st.tuples(st.integers(-50, 50), st.integers(0, 200)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}
    ),
)


def _array(parts: tuple[dict[str, Any], int, int]) -> dict[str, Any]:
    items, least, more = parts
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + more}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(_array),
        st.dictionaries(st.text('abé "', min_size=1, max_size=3), inner, max_size=3).map(_object),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


@example(
    schema={
        "anyOf": [
            {
                "type": "object",
                "properties": {"a": {"const": None}},
                "required": ["a"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {},
                "required": [],
                "additionalProperties": False,
            },
        ]
    },
    seed=73,
)
@given(schema=schemas, seed=st.integers(0, 2**16))
@settings(max_examples=40)
def test_any_walk_through_the_masks_fits(schema: dict[str, Any], seed: int) -> None:
    text = json.dumps(schema)
    check_json_schema(text)
    matcher = GrammarCompiler(BYTES, VOCAB_SIZE).compile(text)
    chance, words = random.Random(seed), np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    outputs: list[int] = []
    for _ in range(MAX_STEPS):
        matcher.fill(words, STOPS, may_stop=True)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        token = chance.choice(np.flatnonzero(bits).tolist())
        if token in STOPS:
            break
        outputs.append(token)
        matcher.advance(outputs)
    assert is_valid(json.loads(bytes(outputs)), schema), bytes(outputs)


@given(value=scalars | st.lists(scalars, max_size=2), schema=schemas)
@settings(max_examples=40)
def test_matching_documents_can_be_written(value: Any, schema: dict[str, Any]) -> None:
    """A document that matches another branch of the schema is never masked."""
    both = json.dumps({"anyOf": [schema, {"const": value}]})
    matcher = GrammarCompiler(BYTES, VOCAB_SIZE).compile(both)
    words = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    document = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    for place in range(len(document)):
        matcher.advance(list(document[: place + 1]))
    matcher.fill(words, STOPS, may_stop=True)
    assert words.view(np.uint32)[STOPS[0] // 32] >> (STOPS[0] % 32) & 1


@given(text=st.text('{}[]:,"$reftypobjcanm0 ', max_size=40))
@settings(max_examples=100)
def test_no_text_does_more_than_be_refused(text: str) -> None:
    refusal = "json_schema"
    try:
        check_json_schema(text)
    except RequestError as error:
        refusal = str(error)
    assert refusal.startswith("json_schema")
    assert "\n" not in refusal


@pytest.mark.parametrize(
    "schema",
    [
        {"x-guidance": {"nope": 5}},
        {"uniqueItems": True, "type": "array"},
        {"not": {"type": "string"}},
        {"type": "string", "pattern": "(?=a)b"},
        {"$ref": "#/$defs/absent"},
    ],
    ids=str,
)
def test_unsupported_constraints_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="json_schema"):
        check_json_schema(json.dumps(schema))


@pytest.mark.parametrize("number", [-(2**63), 512 - 2**63, -(2**63) - 1, -(2**64), -1e38, -1e300])
def test_values_that_end_the_library_are_refused(number: float) -> None:
    """Where one stands for an integer the library runs out of stack."""
    for schema in (
        {"const": number},
        {"type": "integer", "const": number},
        {"anyOf": [{"enum": ["a", {"b": [number]}]}]},
        {"$ref": "#/$defs/b", "$defs": {"b": {"const": number}}, "type": "integer", "maximum": 0},
        {"type": "integer", "minimum": number, "maximum": number},
        {"type": "integer", "exclusiveMinimum": 2 * number, "exclusiveMaximum": number},
        {"type": "integer", "allOf": [{"minimum": 2 * number}, {"maximum": number}]},
    ):
        with pytest.raises(RequestError, match=r"json_schema: -.* is too small"):
            check_json_schema(json.dumps(schema))


@pytest.mark.parametrize("number", [513 - 2**63, 2**63 - 1, 2**64, 1e300])
def test_other_large_values_are_taken(number: float) -> None:
    check_json_schema(json.dumps({"const": number}))
    check_json_schema(json.dumps({"type": "integer", "const": number}))
