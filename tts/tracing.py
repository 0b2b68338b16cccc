"""One OpenTelemetry trace for each call, where that is asked for and the package is there.

    tts.v1.SpeechService/SynthesizeStream ├───────────────────────────────┤
        admission                         ├─┤
        queue                               ├──┤       waits for the engine's first step
        prefill                                ├──┤    until the first token
        generate                                  ├───────────────────────┤

Only OpenTelemetry's API is used: where spans go is up to the SDK that the environment sets up, and
without one they go nowhere. A `traceparent` in a call's metadata makes the call part of that trace.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llm import ConfigError
from tts import __version__
from tts.logs import Fields

if TYPE_CHECKING:
    from opentelemetry import trace

NANOSECONDS = 1e9
NAMES = {"code": "rpc.grpc.status_text"}  # others are "sonant.NAME"
NOT_ATTRIBUTES = {"method", "text"}  # in the span's name; never in a trace


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds that a call spent, one phase after the other; None: it did not come to that."""

    admission_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None

    def spans(self, total_s: float) -> Iterator[tuple[str, float, float]]:
        """(name, start, end) in seconds after the call's start."""
        if self.admission_s is None:
            return
        phases = (
            ("admission", self.admission_s),
            ("queue", self.queue_s),
            ("prefill", self.prefill_s),
        )
        start_s = 0.0
        for name, seconds in phases:
            if seconds is not None:
                end_s = min(start_s + seconds, total_s)
                yield name, start_s, end_s
                start_s = end_s
        yield "generate", start_s, total_s


class CallSpan(Protocol):
    """The trace of one call under way."""

    def end(self, fields: Fields, phases: Phases) -> None:
        """The call has ended; `fields` are those of its log line."""


class Tracer(Protocol):
    """Starts the traces of one server's calls."""

    def start(
        self, service: str, method: str, metadata: Iterable[tuple[str, str | bytes]]
    ) -> CallSpan:
        """A call arrived, with this metadata."""


class NoTracer:
    """Traces nothing; its own span, too."""

    def start(
        self, service: str, method: str, metadata: Iterable[tuple[str, str | bytes]]
    ) -> CallSpan:
        return self

    def end(self, fields: Fields, phases: Phases) -> None:
        return


class OpenTelemetryTracer:
    """Through the given provider, or the one that the process has."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        from opentelemetry import trace

        self._tracer = trace.get_tracer("sonant", __version__, provider)

    def start(
        self, service: str, method: str, metadata: Iterable[tuple[str, str | bytes]]
    ) -> CallSpan:
        """See `Tracer`."""
        from opentelemetry import propagate, trace

        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        span = self._tracer.start_span(
            f"{service}/{method}",
            context=propagate.extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
        )
        return _Recorded(self._tracer, span)


class _Recorded:
    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer, self._span = tracer, span
        self._started_ns = time.time_ns()
        self._started_s = time.monotonic()

    def end(self, fields: Fields, phases: Phases) -> None:
        from opentelemetry import trace

        span, values = self._span, dict(fields)
        for name, value in fields:
            if name not in NOT_ATTRIBUTES and isinstance(value, str | int | float):
                span.set_attribute(NAMES.get(name, f"sonant.{name}"), value)
        first_s = values.get("first_audio_s")
        if isinstance(first_s, float):
            span.add_event("first audio", timestamp=self._at(first_s))
        if values.get("code") != "OK":
            reason = str(values.get("reason") or values.get("code"))
            span.set_status(trace.Status(trace.StatusCode.ERROR, reason))
        total_s = time.monotonic() - self._started_s
        parent = trace.set_span_in_context(span)
        for name, start_s, end_s in phases.spans(total_s):
            child = self._tracer.start_span(name, parent, start_time=self._at(start_s))
            child.end(self._at(end_s))
        span.end(self._at(total_s))

    def _at(self, seconds: float) -> int:
        return self._started_ns + int(seconds * NANOSECONDS)


def create_tracer(enabled: bool) -> Tracer:
    """Raises ConfigError when traces are asked for and the package is missing."""
    if not enabled:
        return NoTracer()
    try:
        return OpenTelemetryTracer()
    except ImportError as error:
        raise ConfigError(
            "trace_requests needs opentelemetry-api: pip install 'sonant[trace]'"
        ) from error
