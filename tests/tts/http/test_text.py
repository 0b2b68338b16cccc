"""Chats and completions over HTTP: the texts of gRPC, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import wait_until_idle
from tests.llm.lora.adapters import write_adapter
from tests.tts.engine.jobs import in_slot
from tests.tts.http.http_serving import HttpServing, post, raw_connection, run_with_http
from tests.tts.http.text_requests import (
    CHAT,
    COMPLETIONS,
    PROMPT,
    REASONS,
    SHORT,
    USER,
    chat,
    chat_over_grpc,
    choice_of,
    chunks_of,
    complete,
    loaded,
    over_grpc,
    text_of,
)
from tests.tts.text_models import WRITERS
from tts.checkpoint.tokenizer import IncrementalDetokenizer
from tts.errors import SynthesisError
from tts.factory import Service
from tts.http.text_body import GenerationBody
from tts.textgen.generator import TextGenerator
from tts.v1 import common_pb2

SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "très triste"]}, "ok": {"type": "boolean"}},
    "required": ["mood", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def texts(text_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A text model with structured output and an adapter."""
    folder = write_adapter(tmp_path_factory.mktemp("lora") / "pirate", text_checkpoint, gain=1.0)
    lora = {"enable_lora": True, "lora_paths": [f"shanty={folder}"]}
    yield from loaded(text_checkpoint, lora=lora, sampling={"enable_structured_output": True})


def test_a_chat_has_the_text_of_grpc(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await chat(served)
        expected = await chat_over_grpc(served)
        body = response.json()
        assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"
        assert (body["object"], body["model"]) == ("chat.completion", texts.model)
        assert isinstance(body["created"], int)
        assert choice_of(response) == {
            "index": 0,
            "message": {"role": "assistant", "content": expected.text, "refusal": None},
            "logprobs": None,
            "finish_reason": REASONS[expected.finish_reason],
        }
        usage = expected.usage
        assert body["usage"] == {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": body["usage"]["prompt_tokens_details"]["cached_tokens"]
            },
        }
        assert expected.text

    run_with_http(texts, ask)


def test_a_completion_has_the_text_of_grpc(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await complete(served)
        expected = await over_grpc(served)
        body = response.json()
        assert body["id"] == f"cmpl-{response.headers['x-request-id']}"
        assert (body["object"], body["model"]) == ("text_completion", texts.model)
        assert choice_of(response) == {
            "index": 0,
            "text": expected.text,
            "logprobs": None,
            "finish_reason": REASONS[expected.finish_reason],
        }
        assert body["usage"]["prompt_tokens"] == len(PROMPT)

    run_with_http(texts, ask)


def test_prompts_are_texts_or_token_ids(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        expected = text_of(await complete(served))
        ids = list(PROMPT.encode())
        for prompt in ([PROMPT], ids, [ids]):
            assert text_of(await complete(served, prompt=prompt)) == expected

    run_with_http(texts, ask)


def test_messages_have_roles_and_parts(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        rendered = "system: be kind\nuser: hi\n<|s_1|>\nassistant: hello\nuser: so?\nassistant: "
        expected = text_of(await complete(served, prompt=rendered))
        parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "<|s_1|>"}]
        for first in ("system", "developer"):
            messages = [
                {"role": first, "content": "be kind"},
                {"role": "user", "content": parts, "name": "ann"},
                {"role": "assistant", "content": "hello", "tool_calls": None},
                {"role": "user", "content": "so?"},
            ]
            assert text_of(await chat(served, messages=messages)) == expected

    run_with_http(texts, ask)


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.3},
    {"frequency_penalty": 1.9, "temperature": 0.0},
    {"presence_penalty": 1.9, "temperature": 0.0},
    {"repetition_penalty": 1.9, "temperature": 0.0},
    {"repetition_penalty": 1.9, "repetition_window": 2, "temperature": 0.0},
    {"top_k": 2},
    {"min_p": 0.4},
    {"seed": 2**64 - 1},
    {"max_tokens": 3},
    {"min_tokens": 30, "max_tokens": 30},
    {"stop_token_ids": [*range(97, 113)]},
    {"stop_token_ids": [*range(97, 110)], "ignore_eos": True},
]


def test_sampling_parameters_are_those_of_grpc(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for own in SAMPLING:
            values = {**SHORT, **own}
            found, expected = await asyncio.gather(
                complete(served, **values), over_grpc(served, **values)
            )
            assert text_of(found) == expected.text, values
            assert found.json()["usage"]["completion_tokens"] == expected.usage.output_tokens

    run_with_http(texts, ask)


def test_every_sampling_parameter_of_the_contract_is_a_field() -> None:
    names = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
    assert names <= GenerationBody.model_fields.keys()


def test_both_names_of_the_longest_output(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await chat(served, max_tokens=None, max_completion_tokens=3, ignore_eos=True)
        assert response.json()["usage"]["completion_tokens"] == 3
        assert choice_of(response)["finish_reason"] == "length"
        both = await chat(served, max_tokens=9, max_completion_tokens=2, ignore_eos=True)
        assert both.json()["usage"]["completion_tokens"] == 2

    run_with_http(texts, ask)


def test_output_ends_before_a_stop_string(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        free = text_of(await complete(served, max_tokens=60))
        stop = free[2:4]
        for stops in (stop, [stop, "never written"]):
            response = await complete(served, max_tokens=60, stop=stops)
            assert text_of(response) == free[: free.index(stop)]
            assert choice_of(response)["finish_reason"] == "stop"
            streamed = chunks_of(await complete(served, max_tokens=60, stop=stops, stream=True))
            assert joined(streamed) == free[: free.index(stop)]

    run_with_http(texts, ask)


def test_requests_name_adapters_as_models(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for send, reference in ((complete, over_grpc), (chat, chat_over_grpc)):
            plain, own = await send(served, model=texts.model), await send(served, model="shanty")
            assert own.json()["model"] == "shanty"
            assert text_of(plain) == (await reference(served)).text
            assert text_of(own) == (await reference(served, lora="shanty")).text
            assert text_of(own) != text_of(plain)
        models = (await served.client.get("/v1/models")).json()["data"]
        assert [(m["id"], m["parent"]) for m in models] == [
            (texts.model, None),
            ("shanty", texts.model),
        ]
        one = await served.client.get("/v1/models/shanty")
        assert one.json() == models[1]

    run_with_http(texts, ask)


# --- structured output


def bound(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "mood", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": named}


def test_a_document_fits_its_schema(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for seed in range(3):
            values = {"response_format": bound(SCHEMA), "max_tokens": 200, "seed": seed}
            response = await chat(served, **values)
            found = json.loads(text_of(response))
            assert found.keys() == {"mood", "ok"}
            assert found["mood"] in {"glad", "très triste"}
            assert choice_of(response)["finish_reason"] == "stop"
            streamed = chunks_of(await chat(served, **values, stream=True))
            assert joined(streamed) == text_of(response)

    run_with_http(texts, ask)


def test_json_objects_and_plain_text(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        plain = text_of(await complete(served))
        assert text_of(await complete(served, response_format={"type": "text"})) == plain
        bound_text = text_of(await complete(served, response_format={"type": "json_object"}))
        expected = await over_grpc(served, json_schema='{"type": "object"}')
        assert bound_text == expected.text
        assert bound_text.startswith("{")

    run_with_http(texts, ask)


# --- streams


def joined(chunks: list[dict[str, Any]]) -> str:
    """Return the text of the chunks of a stream of either kind."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


def test_a_chat_is_streamed(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        whole = await chat(served)
        chunks = chunks_of(await chat(served, stream=True))
        first, *middle, last = [chunk["choices"][0] for chunk in chunks]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert len(middle) > 2, "the text comes in pieces"
        assert all(choice["delta"].keys() == {"content"} for choice in middle)
        assert all(choice["delta"]["content"] for choice in middle)
        assert not any(choice["finish_reason"] for choice in (first, *middle))
        assert last["delta"] == {}
        assert last["finish_reason"] == choice_of(whole)["finish_reason"]
        assert joined(chunks) == text_of(whole)
        for chunk in chunks:
            assert chunk["object"] == "chat.completion.chunk"
            assert (chunk["id"], chunk["model"]) == (chunks[0]["id"], texts.model)
            assert "usage" not in chunk

    run_with_http(texts, ask)


def test_a_completion_is_streamed(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        whole = await complete(served)
        chunks = chunks_of(await complete(served, stream=True))
        *middle, last = [chunk["choices"][0] for chunk in chunks]
        assert all(choice["text"] and not choice["finish_reason"] for choice in middle)
        assert (last["text"], last["finish_reason"]) == ("", choice_of(whole)["finish_reason"])
        assert joined(chunks) == text_of(whole)
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}

    run_with_http(texts, ask)


def test_the_usage_of_a_stream(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for send in (chat, complete):
            usage = (await send(served)).json()["usage"]
            options = {"include_usage": True}
            *chunks, last = chunks_of(await send(served, stream=True, stream_options=options))
            assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == usage["completion_tokens"]
            assert last["usage"]["total_tokens"] == usage["total_tokens"]
            options = {"include_usage": False}
            plain = chunks_of(await send(served, stream=True, stream_options=options))
            assert not any("usage" in chunk for chunk in plain)

    run_with_http(texts, ask)


def long(**values: Any) -> dict[str, Any]:
    """Return fields of a request that takes a while."""
    return {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, **values}


def test_text_arrives_while_it_is_generated(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        async with served.client.stream("POST", COMPLETIONS, json=long(stream=True)) as response:
            lines = response.aiter_lines()
            assert await anext(lines)
            assert served.num_open == 1, "the call still runs"
            *_, last, _ = [line async for line in lines]
            assert last == "data: [DONE]"

    run_with_http(texts, ask)


def test_text_and_speech_share_the_engine(service: Service) -> None:
    """A speech model writes text, too."""

    async def ask(served: HttpServing) -> None:
        alone, spoken_alone = await complete(served), await served.speak()
        written, spoken = await asyncio.gather(complete(served), served.speak())
        assert text_of(written) == text_of(alone) == (await over_grpc(served)).text
        assert spoken.content == spoken_alone.content

    run_with_http(service, ask)


# --- log-probabilities


@pytest.fixture(scope="module", params=["qwen", "mistral"])
def layout(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """Models whose tokens are several bytes, and parts of characters."""
    yield from loaded(WRITERS[request.param](tmp_path_factory.mktemp("text") / request.param))


def test_log_probabilities_of_a_chat(layout: Service) -> None:
    tokenizer = layout.prompts.tokenizer

    async def ask(served: HttpServing) -> None:
        response = await chat(served, logprobs=True, top_logprobs=3, max_tokens=60, temperature=1.5)
        expected = await chat_over_grpc(served, top_logprobs=3, max_tokens=60, temperature=1.5)
        entries = choice_of(response)["logprobs"]["content"]
        for entry, theirs in zip(entries, expected.logprobs, strict=True):
            assert bytes(entry["bytes"]) == tokenizer.token_bytes(theirs.token_id)
            assert entry["logprob"] == pytest.approx(theirs.logprob)
            assert len(entry["top_logprobs"]) == 3
            for top, their in zip(entry["top_logprobs"], theirs.top, strict=True):
                assert bytes(top["bytes"]) == tokenizer.token_bytes(their.token_id)
                assert top["logprob"] == pytest.approx(their.logprob)
        spelt = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
        assert spelt.removeprefix(" ") == text_of(response).removeprefix(" ")
        parts = [entry["token"] for entry in entries if "\\x" in entry["token"]]
        assert parts, "tokens that are parts of characters"
        alone = await chat(served, logprobs=True, max_tokens=60, temperature=1.5)
        chosen = choice_of(alone)["logprobs"]["content"]
        assert [e["logprob"] for e in chosen] == [e["logprob"] for e in entries]
        assert not any(entry["top_logprobs"] for entry in chosen)

    run_with_http(layout, ask)


def test_log_probabilities_of_a_completion(layout: Service) -> None:
    async def ask(served: HttpServing) -> None:
        response = await complete(served, logprobs=2, max_tokens=60)
        expected = await over_grpc(served, top_logprobs=2, max_tokens=60)
        scores, text = choice_of(response)["logprobs"], text_of(response)
        assert text == expected.text
        assert scores["token_logprobs"] == pytest.approx([e.logprob for e in expected.logprobs])
        for token, own, tops in zip(
            scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True
        ):
            assert tops[token] == own
            assert 2 <= len(tops) <= 3
        detokenizer = IncrementalDetokenizer(layout.prompts.tokenizer)
        before = ""
        for offset, entry in zip(scores["text_offset"], expected.logprobs, strict=True):
            assert (offset, text[:offset]) == (len(before), before)
            before += detokenizer.push([entry.token_id])
        chosen = choice_of(await complete(served, logprobs=0, max_tokens=60))["logprobs"]
        assert chosen["token_logprobs"] == scores["token_logprobs"]
        assert {len(tops) for tops in chosen["top_logprobs"]} == {1}

    run_with_http(layout, ask)


def test_streamed_log_probabilities_are_those_of_the_whole(layout: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for send, values in (
            (chat, {"logprobs": True, "top_logprobs": 1}),
            (complete, {"logprobs": 1}),
        ):
            whole = choice_of(await send(served, **values))["logprobs"]
            streamed: dict[str, list[Any]] = {name: [] for name in whole}
            for chunk in chunks_of(await send(served, **values, stream=True)):
                for name, entries in (chunk["choices"][0]["logprobs"] or {}).items():
                    streamed[name] += entries
            assert streamed == whole

    run_with_http(layout, ask)


# --- disconnects and faults


async def is_running(service: Service) -> None:
    """Wait until a request is in the engine."""
    while not (await service.client.status()).used_pages:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_disconnect_frees_the_pages(texts: Service, streams: bool) -> None:
    async def ask(served: HttpServing) -> None:
        body = post(json.dumps(long(stream=streams)).encode(), COMPLETIONS)
        for _ in range(3):
            async with raw_connection(served) as raw:
                await raw.send(body)
                await is_running(texts)
                if streams:
                    assert await raw.reader.readuntil(b"data: ")
            await wait_until_idle(texts.client)
            assert await served.grpc.server.host.calls.wait_idle(60)
        labels = {"grpc_service": "http", "grpc_method": f"POST {COMPLETIONS}"}
        ended = served.grpc.metric("grpc_server_handled_total", grpc_code="CANCELLED", **labels)
        assert ended == 3
        assert (await complete(served)).status_code == 200

    run_with_http(texts, ask)


def test_a_disconnect_in_the_queue(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        admission = served.grpc.server.host.admission
        async with in_slot(admission, "other"):
            async with raw_connection(served) as raw:
                await raw.send(post(json.dumps({"messages": USER}).encode(), CHAT))
                while not admission.waiting:
                    await asyncio.sleep(0.005)
            while admission.waiting:
                await asyncio.sleep(0.005)

    run_with_http(texts, ask, max_concurrent_requests=1)


def test_a_full_queue_says_when_to_try_again(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        async with in_slot(served.grpc.server.host.admission, "other"):
            refused = await chat(served, stream=True)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await chat(served)).status_code == 200

    run_with_http(texts, ask, max_concurrent_requests=1, max_queued_requests=0)


def test_an_error_within_a_stream_is_its_last_event(
    texts: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TextGenerator.write

    async def write(self: TextGenerator, request: Any) -> Any:
        pieces = plain(self, request)
        yield await anext(pieces)
        await pieces.aclose()
        raise SynthesisError("/secret/path")

    async def ask(served: HttpServing) -> None:
        response = await chat(served, stream=True)
        last = response.text.rstrip().rpartition("data: ")[2]
        assert json.loads(last)["error"]["type"] == "server_error"
        assert "[DONE]" not in response.text
        whole = await chat(served)
        assert whole.status_code == 500
        assert "secret" not in response.text + whole.text

    monkeypatch.setattr(TextGenerator, "write", write)
    run_with_http(texts, ask)


def test_calls_are_counted_as_those_of_grpc(texts: Service) -> None:
    async def ask(served: HttpServing) -> None:
        before = served.grpc.metric("sonant_prompt_tokens_total")
        used = (await complete(served)).json()["usage"]["prompt_tokens"]
        assert served.grpc.metric("sonant_prompt_tokens_total") == before + used

    run_with_http(texts, ask)
