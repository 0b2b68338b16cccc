"""Structured output over a real connection: documents that parse, and schemas that are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.fakes import tiny_config, wait_until_idle
from tests.tts.server.test_text_service import generation, pieces, whole
from tests.tts.serving import Serving, error_of, fields_of, run_with_server
from tts.factory import Service, create_service
from tts.v1 import common_pb2, speech_pb2
from tts.v1 import text_pb2 as pb

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"mood": {"enum": ["glad", "très triste"]}, "ok": {"type": "boolean"}},
        "required": ["mood", "ok"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def bound_service(text_checkpoint: Path) -> Iterator[Service]:
    config = tiny_config(text_checkpoint, sampling={"enable_structured_output": True})
    service = create_service(config)
    yield service
    asyncio.run(wait_until_idle(service.client))
    asyncio.run(service.client.close())


def bound(schema: str = SCHEMA, **values: Any) -> dict[str, Any]:
    return {"json_schema": schema, "max_tokens": 200, **values}


def test_a_document_fits_its_schema(bound_service: Service) -> None:
    async def ask(served: Serving) -> None:
        for seed in range(4):
            response = await whole(served, **bound(seed=seed))
            found = json.loads(response.text)
            assert set(found) == {"mood", "ok"}
            assert found["mood"] in {"glad", "très triste"}
            assert response.finish_reason == common_pb2.FINISH_REASON_STOP
        streamed = await pieces(served, **bound(seed=3))
        assert "".join(event.delta.text for event in streamed) == response.text

    run_with_server(bound_service, ask)


def test_constrained_and_free_requests_are_independent(bound_service: Service) -> None:
    async def ask(served: Serving) -> None:
        free, document = await whole(served), await whole(served, **bound())
        both = await asyncio.gather(whole(served), whole(served, **bound()), whole(served, seed=9))
        assert [both[0].token_ids, both[1].token_ids] == [free.token_ids, document.token_ids]

    run_with_server(bound_service, ask)


def test_server_info_lists_structured_output(bound_service: Service) -> None:
    async def ask(served: Serving) -> None:
        (model,) = (await served.speech.GetServerInfo(speech_pb2.GetServerInfoRequest())).models
        assert (model.text_generation, model.structured_output, model.echo) == (True, True, False)

    run_with_server(bound_service, ask)


def test_an_invalid_schema_is_refused_without_other_effects(bound_service: Service) -> None:
    async def ask(served: Serving) -> None:
        for schema in ("{", '{"type": "nope"}', '{"$ref": "http://localhost/"}', " " * 70_000):
            request = pb.GenerateRequest(**generation(**bound(schema)))
            good, error = await asyncio.gather(
                whole(served, **bound()), error_of(served.text.Generate(request))
            )
            assert fields_of(error) == ["config.json_schema"]
            assert json.loads(good.text)

    run_with_server(bound_service, ask)


LOOP = {"$ref": "#/properties/again"}
DEAD_ENDS = [
    '{"$ref": "#"}',
    json.dumps({"type": "object", "properties": {"again": LOOP}, "required": ["again"]}),
]


@pytest.mark.parametrize("schema", DEAD_ENDS, ids=["at the start", "inside"])
def test_a_schema_without_a_document_is_an_invalid_argument(
    bound_service: Service, schema: str
) -> None:
    async def ask(served: Serving) -> None:
        request = pb.GenerateRequest(**generation(**bound(schema)))
        error = await error_of(served.text.Generate(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fields_of(error) == ["config.json_schema"]
        assert json.loads((await whole(served, **bound())).text)

    run_with_server(bound_service, ask)


def test_a_server_without_structured_output_refuses_schemas(service: Service) -> None:
    async def ask(served: Serving) -> None:
        error = await error_of(served.text.Generate(pb.GenerateRequest(**generation(**bound()))))
        assert fields_of(error) == ["config.json_schema"]
        assert "enable_structured_output" in error.details()

    run_with_server(service, ask)
