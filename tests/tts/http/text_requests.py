"""Requests for text over HTTP and the same ones over gRPC, for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.fakes import tiny_config, wait_until_idle
from tests.tts.http.http_serving import HttpServing
from tests.tts.server.test_text_service import generation
from tts.factory import Service, create_service
from tts.v1 import text_pb2 as pb

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
PROMPT = "once upon a time"
USER = [{"role": "user", "content": PROMPT}]
SHORT = {"seed": 5, "max_tokens": 24}

REASONS = {1: "stop", 2: "length"}


def loaded(folder: Path, **values: Any) -> Iterator[Service]:
    """Yield the service of a checkpoint, for a fixture."""
    service = create_service(tiny_config(folder, **values))
    yield service
    asyncio.run(wait_until_idle(service.client))
    asyncio.run(service.client.close())


async def chat(served: HttpServing, **values: Any) -> httpx.Response:
    return await served.client.post(CHAT, json={"messages": USER, **SHORT, **values})


async def complete(served: HttpServing, **values: Any) -> httpx.Response:
    return await served.client.post(COMPLETIONS, json={"prompt": PROMPT, **SHORT, **values})


def choice_of(response: httpx.Response) -> dict[str, Any]:
    """Return the only choice of a whole response."""
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["index"] == 0
    return choice


def text_of(response: httpx.Response) -> str:
    """Return the text of a whole response of either kind."""
    choice = choice_of(response)
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a streamed response, which ends with [DONE]."""
    assert response.headers["content-type"] == "text/event-stream"
    *parts, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def over_grpc(served: HttpServing, **values: Any) -> pb.GenerateResponse:
    """Return the text of gRPC for the prompt, or for the fields of `generation`."""
    request = pb.GenerateRequest(**generation(**values))
    return await served.grpc.text.Generate(request)


async def chat_over_grpc(served: HttpServing, **values: Any) -> pb.GenerateResponse:
    return await over_grpc(served, chat=[(pb.CHAT_ROLE_USER, PROMPT)], **values)
