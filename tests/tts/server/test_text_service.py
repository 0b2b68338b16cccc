"""TextService over a real connection: text, chat and token ids on the engine of speech."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.fakes import tiny_config, wait_until_idle
from tests.llm.lora.adapters import write_adapter
from tests.tts.serving import (
    Serving,
    collect_speech,
    error_of,
    fields_of,
    reason_of,
    run_with_server,
    stream_request,
)
from tests.vocabulary import END_OF_SPEECH, END_OF_TEXT
from tts.factory import Service, create_service
from tts.v1 import common_pb2, speech_pb2
from tts.v1 import text_pb2 as pb

PROMPT = "once upon a time"
FIRST_CONTROL = 256


def generation(
    prompt: str | None = PROMPT,
    chat: list[tuple[int, str]] | None = None,
    token_ids: list[int] | None = None,
    **values: Any,
) -> dict[str, Any]:
    """Return the fields of a request; sampling keywords go into its sampling message."""
    names = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    sampling = {"seed": 5, "max_tokens": 24} | {k: v for k, v in values.items() if k in names}
    others = {k: v for k, v in values.items() if k not in names}
    source = pb.GenerationInput(prompt=prompt or "")
    if chat is not None:
        messages = [pb.ChatMessage(role=role, content=content) for role, content in chat]
        source = pb.GenerationInput(chat=pb.ChatMessages(messages=messages))
    if token_ids is not None:
        source = pb.GenerationInput(token_ids=pb.TokenIds(ids=token_ids))
    params = common_pb2.SamplingParams(**{k: v for k, v in sampling.items() if v is not None})
    return {"config": pb.GenerationConfig(sampling=params, **others), "input": source}


async def whole(served: Serving, **values: Any) -> pb.GenerateResponse:
    return await served.text.Generate(pb.GenerateRequest(**generation(**values)))


async def pieces(served: Serving, **values: Any) -> list[pb.GenerateStreamResponse]:
    call = served.text.GenerateStream(pb.GenerateStreamRequest(**generation(**values)))
    return [response async for response in call]


def test_a_stream_has_started_delta_and_done_events(service: Service) -> None:
    async def ask(served: Serving) -> None:
        responses = await pieces(served, request_id="mine")
        kinds = [response.WhichOneof("event") for response in responses]
        assert kinds == ["started", *["delta"] * (len(kinds) - 2), "done"]
        started, done = responses[0].started, responses[-1].done
        assert (started.request_id, started.model, started.seed) == ("mine", service.model, 5)
        ids = [i for response in responses for i in response.delta.token_ids]
        assert done.usage.output_tokens >= len(ids) > 0
        assert done.usage.prompt_tokens == len(PROMPT)
        assert done.usage.input_characters == len(PROMPT)
        assert done.timings.HasField("total")
        assert not done.timings.HasField("time_to_first_audio")
        unary = await whole(served)
        assert list(unary.token_ids) == ids
        assert unary.text == "".join(response.delta.text for response in responses)
        assert unary.finish_reason == done.finish_reason
        assert not set(ids) & {END_OF_SPEECH, END_OF_TEXT}

    run_with_server(service, ask)


def test_the_seed_decides(service: Service) -> None:
    async def ask(served: Serving) -> None:
        one, same = await asyncio.gather(whole(served), whole(served))
        assert one.token_ids == same.token_ids
        assert (await whole(served, seed=6)).token_ids != one.token_ids
        greedy = await whole(served, seed=1, temperature=0.0)
        assert greedy.token_ids == (await whole(served, seed=2, temperature=0.0)).token_ids

    run_with_server(service, ask)


def test_text_and_speech_share_the_engine(service: Service) -> None:
    async def ask(served: Serving) -> None:
        alone, spoken_alone = await whole(served), await collect_speech(served)
        written, spoken, *_ = await asyncio.gather(
            whole(served),
            collect_speech(served),
            whole(served, seed=9),
            collect_speech(served, seed=9),
        )
        assert written.token_ids == alone.token_ids
        assert spoken.data == spoken_alone.data

    run_with_server(service, ask)


def test_control_tokens_come_from_token_ids_only(service: Service) -> None:
    async def ask(served: Serving) -> None:
        text = "<|s_12|> <|end_of_text|>"
        as_text = await whole(served, prompt=text)
        assert as_text.usage.prompt_tokens == len(text)
        as_ids = await whole(served, token_ids=list(text.encode()))
        assert as_ids.token_ids == as_text.token_ids
        controls = await whole(served, token_ids=[FIRST_CONTROL + 3, *b"hello", 260])
        assert controls.usage.prompt_tokens == 7

    run_with_server(service, ask)


def test_chat_goes_through_the_template(service: Service) -> None:
    async def ask(served: Serving) -> None:
        rendered = "system: be kind\nuser: hi <|s_1|>\nassistant: "
        as_text = await whole(served, prompt=rendered)
        chat = [(pb.CHAT_ROLE_SYSTEM, "be kind"), (pb.CHAT_ROLE_USER, "hi <|s_1|>")]
        as_chat = await whole(served, chat=chat)
        assert as_chat.token_ids == as_text.token_ids
        assert as_chat.usage.prompt_tokens == len(rendered)

    run_with_server(service, ask)


def test_output_ends_before_a_stop_string(service: Service) -> None:
    async def ask(served: Serving) -> None:
        free = (await whole(served, max_tokens=60)).text
        assert len(free) > 4
        stop = free[2:4]
        stopped = await whole(served, max_tokens=60, stop=[stop, "never said"])
        assert stopped.text == free[: free.index(stop)]
        assert stopped.finish_reason == common_pb2.FINISH_REASON_STOP
        assert stopped.usage.output_tokens < 60

    run_with_server(service, ask)


def test_output_ends_before_a_stop_id_unless_ignored(service: Service) -> None:
    async def ask(served: Serving) -> None:
        free = await whole(served, max_tokens=60)
        stop = free.token_ids[3]
        stopped = await whole(served, max_tokens=60, stop_token_ids=[stop])
        place = list(free.token_ids).index(stop)
        assert list(stopped.token_ids) == list(free.token_ids[:place])
        assert stopped.finish_reason == common_pb2.FINISH_REASON_STOP
        ignored = await whole(served, max_tokens=60, stop_token_ids=[stop], ignore_eos=True)
        assert ignored.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert ignored.usage.output_tokens == 60

    run_with_server(service, ask)


def test_penalties_reach_the_sampler(service: Service) -> None:
    async def ask(served: Serving) -> None:
        plain = await whole(served, max_tokens=40, temperature=0.0)
        for penalty in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
            other = await whole(served, max_tokens=40, temperature=0.0, **{penalty: 1.9})
            assert other.token_ids != plain.token_ids
            assert len(set(other.token_ids)) >= len(set(plain.token_ids))

    run_with_server(service, ask)


def test_the_finish_reason_of_the_limit_is_length(service: Service) -> None:
    async def ask(served: Serving) -> None:
        response = await whole(served, max_tokens=5, min_tokens=5)
        assert response.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert response.usage.output_tokens == 5

    run_with_server(service, ask)


def test_log_probabilities(service: Service) -> None:
    async def ask(served: Serving) -> None:
        response = await whole(served, top_logprobs=3, temperature=0.0)
        assert len(response.logprobs) == len(response.token_ids)
        for token_id, entry in zip(response.token_ids, response.logprobs, strict=True):
            assert entry.token_id == token_id
            assert len(entry.top) == 3
            assert entry.logprob <= entry.top[0].logprob <= 0
        assert not (await whole(served)).logprobs

    run_with_server(service, ask)


def test_the_chosen_token_alone_is_scored(service: Service) -> None:
    async def ask(served: Serving) -> None:
        full = await whole(served, top_logprobs=3)
        alone = await whole(served, logprobs=True)
        assert alone.token_ids == full.token_ids
        assert [e.logprob for e in alone.logprobs] == [e.logprob for e in full.logprobs]
        assert len(alone.logprobs) == len(alone.token_ids)
        assert not any(entry.top for entry in alone.logprobs)
        streamed = [
            e for event in await pieces(served, logprobs=True) for e in event.delta.logprobs
        ]
        assert streamed == list(alone.logprobs)

    run_with_server(service, ask)


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "config.sampling.temperature"),
    ({"top_p": 0.0}, "config.sampling.top_p"),
    ({"max_tokens": 0}, "config.sampling.max_tokens"),
    ({"stop": [""]}, "config.sampling.stop"),
    ({"stop": ["x"] * 17}, "config.sampling.stop"),
    ({"stop": ["x" * 1001]}, "config.sampling.stop"),
    ({"stop_token_ids": [1] * 17}, "config.sampling.stop_token_ids"),
    ({"frequency_penalty": 2.5}, "config.sampling.frequency_penalty"),
    ({"presence_penalty": float("nan")}, "config.sampling.presence_penalty"),
    ({"json_schema": "{}", "ignore_eos": True}, "config.json_schema"),
    ({"top_logprobs": -1}, "config.top_logprobs"),
    ({"top_logprobs": 21}, "config.top_logprobs"),
    ({"echo": True}, "config.echo"),
    ({"priority": 1_000_000}, "config.priority"),
    ({"request_id": "a b"}, "config.request_id"),
    ({"prompt": ""}, "input.prompt"),
    ({"prompt": "a\0b"}, "input.prompt"),
    ({"prompt": "x" * 1_001}, "input.prompt"),
    ({"token_ids": []}, "input.token_ids"),
    ({"token_ids": [1] * 1_001}, "input.token_ids"),
    ({"chat": []}, "input.chat"),
    ({"chat": [(0, "hi")]}, "input.chat.messages[0].role"),
    ({"chat": [(pb.CHAT_ROLE_USER, "a\0b")]}, "input.chat.messages[0].content"),
]


def test_every_wrong_field_is_named(service: Service) -> None:
    async def ask(served: Serving) -> None:
        for values, field in FIELDS:
            request = pb.GenerateStreamRequest(**generation(**values))
            assert fields_of(await error_of(served.text.GenerateStream(request))) == [field], values
        nothing = pb.GenerateRequest()
        assert fields_of(await error_of(served.text.Generate(nothing))) == ["input"]

    run_with_server(service, ask, max_stream_characters=1_000)


@pytest.mark.parametrize(
    "token_ids",
    [[10_000_000], [-1], [65] * 5_000],
    ids=["beyond the vocabulary", "negative", "longer than the context"],
)
def test_prompts_that_the_engine_refuses(service: Service, token_ids: list[int]) -> None:
    async def ask(served: Serving) -> None:
        request = pb.GenerateRequest(**generation(token_ids=token_ids))
        error = await error_of(served.text.Generate(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await whole(served)).token_ids

    run_with_server(service, ask)


def test_an_unknown_adapter_is_refused(service: Service) -> None:
    async def ask(served: Serving) -> None:
        request = pb.GenerateRequest(**generation(lora="pirate"))
        error = await error_of(served.text.Generate(request))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert reason_of(error) == "ADAPTER_NOT_FOUND"

    run_with_server(service, ask)


def test_requests_name_adapters(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Adapters share batches with the base model and with speech."""
    folder = write_adapter(tmp_path / "pirate", tiny_checkpoint, gain=1.0)
    lora = {"enable_lora": True, "lora_paths": [f"shanty={folder}"]}
    adapted = create_service(tiny_config(tiny_checkpoint, lora=lora))

    async def ask(served: Serving) -> None:
        base, own, spoken = (
            await whole(served),
            await whole(served, lora="shanty"),
            await collect_speech(served),
        )
        assert own.token_ids != base.token_ids
        both = await asyncio.gather(
            whole(served, lora="shanty"), whole(served), collect_speech(served)
        )
        assert [both[0].token_ids, both[1].token_ids] == [own.token_ids, base.token_ids]
        assert both[2].data == spoken.data
        other = await collect_speech(served, lora="shanty")
        assert other.data != spoken.data
        error = await error_of(served.speech.SynthesizeStream(stream_request(lora="pirate")))
        assert reason_of(error) == "ADAPTER_NOT_FOUND"
        (model,) = (await served.speech.GetServerInfo(speech_pb2.GetServerInfoRequest())).models
        assert list(model.adapters) == ["shanty"]

    run_with_server(adapted, ask)
    asyncio.run(wait_until_idle(adapted.client))
    asyncio.run(adapted.client.close())


def test_embedding_needs_another_model(service: Service) -> None:
    async def ask(served: Serving) -> None:
        error = await error_of(served.text.Embed(pb.EmbedRequest(inputs=["hello"])))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(error) == "EMBEDDING_UNAVAILABLE"
        unknown = await error_of(served.text.Embed(pb.EmbedRequest(model="other")))
        assert unknown.code() is grpc.StatusCode.NOT_FOUND

    run_with_server(service, ask)


def test_a_cancelled_call_ends_the_request(service: Service) -> None:
    async def ask(served: Serving) -> None:
        request = pb.GenerateStreamRequest(**generation(max_tokens=900, min_tokens=900))
        call = served.text.GenerateStream(request)
        await call.read()
        await call.read()
        call.cancel()

    run_with_server(service, ask)


@pytest.fixture(scope="module")
def echoing(tiny_checkpoint: Path) -> Iterator[Service]:
    service = create_service(tiny_config(tiny_checkpoint, enable_echo=True))
    yield service
    asyncio.run(wait_until_idle(service.client))
    asyncio.run(service.client.close())


def test_echo_scores_the_prompt_too(echoing: Service) -> None:
    async def ask(served: Serving) -> None:
        response = await whole(served, echo=True, top_logprobs=2)
        entries = response.prompt_logprobs
        assert bytes(entry.token_id for entry in entries) == PROMPT.encode()
        assert [entry.HasField("logprob") for entry in entries] == [False] + [True] * 15
        assert [len(entry.top) for entry in entries] == [0] + [2] * 15
        assert len(response.logprobs) == len(response.token_ids)
        streamed = await pieces(served, echo=True)
        scored = [entry for event in streamed for entry in event.delta.prompt_logprobs]
        assert [entry.logprob for entry in scored] == [entry.logprob for entry in entries]
        assert not any(entry.top for entry in scored)
        long = await pieces(served, prompt="x" * 300, echo=True)
        sizes = [len(event.delta.prompt_logprobs) for event in long]
        assert (sum(sizes), max(sizes)) == (300, 128)
        assert not (await whole(served)).prompt_logprobs
        (model,) = (await served.speech.GetServerInfo(speech_pb2.GetServerInfoRequest())).models
        assert (model.echo, model.structured_output) == (True, False)

    run_with_server(echoing, ask)
