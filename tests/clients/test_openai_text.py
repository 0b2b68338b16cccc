"""OpenAI's Python package against this server: SmolLM2 chats, and a small model embeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.fakes import build_embedding_checkpoint
from tests.speech_server import serving
from tts.v1 import common_pb2
from tts.v1 import text_pb2 as pb
from tts.v1.text_pb2_grpc import TextServiceStub

pytestmark = pytest.mark.timeout(900)  # minutes on a busy machine, for seconds of work

QUESTION = "What is the capital of France? Answer in one short sentence."
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
FLAGS = ["--http-port", "0", "--offline"]
CALL_S = 600


@dataclass(frozen=True)
class Model:
    """A served model, with OpenAI's client of it and with ours over gRPC."""

    name: str
    client: openai.OpenAI
    text: TextServiceStub

    def over_grpc(self, source: pb.GenerationInput, **sampling: Any) -> pb.GenerateResponse:
        params = common_pb2.SamplingParams(**sampling)
        config = pb.GenerationConfig(sampling=params)
        return self.text.Generate(pb.GenerateRequest(config=config, input=source), timeout=CALL_S)

    def chat_over_grpc(self, **sampling: Any) -> pb.GenerateResponse:
        message = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=QUESTION)
        chat = pb.ChatMessages(messages=[message])
        return self.over_grpc(pb.GenerationInput(chat=chat), **sampling)


def served(folder: Path, *flags: str) -> Iterator[Model]:
    with (
        serving(str(folder), [*FLAGS, *flags]) as server,
        grpc.insecure_channel(server.address) as channel,
        openai.OpenAI(
            base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=CALL_S
        ) as client,
    ):
        yield Model(folder.name, client, TextServiceStub(channel))


@pytest.fixture(scope="module")
def smollm2(folder: Path) -> Iterator[Model]:
    flags = ["--model.quantization-encoding", "float32", "--sampling.enable-structured-output"]
    yield from served(folder, *flags)


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A small embedding model with random weights."""
    folder = build_embedding_checkpoint(tmp_path_factory.mktemp("models") / "embeds")
    yield from served(folder, "--model.kv-cache.num-pages", "64")


def test_a_chat(smollm2: Model) -> None:
    answer = smollm2.client.chat.completions.create(
        model=smollm2.name, messages=MESSAGES, temperature=0, user="ann", store=False
    )
    expected = smollm2.chat_over_grpc(temperature=0.0)
    (choice,) = answer.choices
    assert choice.message.content == expected.text
    assert "Paris" in expected.text
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == expected.usage.output_tokens
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.prompt_tokens_details is not None


def test_a_streamed_chat_with_usage(smollm2: Model) -> None:
    expected = smollm2.chat_over_grpc(temperature=0.9, seed=3, max_tokens=40)
    chunks = list(
        smollm2.client.chat.completions.create(
            model=smollm2.name,
            messages=MESSAGES,
            temperature=0.9,
            seed=3,
            max_completion_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices[0].finish_reason in ("stop", "length")
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == expected.usage.output_tokens


def test_the_stream_helper_of_the_package(smollm2: Model) -> None:
    """Its events accumulate the chunks to the response that is not streamed."""
    fields: dict[str, Any] = {"model": smollm2.name, "messages": MESSAGES, "temperature": 0}
    whole = smollm2.client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    with smollm2.client.chat.completions.stream(**fields, logprobs=True, top_logprobs=2) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].logprobs is not None
    assert whole.choices[0].logprobs is not None
    entries, theirs = final.choices[0].logprobs.content, whole.choices[0].logprobs.content
    assert entries is not None
    assert theirs is not None
    assert [entry.token for entry in entries] == [entry.token for entry in theirs]
    assert "".join(entry.token for entry in theirs) == whole.choices[0].message.content
    for entry in theirs:
        assert entry.token == entry.top_logprobs[0].token, "greedy"
        assert len(entry.top_logprobs) == 2


def test_breaking_a_stream_off_ends_the_request(smollm2: Model) -> None:
    with smollm2.client.completions.create(
        model=smollm2.name,
        prompt="Once upon a time",
        max_tokens=1000,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        assert next(iter(stream)).choices[0].text
    again = smollm2.client.completions.create(model=smollm2.name, prompt="a", max_tokens=2)
    assert again.choices[0].finish_reason == "length"


class Person(BaseModel):
    """Document that a response must be."""

    name: str
    age: int
    color: Literal["red", "green", "blue"]


DESCRIBE: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": [{"type": "text", "text": "You write short JSON documents."}]},
    {"role": "user", "content": "Describe a person with a name, an age and a favorite color."},
]


def test_a_parsed_document(smollm2: Model) -> None:
    """The package makes a strict schema from a class and the document an object of the class."""
    for seed in range(3):
        answer = smollm2.client.chat.completions.parse(
            model=smollm2.name, messages=DESCRIBE, response_format=Person, seed=seed, max_tokens=300
        )
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(answer.choices[0].message.parsed, Person)
            return
    raise AssertionError("no document ended")


def test_a_json_object(smollm2: Model) -> None:
    answer = smollm2.client.chat.completions.create(
        model=smollm2.name,
        messages=DESCRIBE,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=20,
    )
    content = answer.choices[0].message.content
    assert content is not None
    assert content.startswith("{")


def test_a_completion(smollm2: Model) -> None:
    prompt = "The capital of France is"
    answer = smollm2.client.completions.create(
        model=smollm2.name, prompt=prompt, temperature=0, max_tokens=16, stop=["\n"], logprobs=2
    )
    source = pb.GenerationInput(prompt=prompt)
    expected = smollm2.over_grpc(source, temperature=0.0, max_tokens=16, stop=["\n"])
    (choice,) = answer.choices
    assert choice.text == expected.text
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens).startswith(choice.text)
    streamed = smollm2.client.completions.create(
        model=smollm2.name, prompt=prompt, temperature=0, max_tokens=16, stop="\n", stream=True
    )
    assert "".join(part.choices[0].text for part in streamed) == choice.text


def test_embeddings(embedding: Model) -> None:
    """The package asks for base64 unless a format is named."""
    texts = ["a cat", "another text"]
    expected = embedding.text.Embed(pb.EmbedRequest(inputs=texts), timeout=CALL_S).embeddings
    for values in ({}, {"encoding_format": "float"}):
        fields: dict[str, Any] = {"model": embedding.name, "input": texts, **values}
        found = embedding.client.embeddings.create(**fields)
        assert [item.index for item in found.data] == [0, 1]
        for ours, theirs in zip(found.data, expected, strict=True):
            assert np.array_equal(np.float32(ours.embedding), np.float32(theirs.values))
        assert found.usage.total_tokens == sum(map(len, texts))


def test_errors_are_those_of_the_package(smollm2: Model, embedding: Model) -> None:
    def fails(
        kind: type[openai.APIStatusError], where: Model = smollm2, **values: Any
    ) -> openai.APIStatusError:
        fields = {"model": where.name, "messages": MESSAGES, **values}
        with pytest.raises(kind) as caught:
            where.client.chat.completions.create(**fields)
        return caught.value

    wrong = fails(openai.BadRequestError, temperature=3)
    assert (wrong.param, wrong.code) == ("temperature", "invalid_request")
    assert fails(openai.NotFoundError, model="gpt-9").param == "model"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert fails(openai.BadRequestError, tools=[tool]).param == "tools"
    assert fails(openai.BadRequestError, n=2).param == "n"
    assert fails(openai.BadRequestError, stream=True, top_p=7).param == "top_p"
    refused = fails(openai.BadRequestError, embedding)
    assert refused.code == "text_generation_unavailable"
    with pytest.raises(openai.BadRequestError) as caught:
        smollm2.client.embeddings.create(model=smollm2.name, input="a")
    assert caught.value.code == "embedding_unavailable"
    with pytest.raises(openai.BadRequestError) as caught:
        smollm2.client.audio.speech.create(model=smollm2.name, voice="alloy", input="a")
    assert caught.value.code == "speech_unavailable"
