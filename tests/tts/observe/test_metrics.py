"""Metrics: what is counted, and how a scrape shows it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from llm import HistogramCounter
from llm.runner.graphs.stats import GraphStats
from llm.speculative.metrics import SpeculativeDecodingMetrics
from tests.tts.serving import (
    Serving,
    collect_speech,
    error_of,
    run,
    run_with_server,
    session_config,
    stream_request,
    unary_request,
)
from tts.factory import Service
from tts.observe.engine_status import AudioStats, EngineStatus, ReplicatedStatus
from tts.observe.metrics import Metrics
from tts.v1 import speech_pb2 as pb

SPEECH = {"grpc_service": "tts.v1.SpeechService"}


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


def test_calls_are_counted_by_method_and_code(service: Service) -> None:
    async def ask(served: Serving) -> None:
        await collect_speech(served)
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

    run_with_server(service, ask)


def test_audio_is_counted(service: Service) -> None:
    async def ask(served: Serving) -> None:
        spoken = await collect_speech(served)
        seconds = sum(chunk.sample_count for chunk in spoken.audio) / 16_000
        assert served.metric("sonant_audio_seconds_total") == pytest.approx(seconds)
        assert served.metric("sonant_time_to_first_audio_seconds_count") == 1
        assert served.metric("sonant_real_time_factor_count") == 1
        usage = spoken.done.usage
        assert served.metric("sonant_input_characters_total") == usage.input_characters
        assert served.metric("sonant_prompt_tokens_total") == usage.prompt_tokens
        assert served.metric("sonant_output_tokens_total") == usage.output_tokens

    run_with_server(service, ask)


def test_a_conversations_first_audio_is_timed_from_its_first_text(service: Service) -> None:
    """The server's time lies within the client's, from its first text to its first audio."""

    async def ask(served: Serving) -> None:
        call = served.speech.StreamingSynthesize()
        await call.write(session_config())
        await call.read()
        await asyncio.sleep(1)  # which the time since the call began would have in it
        asked_s = time.monotonic()
        await call.write(pb.StreamingSynthesizeRequest(text="Hello there. "))
        assert (await call.read()).WhichOneof("event") == "audio"
        heard_s = time.monotonic() - asked_s
        await call.done_writing()
        while (await call.read()).WhichOneof("event") != "done":
            pass
        assert await call.read() is grpc.aio.EOF
        assert served.metric("sonant_time_to_first_audio_seconds_count") == 1
        assert 0 < served.metric("sonant_time_to_first_audio_seconds_sum") <= heard_s

    run_with_server(service, ask)


def test_running_and_waiting_requests_are_gauges(service: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.StreamingSynthesize()
        await call.write(session_config())
        await call.read()
        waiting = served.speech.SynthesizeStream(stream_request())
        await until(lambda: served.metric("sonant_requests", state="waiting") == 1)
        assert served.metric("sonant_requests", state="running") == 1
        waiting.cancel()
        await call.done_writing()
        assert (await call.read()).WhichOneof("event") == "done"

    run_with_server(service, ask, max_concurrent_requests=1)


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


def test_engine_metrics_of_a_running_server_are_updated(service: Service) -> None:
    """One utterance updates batches by kind and size, tokens, times, ends, audio."""

    async def ask(served: Serving) -> None:
        spoken = await collect_speech(served)
        engine = served.server.host.metrics.engine
        old = engine.status
        await until(lambda: engine.status is not old)  # and no request runs
        reasons = ("stop", "length")
        assert sum(served.metric("sonant_sequences_finished_total", reason=r) for r in reasons) > 0
        for kind in ("extend", "decode"):
            batches = served.metric("sonant_batch_rows_count", mode=kind)
            assert batches > 0
            assert served.metric("sonant_batch_rows_sum", mode=kind) >= batches
            for name in ("input_tokens", "context_tokens", "schedule_seconds", "execute_seconds"):
                assert served.metric(f"sonant_batch_{name}_count", mode=kind) == batches
                assert served.metric(f"sonant_batch_{name}_sum", mode=kind) > 0
        name = "sonant_batch_input_tokens_sum"
        fed = sum(served.metric(name, mode=kind) for kind in ("extend", "mixed"))
        assert fed >= served.metric("sonant_prefix_cache_miss_tokens_total") > 0
        tokens = spoken.done.usage.output_tokens
        assert served.metric("sonant_inter_token_seconds_count") >= tokens - 2
        assert served.metric("sonant_time_to_first_token_seconds_count") >= 1
        assert served.metric("sonant_block_decode_seconds_count") >= len(spoken.audio)
        sent = served.metric("sonant_audio_seconds_total")
        assert served.metric("sonant_audio_rendered_seconds_total") >= sent > 0
        assert served.metric("sonant_buffered_messages") == 0
        assert served.metric("sonant_failed_batches_total") == 0

    run_with_server(service, ask)


def test_replicas_have_a_label(service: Service) -> None:
    """Sums over the label are those of all; one that is lost or drains is not up."""
    status = run(service.client.status())
    busy = replace(status, running=3, used_pages=5)
    lost = replace(status, running=1, is_alive=False)
    metrics = Metrics()
    metrics.engine.status = ReplicatedStatus.of(
        (busy, lost, replace(status, running=0, is_draining=True))
    )
    assert metrics.engine.status.is_alive
    assert metrics.engine.status.running == 4
    for replica, running, is_up in (("0", 3, 1), ("1", 1, 0), ("2", 0, 0)):
        state = {"state": "running", "replica": replica}
        assert metrics.value("sonant_engine_sequences", **state) == running
        assert metrics.value("sonant_replica_up", replica=replica) == is_up
    assert metrics.value("sonant_kv_pages", state="used", replica="0") == 5
    names = re.findall(r"^# TYPE (\S+) ", metrics.text(), re.M)
    assert len(names) == len(set(names))
    assert "sonant_batch_rows" in names
    metrics.engine.status = status
    assert metrics.value("sonant_engine_sequences", state="running") == status.running
    assert "replica" not in metrics.text(), "one engine has no label"


def test_drafts_are_counted_by_position(service: Service) -> None:
    status = run(service.client.status())
    assert status.stats is not None
    drafts = SpeculativeDecodingMetrics(9, drafted=(9, 8), accepted=(7, 3))
    metrics = Metrics()
    metrics.engine.status = replace(status, stats=replace(status.stats, speculative=drafts))
    for name, counts in (("drafted", (9, 8)), ("accepted", (7, 3))):
        for position, count in enumerate(counts):
            labels = {"position": str(position)}
            assert metrics.value(f"sonant_{name}_tokens_total", **labels) == count


def test_forwards_are_counted_by_execution_mode(service: Service) -> None:
    status = run(service.client.status())
    assert status.stats is not None
    metrics = Metrics()
    metrics.engine.status = status
    assert "sonant_decode_forwards" not in metrics.text()  # on a CPU nothing is captured
    graphs = GraphStats(3, replays=40, eager_decodes=2, prompt_replays=7, eager_prompts=1)
    metrics.engine.status = replace(status, stats=replace(status.stats, graphs=graphs))
    assert metrics.value("sonant_decode_forwards_total", run="graph") == 40
    assert metrics.value("sonant_decode_forwards_total", run="eager") == 2
    assert metrics.value("sonant_prompt_forwards_total", run="graph") == 7
    assert metrics.value("sonant_prompt_forwards_total", run="eager") == 1


def test_the_counts_of_a_histogram_become_cumulative() -> None:
    """Semantics of the format: each bucket counts what is at most its bound."""
    tally = HistogramCounter((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        tally.observe(value)
    metrics = Metrics()
    figures = AudioStats(tally.snapshot(), HistogramCounter((1,)).snapshot(), 3.5, 2)
    metrics.engine.status = EngineStatus(0, 0, 0, 0, 0, 0, 0, audio=figures)
    name = "sonant_block_decode_seconds"
    assert [metrics.value(f"{name}_bucket", le=le) for le in ("1.0", "2.0", "+Inf")] == [2, 3, 4]
    assert (metrics.value(f"{name}_count"), metrics.value(f"{name}_sum")) == (4, 10.0)
    assert metrics.value("sonant_audio_rendered_seconds_total") == 3.5
    assert metrics.value("sonant_buffered_messages") == 2


WHAT_METRICS_MUST_SHOW = {
    "batches by type and size": "sonant_batch_rows",
    "time to make a batch": "sonant_batch_schedule_seconds",
    "time to run a batch": "sonant_batch_execute_seconds",
    "input tokens of a batch": "sonant_batch_input_tokens",
    "context tokens of a batch": "sonant_batch_context_tokens",
    "pending, decode set, running": "sonant_engine_sequences",
    "used and total pages": "sonant_kv_pages",
    "prefix hits": "sonant_prefix_cache_hit_tokens_total",
    "prefix misses": "sonant_prefix_cache_miss_tokens_total",
    "preemptions": "sonant_preemptions_total",
    "time to first token": "sonant_time_to_first_token_seconds",
    "time to first audio": "sonant_time_to_first_audio_seconds",
    "inter-token gap": "sonant_inter_token_seconds",
    "audio produced": "sonant_audio_rendered_seconds_total",
    "real-time factor": "sonant_real_time_factor",
    "silence of players": "sonant_stream_underrun_seconds",
    "block decode time": "sonant_block_decode_seconds",
    "buffered messages": "sonant_buffered_messages",
    "acceptance by position": "sonant_accepted_tokens_total",
    "empty forwards": "sonant_empty_forwards_total",
    "sequences ended by reason": "sonant_sequences_finished_total",
    "what multiplies": "sonant_linear_layers",
    "calls failed by reason": "sonant_errors_total",
    "cancelled until free": "sonant_cancel_seconds",
}


def test_all_required_metrics_exist(service: Service) -> None:
    """Each name in `WHAT_METRICS_MUST_SHOW` is exported."""
    status = run(service.client.status())
    assert status.stats is not None
    drafts = SpeculativeDecodingMetrics(1, drafted=(1,), accepted=(1,))
    metrics = Metrics()
    metrics.engine.status = replace(status, stats=replace(status.stats, speculative=drafts))
    shown = set(re.findall(r"^# TYPE (\S+) ", metrics.text(), re.M))
    missing = {what for what, name in WHAT_METRICS_MUST_SHOW.items() if name not in shown}
    assert not missing
    assert metrics.value("sonant_engine_sequences", state="decoding") == 0


def test_names_follow_the_conventions(service: Service) -> None:
    metrics = Metrics()
    metrics.engine.status = run(service.client.status())
    names = re.findall(r"^# TYPE (\S+) (\S+)$", metrics.text(), re.M)
    assert len(names) > 30
    for name, kind in names:
        assert name.startswith(("sonant_", "grpc_server_"))
        assert name.endswith("_total") == (kind == "counter") or name.endswith("_created")


def test_servers_do_not_share_counters() -> None:
    one, two = Metrics(), Metrics()
    one.audio.inc(2)
    assert one.value("sonant_audio_seconds_total") == 2
    assert two.value("sonant_audio_seconds_total") == 0


def test_checks_are_counted_by_result() -> None:
    metrics = Metrics()
    for results in (("sound",), ("skipped", "sound"), ("cut", "skipped", "cut")):
        metrics.segment_checked(results)

    def counts(name: str, label: str) -> dict[str, float]:
        reasons = ("sound", "skipped", "cut")
        return {reason: metrics.value(f"{name}_total", **{label: reason}) for reason in reasons}

    assert counts("sonant_speech_checks", "result") == {"sound": 2, "skipped": 2, "cut": 2}
    assert counts("sonant_speech_retries", "reason") == {"sound": 0, "skipped": 2, "cut": 1}
    assert counts("sonant_speech_given_up", "reason") == {"sound": 0, "skipped": 0, "cut": 1}


def test_a_requests_retries_are_in_its_result_and_in_the_metrics(service: Service) -> None:
    """With these weights and this seed the first attempt does not end, and the second does."""

    async def ask(served: Serving) -> None:
        seeded = {"max_tokens": None, "seed": 8}
        checked = {**seeded, "speech_check": pb.SPEECH_CHECK_ON}
        whole = await served.speech.Synthesize(unary_request("No.", **checked))
        streamed = await collect_speech(served, "No.", **checked)
        assert whole.done.num_retried_segments == streamed.done.num_retried_segments == 1
        assert whole.audio == streamed.data
        plain = await served.speech.Synthesize(unary_request("No.", **seeded))
        assert plain.done.num_retried_segments == 0
        assert plain.audio != whole.audio
        await until(lambda: served.metric("sonant_speech_retries_total", reason="cut") == 2)
        assert served.metric("sonant_speech_checks_total", result="cut") == 2
        assert served.metric("sonant_speech_checks_total", result="sound") == 2
        assert served.metric("sonant_speech_given_up_total", reason="cut") == 0

    run_with_server(service, ask)
