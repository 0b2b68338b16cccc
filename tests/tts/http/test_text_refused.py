"""Requests for text that are refused: fields by their names in JSON, models, and unknown names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tts.http.http_serving import HttpServing, error_of, run_with_http
from tests.tts.http.text_requests import (
    CHAT,
    COMPLETIONS,
    PROMPT,
    USER,
    chat,
    complete,
    loaded,
    text_of,
)
from tts.factory import Service
from tts.http.text_body import REFUSED, ChatBody, CompletionBody, EmbeddingBody


@pytest.fixture(scope="module")
def texts(text_checkpoint: Path) -> Iterator[Service]:
    yield from loaded(text_checkpoint, sampling={"enable_structured_output": True})


EITHER: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": 1.0}, "min_p"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_window": -1}, "repetition_window"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 25}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [1] * 17}, "stop_token_ids"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids"),
    ({"priority": 10**6}, "priority"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    ({"n": 2}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"logit_bias": {"50256": -100}}, "logit_bias"),
    ({"model": 5}, "model"),
]

CHATS: list[tuple[dict[str, Any], str]] = [
    *EITHER,
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [*USER, {"role": "tool", "content": "hi"}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a\0b"}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
]

COMPLETED: list[tuple[dict[str, Any], str]] = [
    *EITHER,
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": "a\0b"}, "prompt"),
    ({"prompt": "x" * 1001}, "prompt"),
    ({"prompt": [1] * 1001}, "prompt"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"suffix": "the end"}, "suffix"),
]


@pytest.mark.parametrize(
    ("path", "values", "param"),
    [
        *((CHAT, values, param) for values, param in CHATS),
        *((COMPLETIONS, values, param) for values, param in COMPLETED),
    ],
)
def test_wrong_fields_are_named_as_in_json(
    texts: Service, path: str, values: dict[str, Any], param: str
) -> None:
    async def ask(served: HttpServing) -> None:
        send = chat if path == CHAT else complete
        for stream in ({}, {"stream": True}) if "stream_options" not in values else ({},):
            response = await send(served, **{**stream, **values})
            error = error_of(response)
            assert response.status_code == 400
            assert (error["param"], error["type"]) == (param, "invalid_request_error")
            assert error["message"].startswith(param)
            for name in ("config.", "input."):
                assert name not in error["message"]

    run_with_http(texts, ask, max_stream_characters=1_000)


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "openai_text.md").read_text(encoding="utf-8")
    fields = {
        name for kind in (ChatBody, CompletionBody, EmbeddingBody) for name in kind.model_fields
    }
    assert [name for name in sorted({*fields, *REFUSED}) if f"`{name}`" not in page] == []


def test_several_wrong_fields_are_named_together(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for values in ({"temperature": 3, "top_p": 2}, {"temperature": "a", "top_p": "b"}):
            message = error_of(await chat(served, **values))["message"]
            assert "temperature: " in message
            assert "top_p: " in message
        refused = error_of(await chat(served, n=2, tools=[{}]))
        assert "n: must be 1" in refused["message"]
        assert "tools: " in refused["message"]

    run_with_http(texts, ask)


def test_values_that_ask_for_nothing_are_accepted(texts: Service) -> None:
    nothing: dict[str, Any] = {
        "n": 1,
        "tools": [],
        "tool_choice": "auto",
        "functions": None,
        "logit_bias": {},
        "modalities": ["text"],
        "echo": False,
        "suffix": None,
        "best_of": 1,
        "stop": None,
        "stream_options": None,
        "response_format": None,
    }

    async def ask(served: HttpServing) -> None:
        for send in (chat, complete):
            response = await send(served, **nothing)
            assert text_of(response) == text_of(await send(served))
            assert "x-ignored-fields" not in response.headers

    run_with_http(texts, ask)


def test_ignored_fields_are_named(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        fields = {"user": "ann", "metadata": {"a": "b"}, "store": True, "other": 1}
        for send in (chat, complete):
            response = await send(served, **fields)
            assert response.headers["x-ignored-fields"] == "user, metadata, store, other"
            assert text_of(response) == text_of(await send(served))

    run_with_http(texts, ask)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nope"},
        {"$ref": "http://localhost/"},
        {"$ref": "#"},
        {"const": -1e300},
        {"enum": ["x" * 70_000]},
    ],
    ids=["unknown type", "remote", "loop", "small number", "long"],
)
def test_a_wrong_schema_is_refused(texts: Service, schema: dict[str, Any]) -> None:
    async def ask(served: HttpServing) -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        for stream in (False, True):
            response = await chat(served, response_format=wanted, stream=stream)
            assert response.status_code == 400
            assert error_of(response)["param"] == "response_format"

    run_with_http(texts, ask)


def test_a_schema_that_no_document_can_end_is_refused(texts: Service) -> None:
    """The fault is found while the document is written; a stream ends with the error."""
    loop = {"$ref": "#/properties/again"}
    schema = {"type": "object", "properties": {"again": loop}, "required": ["again"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}

    async def ask(served: HttpServing) -> None:
        response = await chat(served, response_format=wanted)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == "response_format"
        streamed = await chat(served, response_format=wanted, stream=True)
        last = streamed.text.rstrip().rpartition("data: ")[2]
        assert json.loads(last)["error"] == error

    run_with_http(texts, ask)


def test_a_server_without_structured_output_refuses_schemas(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        error = error_of(await chat(served, response_format={"type": "json_object"}))
        assert error["param"] == "response_format"
        assert "enable_structured_output" in error["message"]

    run_with_http(service, ask)


@pytest.mark.parametrize(
    "prompt",
    ["x" * 5_000, [10_000_000], [-1]],
    ids=["longer than the context", "beyond the vocabulary", "negative"],
)
def test_prompts_that_the_engine_refuses(texts: Service, prompt: str | list[int]) -> None:
    async def ask(served: HttpServing) -> None:
        for stream in (False, True):
            response = await complete(served, prompt=prompt, stream=stream)
            assert response.status_code == 400
            assert error_of(response)["type"] == "invalid_request_error"
        assert (await complete(served)).status_code == 200

    run_with_http(texts, ask)


@pytest.mark.parametrize("send", [chat, complete])
def test_unknown_models_are_not_found(texts: Service, send: Any) -> None:
    async def ask(served: HttpServing) -> None:
        response = await send(served, model="gpt-9")
        assert response.status_code == 404
        error = error_of(response)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert texts.model in error["message"]

    run_with_http(texts, ask)


def test_a_model_without_a_chat_template_does_not_chat(
    text_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(text_checkpoint, tmp_path / "plain"))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))

    async def ask(served: HttpServing) -> None:
        response = await chat(served)
        assert response.status_code == 400
        assert error_of(response)["code"] == "chat_template_unavailable"
        assert (await complete(served)).status_code == 200

    for plain in loaded(folder):
        run_with_http(plain, ask)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"prompt": "a"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'],
)
def test_broken_json_is_refused(texts: Service, body: bytes) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.client.post(COMPLETIONS, content=body)
        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_request"

    run_with_http(texts, ask)


def test_an_error_holds_no_text_of_the_request(texts: Service) -> None:
    secret = [{"role": "sesame", "content": "sesame"}]

    async def ask(served: HttpServing) -> None:
        for values in ({"messages": secret}, {"temperature": "sesame"}, {"tools": ["sesame"]}):
            response = await chat(served, **values)
            assert response.status_code == 400
            assert "sesame" not in response.text

    run_with_http(texts, ask)


def test_tokens_are_asked_for(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        assert (await complete(served)).status_code == 401
        headers = {"authorization": "Bearer secret"}
        body = {"prompt": PROMPT, "max_tokens": 2}
        assert (await served.client.post(COMPLETIONS, json=body, headers=headers)).is_success

    run_with_http(texts, ask, auth_token="secret")
