"""A voice and a text model on one server: two engines, in one process here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from llm import ConfigError
from tests.fakes import tiny_config, wait_until_idle
from tests.tts.http.http_serving import HttpServing, run_with_http
from tests.tts.http.text_requests import chat, choice_of
from tests.tts.server.test_spoken_text import (
    LONG_STORY,
    STORY,
    collect,
    speech_events,
    spoken,
    telling,
    text_events,
)
from tests.tts.server.test_text_service import generation, whole
from tests.tts.serving import (
    Serving,
    collect_speech,
    error_of,
    grouped,
    health,
    reason_of,
    run_conversation,
    run_with_server,
    say,
    session_config,
)
from tests.tts.text_models import write_llama3
from tts.config.pipeline import AudioGenerationConfig
from tts.config.serve import ServeConfig
from tts.config.server import ServerConfig
from tts.factory import Service, create_service, with_text_model
from tts.v1 import speech_pb2
from tts.v1 import text_pb2 as pb

Status = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama3(tmp_path_factory.mktemp("models") / "llama")


def text_config(folder: Path) -> AudioGenerationConfig:
    return tiny_config(folder, sampling={"enable_structured_output": True})


@pytest.fixture(scope="module")
def both(tiny_checkpoint: Path, llama: Path) -> Iterator[Service]:
    service = create_service(tiny_config(tiny_checkpoint), None, text_config(llama))
    yield service
    for served in service.services:
        asyncio.run(wait_until_idle(served.client))
    asyncio.run(service.close())


def test_texts_are_those_of_the_text_model_alone(both: Service, llama: Path) -> None:
    async def ask(served: Serving) -> pb.GenerateResponse:
        return await whole(served, chat=[(pb.CHAT_ROLE_USER, "Hello!")])

    together = run_with_server(both, ask)
    service = create_service(text_config(llama))
    alone = run_with_server(service, ask)
    asyncio.run(service.close())
    assert together.token_ids == alone.token_ids
    assert together.token_ids


def test_the_voice_speaks_what_the_text_model_generates(both: Service) -> None:
    async def ask(served: Serving) -> None:
        responses = await collect(served, spoken(telling(STORY)))
        written, heard = text_events(responses), grouped(speech_events(responses))
        text = "".join(event.delta.text for event in written)
        assert json.loads(text) == STORY
        assert (written[0].started.model, heard.started.model) == ("llama", "tiny")
        by_clause = session_config(segment_mode=speech_pb2.SEGMENT_MODE_CLAUSE, max_tokens=None)
        expected = grouped(await run_conversation(served, by_clause, say(text)))
        assert heard.data == expected.data

    run_with_server(both, ask)


def test_a_cancellation_frees_both_engines(both: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.text.GenerateSpeech(spoken(telling(" ".join([LONG_STORY] * 2))))
        while (await call.read()).speech.WhichOneof("event") != "audio":
            pass
        call.cancel()
        for service in both.services:
            await wait_until_idle(service.client)

    run_with_server(both, ask)


def test_each_model_answers_to_its_name(both: Service) -> None:
    async def ask(served: Serving) -> None:
        named = await whole(served, model="llama")
        assert named.token_ids == (await whole(served)).token_ids
        request = pb.GenerateRequest(**generation(model="tiny"))
        assert reason_of(await error_of(served.text.Generate(request))) == "MODEL_NOT_FOUND"
        assert (await collect_speech(served, model="tiny")).audio
        info = await served.speech.GetServerInfo(speech_pb2.GetServerInfoRequest())
        found = {model.name: (model.family, model.text_generation) for model in info.models}
        assert found == {"tiny": ("embedded", False), "llama": ("", True)}

    run_with_server(both, ask)


def test_both_over_http(both: Service) -> None:
    async def ask(served: HttpServing) -> None:
        models = (await served.client.get("/v1/models")).json()["data"]
        found = {model["id"]: model["capabilities"] for model in models}
        assert found.keys() == {"tiny", "llama"}
        assert "speech" in found["tiny"]
        assert found["llama"] == ["chat", "spoken_chat"]
        schema = {"name": "story", "schema": {"const": STORY}}
        wanted: dict[str, Any] = {
            "response_format": {"type": "json_schema", "json_schema": schema},
            "max_tokens": 200,
            "modalities": ["text", "audio"],
        }
        response = await chat(served, model="llama", **wanted)
        audio = choice_of(response)["message"]["audio"]
        assert json.loads(audio["transcript"]) == STORY
        assert len(audio["data"]) > 10_000
        assert response.json()["model"] == "llama"
        assert (await served.speak(model="tiny")).status_code == 200

    run_with_http(both, ask)


def test_both_engines_have_metrics(both: Service) -> None:
    async def ask(served: Serving) -> None:
        await whole(served)
        while not served.metric("sonant_text_batch_rows_count", mode="decode"):
            await asyncio.sleep(0.01)
        for name in ("sonant_kv_pages", "sonant_text_kv_pages"):
            assert served.metric(name, state="total") == 511
        text = served.server.host.metrics.text()
        assert "# TYPE sonant_text_preemptions_total counter" in text
        assert "# TYPE sonant_preemptions_total counter" in text

    run_with_server(both, ask)


@pytest.mark.parametrize("lost", [0, 1])
def test_without_one_of_its_engines_a_server_is_not_serving(
    tiny_checkpoint: Path, llama: Path, lost: int
) -> None:
    service = create_service(tiny_config(tiny_checkpoint), None, text_config(llama))

    async def ask(served: Serving) -> None:
        assert await health(served.channel) == Status.SERVING
        await service.services[lost].client.close()
        while await health(served.channel) == Status.SERVING:
            await asyncio.sleep(0.01)

    run_with_server(service, ask)
    asyncio.run(service.close())


def test_models_that_do_not_go_together(both: Service) -> None:
    speech, text = both, both.for_text
    for first, second in ((text, text), (speech, speech)):
        with pytest.raises(ConfigError, match="speaks"):
            with_text_model(first, second)


def test_two_models_need_two_names(both: Service, llama: Path) -> None:
    named = {"model": {"served_model_name": "tiny"}}
    text = create_service(AudioGenerationConfig(**tiny_config(llama, **named).model_dump()))
    with pytest.raises(ConfigError, match="served_model_name"):
        with_text_model(both, text)
    asyncio.run(text.close())


def test_the_configuration_of_the_text_model(llama: Path, tiny_checkpoint: Path) -> None:
    model = tiny_config(tiny_checkpoint, offline=True)
    assert ServeConfig.of(model, ServerConfig()).text is None
    given = {"max_batch_size": 3, "model": {"kv_cache": {"num_pages": 7}}}
    server = ServerConfig(text_model=str(llama), text_model_config=given)
    text = ServeConfig.of(model, server).text
    assert text is not None
    assert (text.max_batch_size, text.model.kv_cache.num_pages) == (3, 7)
    assert text.model.model_path == str(llama)
    assert text.offline
    assert text.zmq_endpoint_base != model.zmq_endpoint_base


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_model": "no/such-model"}, "no/such-model"),
        ({"text_model": "LLAMA", "text_model_config": {"max_batch_size": 0}}, "max_batch_size"),
        ({"text_model": "LLAMA", "text_model_config": {"nothing": 1}}, "nothing"),
        ({"text_model_config": {"max_batch_size": 1}}, "needs text_model"),
    ],
)
def test_wrong_configurations_of_the_text_model(
    llama: Path, tiny_checkpoint: Path, values: dict[str, Any], message: str
) -> None:
    if values.get("text_model") == "LLAMA":
        values = {**values, "text_model": str(llama)}
    with pytest.raises(Exception, match=message):
        ServeConfig.of(tiny_config(tiny_checkpoint, offline=True), ServerConfig(**values))
