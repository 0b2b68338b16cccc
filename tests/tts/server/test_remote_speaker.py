"""Texts of one server that are spoken by another one, over real connections."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import pytest
import soundfile
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from llm import ConfigError
from tests.fakes import build_embedding_checkpoint, tiny_config, wait_until_idle
from tests.tts.http.http_serving import HttpServing, error_of, http_serving
from tests.tts.http.text_requests import chat, choice_of
from tests.tts.server.test_connection_age import forwarding
from tests.tts.server.test_spoken_text import (
    LONG_STORY,
    STORY,
    collect,
    speech_events,
    spoken,
    telling,
    text_events,
)
from tests.tts.server.test_text_service import whole
from tests.tts.serving import (
    Serving,
    error_of_reading,
    fields_of,
    grouped,
    health,
    reason_of,
    run,
    run_with_server,
    serving,
    stream_request,
)
from tts.config.server import ServerConfig
from tts.errors import SpeechServerLostError, SynthesisError
from tts.factory import Service, create_service, with_text_model
from tts.server.remote_speaker import MAX_VOICES
from tts.server.server import SPOKEN_TEXT, exposure_warnings
from tts.server.status import DETAILS_KEY, error_of_call, status_of
from tts.v1 import speech_pb2, speech_pb2_grpc

Status = health_pb2.HealthCheckResponse
CERTIFICATES = Path(__file__).parents[1] / "tls"
TLS = {"tls_cert": CERTIFICATES / "server.pem", "tls_key": CERTIFICATES / "server.key"}
TRUST = {"speech_server_ca": CERTIFICATES / "ca.pem"}
WORDS = speech_pb2.TIMESTAMP_GRANULARITY_WORD
SPOKEN_CHAT: dict[str, Any] = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "story", "schema": {"const": STORY}},
    },
    "max_tokens": 200,
    "modalities": ["text", "audio"],
}


@pytest.fixture(scope="module")
def voice(tiny_checkpoint: Path) -> Iterator[Service]:
    yield from idle_at_the_end(create_service(tiny_config(tiny_checkpoint)))


@pytest.fixture(scope="module")
def writer(text_checkpoint: Path) -> Iterator[Service]:
    config = tiny_config(text_checkpoint, sampling={"enable_structured_output": True})
    yield from idle_at_the_end(create_service(config))


def idle_at_the_end(service: Service) -> Iterator[Service]:
    yield service
    asyncio.run(wait_until_idle(service.client))
    asyncio.run(service.close())


async def ask_spoken(served: Serving, **synthesis: Any) -> list[Any]:
    return await collect(served, spoken(telling(STORY), **synthesis))


def test_speech_is_that_of_one_server_with_both_models(
    voice: Service, writer: Service, tiny_checkpoint: Path
) -> None:
    """All events but the timings of the machine are equal, behind TLS and a token, too."""
    together = create_service(tiny_config(tiny_checkpoint))
    wanted = {"timestamps": speech_pb2.TIMESTAMP_GRANULARITY_SEGMENT, "request_id": "mine"}

    async def scenario() -> None:
        both = with_text_model(together, writer)
        async with serving(both) as served:
            expected = await ask_spoken(served, **wanted)
        secret = {"auth_token": "abc"}
        async with serving(voice, **secret, **TLS) as speaker:
            address = {"speech_server": speaker.server.address, "speech_server_token": "abc"}
            async with serving(writer, **address, **TRUST) as served:
                heard = await ask_spoken(served, **wanted)
        assert comparable(heard) == comparable(expected)
        assert sum(r.speech.audio.sample_count for r in heard) > 10_000

    run(scenario())
    asyncio.run(together.client.close())


def comparable(responses: list[Any]) -> list[Any]:
    """Return the events of the text, then those of its speech, without timings and made-up ids."""
    texts, speech = text_events(responses), speech_events(responses)
    texts[0].started.ClearField("request_id")
    for done in (texts[-1].done, speech[-1].done):
        done.ClearField("timings")
    return [*texts, *speech]


def test_audio_begins_before_the_text_has_ended(voice: Service, writer: Service) -> None:
    async def scenario() -> None:
        async with (
            serving(voice) as speaker,
            serving(writer, speech_server=speaker.server.address) as served,
        ):
            responses = await collect(served, spoken(telling(LONG_STORY)))
            kinds = [r.text.WhichOneof("event") or r.speech.WhichOneof("event") for r in responses]
            assert kinds.index("audio") < len(kinds) - 1 - kinds[::-1].index("delta")
            texts, heard = text_events(responses), grouped(speech_events(responses))
            assert heard.audio[-1].text_end == sum(len(event.delta.text) for event in texts)
            assert served.metric("sonant_time_to_first_audio_seconds_count") == 1

    run(scenario())


def test_a_cancellation_reaches_the_speech_server(voice: Service, writer: Service) -> None:
    async def scenario() -> None:
        async with (
            serving(voice) as speaker,
            serving(writer, speech_server=speaker.server.address) as served,
        ):
            call = served.text.GenerateSpeech(spoken(telling(" ".join([LONG_STORY] * 3))))
            while (await call.read()).speech.WhichOneof("event") != "audio":
                pass
            assert speaker.server.host.calls.num_open == 1
            call.cancel()
            assert await speaker.server.host.calls.wait_idle(60)
            for service in (voice, writer):
                await wait_until_idle(service.client)

    run(scenario())


def test_a_deadline_ends_both_calls(voice: Service, writer: Service) -> None:
    async def scenario() -> None:
        async with (
            serving(voice) as speaker,
            serving(writer, speech_server=speaker.server.address) as served,
        ):
            request = spoken(telling(" ".join([LONG_STORY] * 3)))
            error = await error_of_reading(served.text.GenerateSpeech(request, timeout=0.3))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await speaker.server.host.calls.wait_idle(60)

    run(scenario())


@pytest.mark.parametrize(
    ("synthesis", "code", "reason", "fields"),
    [
        (
            {"speaking_rate": 9.0},
            "INVALID_ARGUMENT",
            "INVALID_REQUEST",
            ["synthesis.speaking_rate"],
        ),
        (
            {"voice": speech_pb2.VoiceSelection(name="no_one")},
            "NOT_FOUND",
            "VOICE_NOT_FOUND",
            [],
        ),
        ({"model": "another"}, "NOT_FOUND", "MODEL_NOT_FOUND", []),
        ({"timestamps": WORDS}, "FAILED_PRECONDITION", "WORD_TIMESTAMPS_UNAVAILABLE", []),
    ],
)
def test_refusals_of_the_speech_server(
    voice: Service,
    writer: Service,
    synthesis: dict[str, Any],
    code: str,
    reason: str,
    fields: list[str],
) -> None:
    async def scenario() -> None:
        async with (
            serving(voice) as speaker,
            serving(writer, speech_server=speaker.server.address) as served,
        ):
            call = served.text.GenerateSpeech(spoken(telling(STORY), **synthesis))
            error = await error_of_reading(call)
            assert (error.code().name, reason_of(error)) == (code, reason)
            assert not fields or fields_of(error) == fields
            await wait_until_idle(writer.client)

    run(scenario())


@pytest.mark.parametrize(
    "limits",
    [{"max_concurrent_requests": 1, "max_queued_requests": 0}, {"max_streams_per_client": 2}],
)
def test_a_full_speech_server_is_busy(
    voice: Service, writer: Service, limits: dict[str, int]
) -> None:
    """Its queue is full, or it takes no more calls from the address of its one client."""

    async def scenario() -> None:
        async with (
            serving(voice, **limits) as speaker,
            serving(writer, speech_server=speaker.server.address) as served,
        ):
            call = speaker.speech.SynthesizeStream(stream_request(" ".join([LONG_STORY] * 3)))
            assert (await call.read()).WhichOneof("event") == "started"
            error = await error_of_reading(served.text.GenerateSpeech(spoken(telling(STORY))))
            call.cancel()
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(error) == "QUEUE_FULL"
            await wait_until_idle(writer.client)

    run(scenario())


@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_wrong_token_is_no_fault_of_the_client(
    voice: Service, writer: Service, token: str | None
) -> None:
    async def scenario() -> None:
        async with serving(voice, auth_token="right") as speaker:
            address = speaker.server.address
            async with serving(writer, speech_server=address, speech_server_token=token) as served:
                await assert_speechless(served)

    run(scenario())


async def assert_speechless(served: Serving) -> None:
    """Assert that texts are generated, but not spoken, and that the health says so."""
    error = await error_of_reading(served.text.GenerateSpeech(spoken(telling(STORY))))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(error) == "SPEECH_SERVER_LOST"
    assert (await whole(served)).token_ids
    assert await health(served.channel) == Status.SERVING
    assert await health(served.channel, SPOKEN_TEXT) == Status.NOT_SERVING


def test_a_status_of_grpc_itself_is_a_lost_connection() -> None:
    """INTERNAL is the speech server's failure only if it says so."""
    nothing, internal = grpc.aio.Metadata(), grpc.StatusCode.INTERNAL
    broken = grpc.aio.AioRpcError(internal, nothing, nothing, "Internal error from Core")
    assert isinstance(error_of_call(broken), SpeechServerLostError)
    status = status_of(SynthesisError("no codes"))
    details = grpc.aio.Metadata((DETAILS_KEY, status.to_proto().SerializeToString()))
    failed = grpc.aio.AioRpcError(status.code, nothing, details, status.message)
    assert isinstance(error_of_call(failed), SynthesisError)


class OtherVersion(speech_pb2_grpc.SpeechServiceServicer):
    """A speech server whose list of voices has no end, and whose events are not known here."""

    def __init__(self, model: speech_pb2.ModelInfo, response: Any) -> None:
        self._model, self._response = model, response
        self.num_pages = 0

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return speech_pb2.GetServerInfoResponse(models=[self._model])

    async def ListVoices(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.num_pages += 1
        voices = [speech_pb2.Voice(name=f"v{self.num_pages}_{i}") for i in range(1000)]
        return speech_pb2.ListVoicesResponse(voices=voices, next_page_token="more")

    async def StreamingSynthesize(self, requests: Any, context: Any) -> Any:  # noqa: N802
        yield self._response


MODEL = speech_pb2.ModelInfo(name="m", codec="c", native_sample_rate_hertz=24_000)
NO_EVENT = speech_pb2.StreamingSynthesizeResponse()
UNKNOWN_ENCODING = speech_pb2.StreamingSynthesizeResponse(
    started=speech_pb2.SynthesisStarted(
        audio_format=speech_pb2.AudioFormat(encoding=99)  # type: ignore[arg-type]
    )
)


@pytest.mark.parametrize(
    ("model", "response", "num_pages"),
    [
        (MODEL, NO_EVENT, MAX_VOICES // 1000),
        (MODEL, UNKNOWN_ENCODING, MAX_VOICES // 1000),
        (speech_pb2.ModelInfo(name="m", codec="c"), NO_EVENT, 0),
    ],
)
def test_a_speech_server_of_another_version(
    writer: Service, model: speech_pb2.ModelInfo, response: Any, num_pages: int
) -> None:
    async def scenario() -> None:
        other, server = OtherVersion(model, response), grpc.aio.server()
        speech_pb2_grpc.add_SpeechServiceServicer_to_server(other, server)
        is_well = grpc_health.aio.HealthServicer()
        await is_well.set("tts.v1.SpeechService", Status.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(is_well, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            async with serving(writer, speech_server=address) as served:
                assert other.num_pages == num_pages
                call = served.text.GenerateSpeech(spoken(telling(STORY)))
                error = await error_of_reading(call)
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert reason_of(error) == "SPEECH_SERVER_LOST"
                await wait_until_idle(writer.client)
        finally:
            await server.stop(0)

    run(scenario())


def test_a_server_without_a_voice_is_no_speech_server(writer: Service) -> None:
    async def scenario() -> None:
        async with (
            serving(writer) as speaker,
            serving(writer, speech_server=speaker.server.address) as served,
        ):
            await assert_speechless(served)

    run(scenario())


def test_another_server_of_the_address_replaces_one_that_drains(
    voice: Service, writer: Service
) -> None:
    """The health of the first connection's server is followed until it is not SERVING."""

    async def ask(served: Serving, one: Serving) -> None:
        draining = asyncio.create_task(one.server.drain(1000, 0))
        while await health(served.channel, SPOKEN_TEXT) == Status.SERVING:
            await asyncio.sleep(0.01)
        while await health(served.channel, SPOKEN_TEXT) != Status.SERVING:
            await asyncio.sleep(0.01)
        assert speech_events(await ask_spoken(served))[-1].done.usage.output_tokens > 0
        draining.cancel()

    async def scenario() -> None:
        async with (
            serving(voice, max_connection_age_s=0.1) as one,
            serving(voice) as two,
            forwarding([one.server.port, two.server.port]) as (balancer, address),
            serving(writer, speech_server=address) as served,
        ):
            while balancer.num_connections < 2:
                await ask_spoken(served)
            await ask(served, one)

    run(scenario())


def test_calls_that_are_spoken_need_the_text_model_too(
    voice: Service, text_checkpoint: Path
) -> None:
    mortal = create_service(tiny_config(text_checkpoint))

    async def scenario() -> None:
        async with (
            serving(voice) as speaker,
            http_serving(mortal, speech_server=speaker.server.address) as served,
        ):
            assert await health(served.grpc.channel, SPOKEN_TEXT) == Status.SERVING
            await mortal.client.close()
            while await health(served.grpc.channel, SPOKEN_TEXT) == Status.SERVING:
                await asyncio.sleep(0.01)
            assert (await served.client.get("/health")).json() == {
                "status": "NOT_SERVING",
                "speech_server": "SERVING",
            }

    run(scenario())


def test_an_unknown_certificate_is_not_trusted(voice: Service, writer: Service) -> None:
    async def scenario() -> None:
        async with serving(voice, **TLS) as speaker:
            address = speaker.server.address
            async with serving(writer, speech_server=address, speech_server_tls=True) as served:
                await assert_speechless(served)

    run(scenario())


def test_other_calls_for_speech_are_refused(voice: Service, writer: Service) -> None:
    async def ask(served: Serving) -> None:
        error = await error_of_reading(
            served.speech.SynthesizeStream(speech_pb2.SynthesizeStreamRequest())
        )
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(error) == "SPEECH_UNAVAILABLE"
        assert "speech server" in str(error.details())
        info = await served.speech.GetServerInfo(speech_pb2.GetServerInfoRequest())
        assert [model.codec for model in info.models] == [""]

    async def scenario() -> None:
        async with (
            serving(voice) as speaker,
            serving(writer, speech_server=speaker.server.address) as served,
        ):
            await ask(served)

    run(scenario())


def test_a_spoken_chat_over_http(voice: Service, writer: Service) -> None:
    """OpenAI's voices stand for those of the speech server; whole files state their length."""

    async def ask(served: HttpServing, speaker: Serving) -> None:
        audio = {"voice": "alloy", "format": "wav", "seed": 7}
        response = await chat(served, **SPOKEN_CHAT, audio=audio)
        found = choice_of(response)["message"]["audio"]
        assert json.loads(found["transcript"]) == STORY
        samples, rate = soundfile.read(BytesIO(b64decode(found["data"])))
        assert len(samples) > rate
        usage = response.json()["usage"]["completion_tokens_details"]
        assert usage["audio_tokens"] > 0
        refused = await chat(served, **SPOKEN_CHAT, audio={"voice": "no_one"})
        assert (refused.status_code, error_of(refused)["param"]) == (404, "voice")
        wrong = await chat(served, **SPOKEN_CHAT, audio={**audio, "speed": 9.0})
        assert (wrong.status_code, error_of(wrong)["param"]) == (400, "audio.speed")
        assert (await served.client.get("/health")).json() == {
            "status": "SERVING",
            "speech_server": "SERVING",
        }
        await speaker.server.drain(0, 0)
        while (await served.client.get("/health")).json()["speech_server"] == "SERVING":
            await asyncio.sleep(0.01)
        assert (await served.client.get("/health")).status_code == 200
        assert (await chat(served, **SPOKEN_CHAT, audio=audio)).status_code == 503
        assert (await chat(served)).status_code == 200

    async def scenario() -> None:
        async with (
            serving(voice) as speaker,
            http_serving(writer, speech_server=speaker.server.address) as served,
        ):
            await ask(served, speaker)

    run(scenario())


def test_models_that_need_no_speech_server(tiny_checkpoint: Path, tmp_path: Path) -> None:
    server = ServerConfig(speech_server="localhost:1")
    with pytest.raises(ConfigError, match="speaks itself"):
        create_service(tiny_config(tiny_checkpoint), server)
    embedder = tiny_config(build_embedding_checkpoint(tmp_path / "embedder"))
    with pytest.raises(ConfigError, match="embeds"):
        create_service(embedder, server)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speech_server": "no-port"}, "HOST:PORT"),
        ({"speech_server": "http://host:1"}, "HOST:PORT"),
        ({"speech_server": "host:0"}, "HOST:PORT"),
        ({"speech_server": "[::1]:65536"}, "HOST:PORT"),
        ({"speech_server_token": "abc"}, "need speech_server"),
        ({"speech_server_tls": True}, "need speech_server"),
        ({"speech_server": "host:1", "text_model": "x"}, "exclude"),
        ({"speech_server": "host:1", "speech_server_token": ""}, "printable"),
    ],
)
def test_wrong_configurations(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig(**values)


def test_a_missing_ca_is_reported_at_the_start(writer: Service, tmp_path: Path) -> None:
    async def ask(_: Serving) -> None:
        raise AssertionError("it started")

    values = {"speech_server": "[::1]:1", "speech_server_ca": tmp_path / "none.pem"}
    with pytest.raises(ConfigError, match=r"none\.pem"):
        run_with_server(writer, ask, **values)


def test_a_token_without_encryption_is_warned_of() -> None:
    values = {"speech_server_token": "abc"}
    far = ServerConfig(speech_server="voices.example:50051", **values)
    assert "speech_server_tls" in exposure_warnings(far)[0]
    near = ServerConfig(speech_server="[::1]:50051", **values)
    assert exposure_warnings(near) == []
