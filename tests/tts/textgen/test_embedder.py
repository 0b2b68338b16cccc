"""`Embed` over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.closeness import error
from tests.fakes import build_embedding_checkpoint, tiny_config, wait_until_idle
from tests.llm.lora.adapters import merge, write_adapter
from tests.tts.server.test_text_service import generation
from tests.tts.serving import Serving, error_of, fields_of, reason_of, run_with_server
from tts.factory import Service, create_service
from tts.v1 import speech_pb2
from tts.v1 import text_pb2 as pb

TEXTS = ["a cat", "one longer text about something else", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_embedding_checkpoint(tmp_path_factory.mktemp("models") / "embeds")


def served_by(folder: Path, **values: Any) -> Iterator[Service]:
    service = create_service(tiny_config(folder, **values))
    yield service
    asyncio.run(wait_until_idle(service.client))
    asyncio.run(service.client.close())


@pytest.fixture(scope="module")
def embedding(folder: Path) -> Iterator[Service]:
    yield from served_by(folder)


@pytest.fixture(scope="module")
def by_token(folder: Path) -> Iterator[Service]:
    yield from served_by(folder, pool_embeddings=False)


def test_server_info_lists_embedding_without_generation(embedding: Service) -> None:
    async def ask(served: Serving) -> None:
        info = await served.speech.GetServerInfo(speech_pb2.GetServerInfoRequest())
        (model,) = info.models
        assert model.embeddings
        assert not any((model.text_generation, model.echo, model.structured_output))

    run_with_server(embedding, ask)


def test_each_input_has_one_vector(embedding: Service, by_token: Service) -> None:
    async def ask(served: Serving) -> pb.EmbedResponse:
        response = await served.text.Embed(pb.EmbedRequest(inputs=TEXTS))
        assert response.usage.prompt_tokens == sum(map(len, TEXTS))
        assert response.usage.input_characters == sum(map(len, TEXTS))
        alone = await served.text.Embed(pb.EmbedRequest(inputs=TEXTS[:1]))
        assert alone.embeddings[0].values == response.embeddings[0].values
        return response

    pooled = run_with_server(embedding, ask).embeddings
    assert [item.input for item in pooled] == [0, 1, 2]
    assert not any(item.HasField("token_id") for item in pooled)
    assert [float(np.linalg.norm(item.values)) for item in pooled] == pytest.approx([1, 1, 1])
    tokens = run_with_server(by_token, ask).embeddings
    assert [item.input for item in tokens] == [i for i, t in enumerate(TEXTS) for _ in t]
    assert bytes(item.token_id for item in tokens) == "".join(TEXTS).encode()
    assert {len(item.values) for item in tokens} == {len(pooled[0].values)} == {64}
    # Of the largest number; float32 sums in another order differ by 1e-6.
    assert error(tokens[-1].values, pooled[2].values) < 1e-5


def test_adapters_change_the_vectors(folder: Path, tmp_path: Path) -> None:
    """The vectors equal those of the model with the adapter's weights merged."""
    adapter = write_adapter(tmp_path / "one", folder, gain=1.0)
    merged = merge(folder, adapter, tmp_path / "merged")
    lora = {"enable_lora": True, "lora_paths": [f"one={adapter}"]}

    async def ask(served: Serving) -> list[np.ndarray]:
        adapters = ("", "one", "") if served.server.host.service.text.adapters else ("",)
        requests = (pb.EmbedRequest(inputs=TEXTS[:1], lora=name) for name in adapters)
        answers = await asyncio.gather(*map(served.text.Embed, requests))
        return [np.array(answer.embeddings[0].values) for answer in answers]

    for adapted in served_by(folder, lora=lora):
        plain, own, again = run_with_server(adapted, ask)
    for service in served_by(merged):
        (expected,) = run_with_server(service, ask)
    assert np.array_equal(plain, again)
    # Of vectors of length 1: float32 rounds the sums of merged weights in another way.
    assert np.linalg.norm(own - expected) < 1e-4
    assert np.linalg.norm(own - plain) > 0.05


def test_wrong_inputs_are_named(embedding: Service) -> None:
    async def ask(served: Serving) -> None:
        for inputs, fields in (
            ([], ["inputs"]),
            (["x"] * 257, ["inputs"]),
            (["ok", "", "a\0b"], ["inputs[1]", "inputs[2]"]),
            (["x" * 2001], ["inputs[0]"]),
        ):
            error = await error_of(served.text.Embed(pb.EmbedRequest(inputs=inputs)))
            assert fields_of(error) == fields
        long = await error_of(served.text.Embed(pb.EmbedRequest(inputs=["ok", "x" * 1500])))
        assert long.code() is grpc.StatusCode.INVALID_ARGUMENT, "the context has fewer tokens"
        unknown = await error_of(served.text.Embed(pb.EmbedRequest(inputs=["x"], lora="no")))
        assert reason_of(unknown) == "ADAPTER_NOT_FOUND"
        assert (await served.text.Embed(pb.EmbedRequest(inputs=["ok"]))).embeddings

    run_with_server(embedding, ask, max_stream_characters=2_000)


def test_an_embedding_model_refuses_generation(embedding: Service) -> None:
    async def ask(served: Serving) -> None:
        error = await error_of(served.text.Generate(pb.GenerateRequest(**generation())))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(error) == "TEXT_GENERATION_UNAVAILABLE"

    run_with_server(embedding, ask)
