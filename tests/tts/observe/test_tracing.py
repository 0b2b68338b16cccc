"""Traces of calls: phases, attributes and parent trace, without text."""

from __future__ import annotations

import builtins
from itertools import pairwise
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from llm import ConfigError
from tests.tts.serving import (
    Serving,
    collect_speech,
    error_of,
    run_with_server,
    session_config,
    stream_request,
    unary_request,
)
from tts.factory import Service
from tts.observe.tracing import OpenTelemetryTracer, Phases, create_tracer
from tts.v1 import speech_pb2 as pb
from tts.v1 import text_pb2

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["admission", "queue", "prefill", "generate"]


class Traces:
    """Spans that an application's SDK would export."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def watch(self, served: Serving) -> None:
        served.server.host.calls.tracer = OpenTelemetryTracer(self._provider)

    def roots(self) -> list[ReadableSpan]:
        return [s for s in self._exporter.get_finished_spans() if s.kind is SpanKind.SERVER]

    def children(self, root: ReadableSpan) -> list[ReadableSpan]:
        spans = self._exporter.get_finished_spans()
        own = [s for s in spans if s.parent and s.parent.span_id == root.context.span_id]
        return sorted(own, key=lambda span: span.start_time or 0)


@pytest.fixture
def traces() -> Traces:
    return Traces()


def test_a_speech_call_is_a_span_of_its_phases(service: Service, traces: Traces) -> None:
    async def ask(served: Serving) -> None:
        traces.watch(served)
        await collect_speech(served, "Confidential matter.", request_id="id-7")

    run_with_server(service, ask, log_user_text=True)
    (root,) = traces.roots()
    assert root.name == "tts.v1.SpeechService/SynthesizeStream"
    attributes = dict(root.attributes or {})
    assert attributes["rpc.system"] == "grpc"
    assert attributes["rpc.method"] == "SynthesizeStream"
    assert attributes["rpc.grpc.status_text"] == "OK"
    assert attributes["sonant.request_id"] == "id-7"
    assert attributes["sonant.characters"] == 20
    assert "Confidential" not in str(attributes)
    assert root.status.status_code is StatusCode.UNSET
    assert [event.name for event in root.events] == ["first audio"]

    phases = traces.children(root)
    assert [span.name for span in phases] == PHASES
    for before, after in pairwise(phases):
        assert before.end_time == after.start_time
    assert phases[-1].end_time == root.end_time


def test_the_trace_of_the_caller_is_continued(service: Service, traces: Traces) -> None:
    async def ask(served: Serving) -> None:
        traces.watch(served)
        parent = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),)
        await served.speech.Synthesize(unary_request(), metadata=parent)
        async for _ in served.speech.SynthesizeStream(stream_request()):
            pass

    run_with_server(service, ask)
    told, alone = traces.roots()
    assert told.parent is not None
    assert f"{told.context.trace_id:032x}" == TRACE_ID
    assert f"{told.parent.span_id:016x}" == PARENT_ID
    assert alone.parent is None
    assert alone.context.trace_id != told.context.trace_id


def test_the_span_of_a_failed_call_has_its_error(service: Service, traces: Traces) -> None:
    async def ask(served: Serving) -> None:
        traces.watch(served)
        error = await error_of(served.speech.Synthesize(unary_request("")))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT

    run_with_server(service, ask)
    (root,) = traces.roots()
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "INVALID_REQUEST"
    assert dict(root.attributes or {})["rpc.grpc.status_text"] == "INVALID_ARGUMENT"
    assert traces.children(root) == []  # it was never admitted


def test_text_calls_and_conversations_have_traces(service: Service, traces: Traces) -> None:
    async def ask(served: Serving) -> None:
        traces.watch(served)
        written = text_pb2.GenerateRequest(input={"prompt": "Once"})
        written.config.sampling.max_tokens = 2
        await served.text.Generate(written)
        call = served.speech.StreamingSynthesize(
            iter([session_config(), pb.StreamingSynthesizeRequest(text="Hello.")])
        )
        async for _ in call:
            pass

    run_with_server(service, ask)
    generated, conversation = traces.roots()
    assert [span.name for span in traces.children(generated)] == PHASES
    assert [span.name for span in traces.children(conversation)] == ["admission", "generate"]


@pytest.mark.parametrize(
    ("phases", "total_s", "spans"),
    [
        (Phases(), 1.0, []),
        (Phases(0.25), 1.0, [("admission", 0, 0.25), ("generate", 0.25, 1.0)]),
        (
            Phases(0.25, 0.5, 9.0),
            1.0,
            [
                ("admission", 0, 0.25),
                ("queue", 0.25, 0.75),
                ("prefill", 0.75, 1.0),
                ("generate", 1.0, 1.0),
            ],
        ),
    ],
)
def test_phases_follow_each_other(
    phases: Phases, total_s: float, spans: list[tuple[str, float, float]]
) -> None:
    assert list(phases.spans(total_s)) == spans


def test_traces_are_recorded_only_when_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert create_tracer(False) is None
    assert isinstance(create_tracer(True), OpenTelemetryTracer)
    real_import = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real_import(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'sonant\[trace\]'"):
        create_tracer(True)
