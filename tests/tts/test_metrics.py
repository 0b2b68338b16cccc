"""What is counted, and that a scrape shows it."""

from __future__ import annotations

import asyncio
import re

import grpc
import pytest

from tests.tts.serving import (
    Serving,
    error_of,
    hear,
    serve_and,
    session_config,
    stream_request,
    unary_request,
)
from tts.engine_client import EngineStatus
from tts.factory import Service
from tts.metrics import Metrics
from tts.v1 import speech_pb2 as pb

SPEECH = {"grpc_service": "tts.v1.SpeechService"}


def test_calls_are_counted_by_method_and_code(service: Service) -> None:
    async def ask(served: Serving) -> None:
        await hear(served)
        await served.speech.Synthesize(unary_request())
        await error_of(served.speech.Synthesize(unary_request("")))

        def handled(method: str, code: str) -> float:
            labels = {**SPEECH, "grpc_method": method, "grpc_code": code}
            return served.metric("grpc_server_handled_total", **labels)

        assert handled("SynthesizeStream", "OK") == 1
        assert handled("Synthesize", "OK") == 1
        assert handled("Synthesize", "INVALID_ARGUMENT") == 1
        started = served.metric("grpc_server_started_total", **SPEECH, grpc_method="Synthesize")
        assert started == 2
        errors = served.metric(
            "sonant_errors_total", grpc_code="INVALID_ARGUMENT", reason="INVALID_REQUEST"
        )
        assert errors == 1
        took = served.metric(
            "grpc_server_handling_seconds_count", **SPEECH, grpc_method="Synthesize"
        )
        assert took == 2

    serve_and(service, ask)


def test_audio_is_counted(service: Service) -> None:
    async def ask(served: Serving) -> None:
        spoken = await hear(served)
        seconds = sum(chunk.sample_count for chunk in spoken.audio) / 16_000
        assert served.metric("sonant_audio_seconds_total") == pytest.approx(seconds)
        assert served.metric("sonant_time_to_first_audio_seconds_count") == 1
        assert served.metric("sonant_real_time_factor_count") == 1
        usage = spoken.done.usage
        assert served.metric("sonant_input_characters_total") == usage.input_characters
        assert served.metric("sonant_prompt_tokens_total") == usage.prompt_tokens
        assert served.metric("sonant_output_tokens_total") == usage.output_tokens

    serve_and(service, ask)


def test_a_conversations_first_audio_is_timed_from_its_first_text(service: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.StreamingSynthesize()
        await call.write(session_config())
        await call.read()
        await asyncio.sleep(0.5)
        await call.write(pb.StreamingSynthesizeRequest(text="Hello there. "))
        await call.done_writing()
        while (await call.read()).WhichOneof("event") != "done":
            pass
        assert await call.read() is grpc.aio.EOF
        assert served.metric("sonant_time_to_first_audio_seconds_count") == 1
        assert served.metric("sonant_time_to_first_audio_seconds_sum") < 0.45

    serve_and(service, ask)


def test_what_runs_and_waits_is_seen_while_it_does(service: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.StreamingSynthesize()
        await call.write(session_config())
        await call.read()
        waiting = served.speech.SynthesizeStream(stream_request())
        for _ in range(200):
            if served.metric("sonant_requests", state="waiting"):
                break
            await asyncio.sleep(0.01)
        assert served.metric("sonant_requests", state="running") == 1
        assert served.metric("sonant_requests", state="waiting") == 1
        waiting.cancel()
        await call.done_writing()
        assert (await call.read()).WhichOneof("event") == "done"

    serve_and(service, ask, max_concurrent_requests=1)


def test_the_engines_numbers_are_exposed() -> None:
    metrics = Metrics()
    assert "sonant_kv_pages" not in metrics.text()
    metrics.engine.status = EngineStatus(3, 2, 40, 512, 5, 7, 900)
    assert metrics.value("sonant_engine_sequences", state="running") == 3
    assert metrics.value("sonant_engine_sequences", state="waiting") == 2
    assert metrics.value("sonant_kv_pages", state="used") == 40
    assert metrics.value("sonant_kv_pages", state="total") == 512
    assert metrics.value("sonant_audio_streams") == 5
    assert metrics.value("sonant_preemptions_total") == 7
    assert metrics.value("sonant_prefix_cache_hit_tokens_total") == 900


def test_a_running_servers_engine_is_watched(service: Service) -> None:
    async def ask(served: Serving) -> None:
        await hear(served)
        assert "sonant_kv_pages" in served.server.host.metrics.text()

    serve_and(service, ask)


def test_names_follow_the_conventions() -> None:
    metrics = Metrics()
    metrics.engine.status = EngineStatus(0, 0, 0, 0, 0, 0, 0)
    names = re.findall(r"^# TYPE (\S+) (\S+)$", metrics.text(), re.M)
    assert len(names) > 12
    for name, kind in names:
        assert name.startswith(("sonant_", "grpc_server_"))
        assert name.endswith("_total") == (kind == "counter") or name.endswith("_created")


def test_servers_do_not_share_counters() -> None:
    one, two = Metrics(), Metrics()
    one.audio.inc(2)
    assert one.value("sonant_audio_seconds_total") == 2
    assert two.value("sonant_audio_seconds_total") == 0
