"""Structured output: masks equal the grammar, and outputs parse under their schema."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llm import Engine, FinishReason, Request, RequestError, TokenChunk, check_json_schema
from llm.batch import ScheduledRow
from llm.config import PipelineConfig
from llm.engine.engine import create_engine
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import SamplingParams
from llm.sampling.logits import TokenMask
from llm.structured.bitmask import StructuredOutput
from llm.structured.grammar import MAX_SCHEMA_CHARACTERS, GrammarCompiler
from tests.fakes import build_text_checkpoint
from tests.llm.llama_checkpoints import pipeline_config, row
from tests.vocabulary import END_OF_SPEECH, END_OF_TEXT

VOCAB_SIZE = 400  # bytes, then ids without a spelling
STOPS = (300, 301)
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "null": type(None),
}

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 999},
        "name": {"enum": ["north", "süd"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["x", "name", "tags"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    POINT,
    {"enum": [1, 2, "three"]},
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "null"}, {"const": {"a": [True]}}]},
    {"type": "string", "pattern": "^[a-f]{2,6}$"},
]


class Spelling:
    """Some tokens, then ids without a spelling; encodes a text byte by byte."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens

    def all_token_bytes(self) -> Sequence[bytes]:
        return self._tokens

    def encode(self, text: str, /) -> list[int]:
        return list(text.encode())


BYTES = Spelling([bytes([value]) for value in range(256)])


def schema_row(schema: object, output_ids: Sequence[int] = (), **values: Any) -> ScheduledRow:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    sampling = SamplingParams(json_schema=text, stop_token_ids=STOPS, **values)
    return row([1], [1], sampling=sampling, output_ids=output_ids, request_id=text)


@pytest.fixture
def structured() -> StructuredOutput:
    return StructuredOutput(VOCAB_SIZE, torch.device("cpu"), BYTES, enabled=True)


def allowed(structured: StructuredOutput, asked: ScheduledRow) -> set[int]:
    bitmask = structured.initialize_bitmask([asked])
    assert bitmask is not None
    structured.update_for_structured_output(asked, bitmask, 0)
    return set(np.flatnonzero(bitmask[0]).tolist())


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Validate the part of JSON Schema that `SCHEMAS` use, without the library under test."""
    checks: dict[str, Callable[[], bool]] = {
        "enum": lambda: value in schema["enum"],
        "const": lambda: value == schema["const"],
        "anyOf": lambda: any(is_valid(value, option) for option in schema["anyOf"]),
        "minimum": lambda: value >= schema["minimum"],
        "maximum": lambda: value <= schema["maximum"],
        "pattern": lambda: re.search(schema["pattern"], value) is not None,
        "minLength": lambda: len(value) >= schema["minLength"],
        "maxLength": lambda: len(value) <= schema["maxLength"],
        "minItems": lambda: len(value) >= schema["minItems"],
        "maxItems": lambda: len(value) <= schema["maxItems"],
        "items": lambda: all(is_valid(item, schema["items"]) for item in value),
        "properties": lambda: all(
            k not in value or is_valid(value[k], s) for k, s in schema["properties"].items()
        ),
        "required": lambda: set(value) == set(schema["required"]),
        "type": lambda: isinstance(value, TYPES[schema["type"]]),
        "additionalProperties": lambda: set(value) <= set(schema["properties"]),
    }
    return all(checks[key]() for key in schema)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: next(iter(schema.values())))
def test_documents_that_follow_the_mask_parse(
    structured: StructuredOutput, schema: dict[str, Any]
) -> None:
    """Walk at random through the masks until a stop id is picked."""
    for seed in range(25):
        chance, outputs = random.Random(seed), []
        structured.release(json.dumps(schema))
        while True:
            choices = allowed(structured, schema_row(schema, outputs))
            assert choices
            token = chance.choice(sorted(choices))
            if token in STOPS:
                break
            outputs.append(token)
        assert is_valid(json.loads(bytes(outputs)), schema)


def test_a_mask_has_exactly_the_allowed_tokens(structured: StructuredOutput) -> None:
    asked = {"enum": ["ab", "ac"]}
    assert allowed(structured, schema_row(asked)) == {ord('"')}
    assert allowed(structured, schema_row(asked, list(b'"a'))) == {ord("b"), ord("c")}
    assert allowed(structured, schema_row(asked, list(b'"ab'))) == {ord('"')}
    assert allowed(structured, schema_row(asked, list(b'"ab"'))) == set(STOPS)


def test_stop_ids_wait_for_the_minimum_unless_nothing_else_fits(
    structured: StructuredOutput,
) -> None:
    asked = {"type": "integer"}
    digits = set(b"0123456789")
    free = schema_row(asked, list(b"12"))
    assert digits | set(STOPS) <= allowed(structured, free)
    structured.release(free.request_id)
    assert not set(STOPS) & allowed(structured, schema_row(asked, list(b"12"), min_tokens=5))
    exhausted = schema_row({"const": 7}, list(b"7"), min_tokens=5)
    assert allowed(structured, exhausted) == set(STOPS)


def test_rows_without_a_schema_stay_free(structured: StructuredOutput) -> None:
    free, bound = row([1], [1]), schema_row({"const": 7})
    assert structured.initialize_bitmask([free, free]) is None
    assert structured.mask([free, free]).tokens is None
    bitmask = structured.initialize_bitmask([free, bound])
    assert bitmask is not None
    assert (bitmask.shape, bitmask.dtype) == ((2, VOCAB_SIZE), np.int32)
    structured.update_for_structured_output(free, bitmask, 0)
    structured.update_for_structured_output(bound, bitmask, 1)
    assert bitmask[0].all()
    assert np.flatnonzero(bitmask[1]).tolist() == [ord("7")]
    mask = structured.mask([free, bound]).tokens
    assert mask is not None
    logits = torch.randn(2, VOCAB_SIZE)
    before = logits.clone()
    mask.apply_(logits)
    assert torch.equal(logits[0], before[0])
    assert logits[1].isfinite().nonzero().flatten().tolist() == [ord("7")]
    assert logits[1, ord("7")] == before[1, ord("7")]


def test_every_bit_of_a_word_counts() -> None:
    """Also the sign bit, and a vocabulary that ends inside a word."""
    words = np.array([[-(2**31), 1, 0], [5, -1, 2**6]], dtype=np.int64).astype(np.int32)
    logits = torch.zeros(3, 71)
    TokenMask(torch.tensor([2, 0]), torch.from_numpy(words)).apply_(logits)
    assert logits[2].isfinite().nonzero().flatten().tolist() == [31, 32]
    assert logits[0].isfinite().nonzero().flatten().tolist() == [0, 2, *range(32, 64), 70]
    assert logits[1].isfinite().all()


def test_the_second_call_uses_the_same_matcher(structured: StructuredOutput) -> None:
    asked = {"const": 77}
    assert allowed(structured, schema_row(asked)) == allowed(structured, schema_row(asked))
    assert structured.num_matchers == 1
    assert allowed(structured, schema_row(asked, [ord("7")])) == {ord("7")}
    structured.release(schema_row(asked).request_id)
    structured.release(schema_row(asked).request_id)
    assert structured.num_matchers == 0


BROKEN = [
    "",
    "{",
    "[1]",
    '{"type": "nope"}',
    '{"$ref": "https://example.com/x.json"}',
    "{}" * 40_000,
]


@pytest.mark.parametrize("schema", BROKEN, ids=lambda text: text[:8] or "empty")
def test_schemas_that_are_none(schema: str) -> None:
    with pytest.raises(RequestError, match="json_schema"):
        check_json_schema(schema)
    with pytest.raises(RequestError, match="json_schema"):
        GrammarCompiler(BYTES, VOCAB_SIZE).compile(schema)


ENDLESS = [
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/%24defs/a"}}},
    {"$id": "http://example.com/own", "$ref": "own"},
    {"$anchor": "own", "$ref": "#own"},
    {"allOf": [{"oneOf": [{"$ref": "#/allOf/0"}]}]},
]


@pytest.mark.parametrize("schema", ENDLESS, ids=json.dumps)
def test_schemas_that_only_refer_to_themselves(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="no document fits it"):
        check_json_schema(json.dumps(schema))


RECURSIVE = [
    {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "object", "properties": {"next": {"$ref": "#"}}},
]


@pytest.mark.parametrize("schema", RECURSIVE, ids=json.dumps)
def test_schemas_may_refer_to_themselves_elsewhere(schema: dict[str, Any]) -> None:
    check_json_schema(json.dumps(schema))


def test_schemas_have_a_length() -> None:
    with pytest.raises(RequestError, match=str(MAX_SCHEMA_CHARACTERS)):
        check_json_schema(" " * (MAX_SCHEMA_CHARACTERS + 1))
    for schema in SCHEMAS:
        check_json_schema(json.dumps(schema))


def test_a_schema_while_the_feature_is_off_is_an_error() -> None:
    off = StructuredOutput(VOCAB_SIZE, torch.device("cpu"), BYTES)
    bitmask = np.ones((1, VOCAB_SIZE), dtype=np.int32)
    with pytest.raises(ValueError, match="enable_structured_output"):
        off.update_for_structured_output(schema_row(POINT), bitmask, 0)
    with pytest.raises(ValueError, match="model's tokenizer"):
        StructuredOutput(VOCAB_SIZE, torch.device("cpu"), None, enabled=True)


def test_a_vocabulary_that_cannot_write_the_document(structured: StructuredOutput) -> None:
    letters = StructuredOutput(
        VOCAB_SIZE, torch.device("cpu"), Spelling([b"a", b"b", b'"']), enabled=True
    )
    found = letters.mask([schema_row({"const": 7})])
    assert list(found.failures.values()) == [
        "json_schema: no token of this model continues the document"
    ]
    matcher = GrammarCompiler(BYTES, VOCAB_SIZE).compile('{"const": 7}')
    with pytest.raises(RequestError, match="json_schema"):
        matcher.advance([ord("8")])


@pytest.mark.parametrize(
    "values", [{"allowed_ranges": ((1, 5),)}, {"ignore_eos": True}], ids=["ranges", "ignore_eos"]
)
def test_conflicts_with_a_schema(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="json_schema"):
        SamplingParams(json_schema="{}", **values)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_text_checkpoint(tmp_path_factory.mktemp("structured"))


def config(checkpoint: Path, **values: Any) -> PipelineConfig:
    return pipeline_config(checkpoint, sampling={"enable_structured_output": True}, **values)


def requests() -> list[Request]:
    """Return free and constrained requests, greedy and sampled."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.01, "temperature": 1.3},
        {"repetition_penalty": 1.2},
    ]
    found = []
    for index, way in enumerate(ways):
        shared = {"seed": index, "max_tokens": 60, "stop_token_ids": (END_OF_TEXT,), **way}
        schema = json.dumps(SCHEMAS[index])
        prompt = tuple(f"prompt {index}".encode())
        found.append(Request(f"free{index}", prompt, SamplingParams(**shared)))
        bound = SamplingParams(**{**shared, "max_tokens": 180}, json_schema=schema)
        found.append(Request(f"bound{index}", prompt, bound))
    return found


def finish(engine: Engine, asked: Sequence[Request]) -> dict[str, list[TokenChunk]]:
    """Run all requests at once."""
    streams = [engine.submit(request) for request in asked]
    if not engine.is_running:
        engine.start()
    return {stream.request_id: list(stream) for stream in streams}


def tokens(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def test_constrained_and_free_requests_share_batches(checkpoint: Path) -> None:
    """Alone, all together, short of pages: the same tokens."""
    asked = requests()
    engine = create_engine(config(checkpoint), BYTES)
    together = {name: tokens(chunks) for name, chunks in finish(engine, asked).items()}
    for request in asked:
        assert tokens(finish(engine, [request])[request.request_id]) == together[request.request_id]
    assert isinstance(engine.pipeline, TextGenerationPipeline)
    assert engine.pipeline.structured.num_matchers == 0
    engine.shutdown()
    small = config(checkpoint, num_pages=26, page_size=4, max_length=100)
    engine = create_engine(small, BYTES)
    assert {n: tokens(c) for n, c in finish(engine, asked).items()} == together
    assert engine.stats().preemptions > 0
    engine.shutdown()
    free = create_engine(pipeline_config(checkpoint))
    alone = [request for request in asked if not request.sampling.json_schema]
    for name, chunks in finish(free, alone).items():
        assert tokens(chunks) == together[name]
    free.shutdown()
    for index, schema in enumerate(SCHEMAS):
        text = bytes(together[f"bound{index}"])
        assert is_valid(json.loads(text), schema), text


def test_a_wrong_schema_fails_its_request_only(checkpoint: Path) -> None:
    engine = create_engine(config(checkpoint), BYTES)
    good = requests()[:2]
    expected = {name: tokens(chunks) for name, chunks in finish(engine, good).items()}
    wrong = Request("wrong", (1, 2), SamplingParams(json_schema='{"type": "nope"}'))
    with pytest.raises(RequestError, match="Invalid type: nope"):
        engine.submit(wrong)
    streams = [engine.submit(request) for request in good]
    assert {s.request_id: tokens(list(s)) for s in streams} == expected
    engine.shutdown()


def test_a_grammar_that_breaks_while_it_runs_fails_its_request_only(checkpoint: Path) -> None:
    """The model has no token for a digit, which is detected when one is needed."""
    engine = create_engine(config(checkpoint), Spelling([b"a"] * 256))
    free, bound = requests()[:2]
    chunks = finish(engine, [free, bound])
    (last,) = chunks[bound.request_id]
    assert last.finish_reason is FinishReason.ERROR
    assert "no token of this model continues" in last.error
    assert chunks[free.request_id][-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    engine.shutdown()


def test_stop_ids_are_needed(checkpoint: Path) -> None:
    pipeline = TextGenerationPipeline(config(checkpoint), tokenizer=BYTES)
    sampling = SamplingParams(json_schema="{}")
    with pytest.raises(RequestError, match="stop id"):
        pipeline.admit(Request("a", (1,), sampling))
    with pytest.raises(ValueError, match="model's tokenizer"):
        TextGenerationPipeline(config(checkpoint))
    assert {END_OF_SPEECH, END_OF_TEXT} == set(pipeline.eos_token_ids)


def test_white_space_is_that_of_printers(structured: StructuredOutput) -> None:
    """The output of json.dumps matches; a second blank after the first does not."""
    value = {"x": 7, "name": "süd", "tags": [True, False]}
    for indent in (None, 0, 2, 8, "\t"):
        structured.release(json.dumps(POINT))
        document = json.dumps(value, indent=indent, ensure_ascii=False).encode()
        for place, byte in enumerate(document):
            assert byte in allowed(structured, schema_row(POINT, list(document[:place])))
        assert set(STOPS) == allowed(structured, schema_row(POINT, list(document)))
    structured.release(json.dumps(POINT))
    assert ord(" ") not in allowed(structured, schema_row(POINT, list(b"{ ")))
