"""Instructions from a request to the prompt, on every way into the service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes import tiny_config
from tests.tts.family_checkpoints import write_qwen3_tts_family
from tests.tts.family_services import configured
from tests.tts.http.http_serving import HttpServing, http_serving, run_with_http
from tests.tts.http.test_http_websocket import CONFIG, END, audio_of, fed, talk
from tests.tts.http.text_requests import chat, choice_of
from tests.tts.serving import (
    Serving,
    error_of,
    fields_of,
    run,
    run_with_server,
    serving,
)
from tts.api.running import RunningService
from tts.api.voice import LoadedVoice
from tts.config.server import ServerConfig
from tts.errors import InvalidRequestError, Precondition, PreconditionError
from tts.factory import Service, create_service
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb

GLAD, TEXT = "Be glad.", "Hello."
CALL: dict[str, Any] = {"seed": 7}
STYLES: tuple[dict[str, Any], ...] = ({}, {"instructions": GLAD})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    folder = write_qwen3_tts_family(tmp_path_factory.mktemp("qwen3_tts") / "model")
    return create_service(configured(folder), ServerConfig(max_audio_duration_s=0.5))


@pytest.fixture(scope="module", autouse=True)
def voice(service: Service) -> Iterator[LoadedVoice]:
    with LoadedVoice(RunningService(service)) as made:
        yield made


@pytest.fixture(scope="module")
def unable(tiny_checkpoint: Path) -> Iterator[LoadedVoice]:
    """A model that reads no instructions."""
    with LoadedVoice(RunningService(create_service(tiny_config(tiny_checkpoint)))) as made:
        yield made


def test_python(voice: LoadedVoice) -> None:
    plain = voice.say(TEXT, **CALL).samples
    glad = voice.say(TEXT, instructions=GLAD, **CALL).samples
    assert not np.array_equal(plain, glad)

    parts = voice.stream(TEXT, instructions=GLAD, **CALL)
    assert np.array_equal(np.concatenate([part.samples for part in parts]), glad)

    async def without_blocking() -> None:
        whole = await voice.asay(TEXT, instructions=GLAD, **CALL)
        parts = voice.astream(TEXT, instructions=GLAD, **CALL)
        streamed = [part.samples async for part in parts]
        assert np.array_equal(whole.samples, glad)
        assert np.array_equal(np.concatenate(streamed), glad)

    asyncio.run(without_blocking())


def test_turns_and_marked_voices(voice: LoadedVoice) -> None:
    """They have the instructions of the request, a turn perhaps its own."""

    def said(*turn: str, instructions: str = "") -> np.ndarray:
        turns: Any = [turn]
        return voice.say(turns, instructions=instructions, **CALL).samples

    plain, glad = said("eric", TEXT), said("eric", TEXT, instructions=GLAD)
    assert not np.array_equal(plain, glad)
    assert np.array_equal(said("eric", TEXT, GLAD), glad)
    assert np.array_equal(said("eric", TEXT, "", instructions=GLAD), glad)
    assert np.array_equal(said("eric", TEXT, GLAD, instructions="Be sad."), glad)
    assert np.array_equal(said("", TEXT, GLAD), said("vivian", TEXT, instructions=GLAD))
    marked: dict[str, Any] = {"markup": "tags", "instructions": GLAD, **CALL}
    assert np.array_equal(voice.say(f"[voice:eric]{TEXT}", **marked).samples, glad)


def test_refusals_in_python(voice: LoadedVoice, unable: LoadedVoice) -> None:
    texts: tuple[Any, ...] = (TEXT, [("", TEXT)])
    for text in texts:
        with pytest.raises(PreconditionError, match="leave instructions out") as refused:
            unable.say(text, instructions=GLAD)
        assert refused.value.reason is Precondition.INSTRUCTIONS
    with pytest.raises(PreconditionError, match=r"leave input.dialogue.turns\[1\].instructions"):
        unable.say([("", TEXT), ("", TEXT, GLAD)])
    with pytest.raises(InvalidRequestError, match="instructions: may have 2000 characters"):
        voice.say(TEXT, instructions="x" * 2001)


def test_turns_over_grpc(service: Service) -> None:
    """A turn's own have the effect of the request's."""

    def asked(turn: str = "", **config: Any) -> pb.SynthesizeRequest:
        turns = [pb.DialogueTurn(text=TEXT, instructions=turn)]
        return pb.SynthesizeRequest(
            config=pb.SynthesisConfig(sampling=common_pb2.SamplingParams(**CALL), **config),
            input=pb.SynthesisInput(dialogue=pb.Dialogue(turns=turns)),
        )

    async def ask(served: Serving) -> None:
        (model,) = (await served.speech.GetServerInfo(pb.GetServerInfoRequest())).models
        assert model.instructions
        requests = asked(), asked(GLAD), asked(instructions=GLAD)
        plain, own, whole = [(await served.speech.Synthesize(r)).audio for r in requests]
        assert plain != own == whole
        error = await error_of(served.speech.Synthesize(asked("x" * 2001)))
        assert fields_of(error) == ["input.dialogue.turns[0].instructions"]

    run_with_server(service, ask)


def test_sessions_and_turns_over_http(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        (model,) = (await served.client.get("/v1/models")).json()["data"]
        assert "instructions" in model["capabilities"]
        heard = []
        for own in STYLES:
            async with talk(served, CONFIG | own, fed(TEXT), END) as talking:
                events = await talking.rest()
            assert events[0]["ignored"] == []
            heard.append(audio_of(events))
        assert heard[0] != heard[1]
        for own in STYLES:
            response = await served.speak(input=None, turns=[{"text": TEXT, **own}])
            assert response.status_code == 200
            assert "x-ignored-fields" not in response.headers
            heard.append(response.content)
        assert heard[2] != heard[3]

    run_with_http(service, ask)


def test_a_model_without_them_ignores_them_over_http(tiny_checkpoint: Path) -> None:
    service = create_service(tiny_config(tiny_checkpoint))

    async def ask(served: HttpServing) -> None:
        turns = [{"text": TEXT}, {"text": TEXT, "instructions": GLAD}]
        response = await served.speak(input=None, turns=turns)
        assert response.status_code == 200
        assert response.headers["x-ignored-fields"] == "instructions"
        async with talk(served, CONFIG | {"instructions": GLAD}, fed(TEXT), END) as talking:
            assert (await talking.next())["ignored"] == ["instructions"]
            await talking.rest()

    run_with_http(service, ask)
    asyncio.run(service.close())


def test_a_speech_server_gets_them(service: Service, text_checkpoint: Path) -> None:
    writer = create_service(
        tiny_config(text_checkpoint, sampling={"enable_structured_output": True})
    )
    told: dict[str, Any] = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "greeting", "schema": {"const": TEXT}},
        },
        "modalities": ["text", "audio"],
    }

    async def scenario() -> None:
        async with serving(service) as speaker:
            address = speaker.server.address
            async with http_serving(writer, speech_server=address) as served:
                heard = []
                for own in STYLES:
                    voice = {"voice": "eric", "format": "pcm16", "seed": 7, **own}
                    response = await chat(served, audio=voice, **told)
                    assert "x-ignored-fields" not in response.headers
                    heard.append(choice_of(response)["message"]["audio"]["data"])
                assert heard[0] != heard[1]

    run(scenario())
    asyncio.run(writer.close())
