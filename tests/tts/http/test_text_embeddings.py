"""POST /v1/embeddings: the vectors of gRPC as numbers and in base64, and refused requests."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.fakes import build_embedding_checkpoint
from tests.llm.lora.adapters import write_adapter
from tests.tts.http.http_serving import HttpServing, error_of, run_with_http
from tests.tts.http.text_requests import EMBEDDINGS, chat, complete, loaded
from tts.factory import Service
from tts.v1 import text_pb2 as pb

TEXTS = ["a cat", "one longer text about something else", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_embedding_checkpoint(tmp_path_factory.mktemp("models") / "embeds")


@pytest.fixture(scope="module")
def embedding(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """An embedding model with an adapter."""
    adapter = write_adapter(tmp_path_factory.mktemp("lora") / "one", folder, gain=1.0)
    lora = {"enable_lora": True, "lora_paths": [f"one={adapter}"]}
    yield from loaded(folder, lora=lora)


async def embed(served: HttpServing, **values: Any) -> httpx.Response:
    return await served.client.post(EMBEDDINGS, json={"input": TEXTS, **values})


def vectors_of(response: httpx.Response) -> list[Any]:
    """Return the vectors of a response in their order."""
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    assert {item["object"] for item in data} == {"embedding"}
    return [item["embedding"] for item in data]


def test_vectors_are_those_of_grpc(embedding: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await embed(served)
        expected = await served.grpc.text.Embed(pb.EmbedRequest(inputs=TEXTS))
        assert vectors_of(response) == [list(item.values) for item in expected.embeddings]
        body = response.json()
        assert (body["object"], body["model"]) == ("list", embedding.model)
        num_tokens = sum(map(len, TEXTS))
        assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}

    run_with_http(embedding, ask)


def test_base64_holds_the_same_numbers(embedding: Service) -> None:
    async def ask(served: HttpServing) -> None:
        numbers = np.array(vectors_of(await embed(served)), dtype=np.float32)
        packed = vectors_of(await embed(served, encoding_format="base64"))
        found = [np.frombuffer(base64.b64decode(item), dtype="<f4") for item in packed]
        assert np.array_equal(np.array(found), numbers)

    run_with_http(embedding, ask)


def test_one_text_and_an_adapter(embedding: Service) -> None:
    async def ask(served: HttpServing) -> None:
        (plain,) = vectors_of(await embed(served, input=TEXTS[0], model=embedding.model, user="a"))
        own = await embed(served, input=TEXTS[0], model="one")
        request = pb.EmbedRequest(inputs=TEXTS[:1], lora="one")
        expected = (await served.grpc.text.Embed(request)).embeddings[0].values
        assert vectors_of(own) == [list(expected)]
        assert own.json()["model"] == "one"
        assert vectors_of(own) != [plain]

    run_with_http(embedding, ask)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": ""}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": ["ok", "a\0b"]}, "input[1]"),
        ({"input": ["x"] * 257}, "input"),
        ({"input": ["x" * 2001]}, "input[0]"),
        ({"input": [1, 2]}, "input"),
        ({"input": [[1], [2]]}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 8}, "dimensions"),
    ],
)
def test_wrong_fields_are_named(embedding: Service, values: dict[str, Any], param: str) -> None:
    async def ask(served: HttpServing) -> None:
        response = await embed(served, **values)
        assert response.status_code == 400
        assert error_of(response)["param"] == param
        assert error_of(response)["message"].startswith(param)

    run_with_http(embedding, ask, max_stream_characters=2_000)


def test_unknown_models_are_not_found(embedding: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await embed(served, model="text-embedding-9")
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"

    run_with_http(embedding, ask)


def test_an_embedding_model_neither_chats_nor_completes(embedding: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for response in (await chat(served), await complete(served)):
            assert response.status_code == 400
            assert error_of(response)["code"] == "text_generation_unavailable"

    run_with_http(embedding, ask)


def test_other_models_do_not_embed(service: Service, text_checkpoint: Path) -> None:
    async def ask(served: HttpServing) -> None:
        response = await embed(served)
        assert response.status_code == 400
        assert error_of(response)["code"] == "embedding_unavailable"

    run_with_http(service, ask)
    for texts in loaded(text_checkpoint):
        run_with_http(texts, ask)


def test_vectors_of_tokens_need_grpc(folder: Path) -> None:
    async def ask(served: HttpServing) -> None:
        response = await embed(served)
        assert response.status_code == 400
        assert "pool_embeddings" in error_of(response)["message"]

    for by_token in loaded(folder, pool_embeddings=False):
        run_with_http(by_token, ask)
