"""OpenTelemetry traces of calls, if enabled and if the package is installed.

    tts.v1.SpeechService/SynthesizeStream ├───────────────────────────────┤
        admission                         ├─┤
        queue                               ├──┤       waits for the engine's first step
        prefill                                ├──┤    until the first token
        generate                                  ├───────────────────────┤

Only OpenTelemetry's API is used: an SDK that is set up by the environment exports the spans;
without one they are dropped. A `traceparent` in a call's metadata adds the call to that trace.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llm import ConfigError
from tts import __version__
from tts.observe.logs import Fields

if TYPE_CHECKING:
    from opentelemetry import trace

NANOSECONDS = 1e9
NAMES = {"code": "rpc.grpc.status_text"}  # others are "sonant.NAME"
NOT_ATTRIBUTES = {"method", "text"}  # the span's name; private


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of a call's successive phases; None for a phase that was not reached."""

    admission_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None

    def spans(self, total_s: float) -> Iterator[tuple[str, float, float]]:
        """Iterate over (name, start, end), in seconds after the call's start."""
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
    """Span of one running call."""

    def end(self, fields: Fields, phases: Phases) -> None:
        """End the span; `fields` are those of the call's log line."""


class Tracer(Protocol):
    """Tracer of one server's calls."""

    def start(
        self, service: str, method: str, metadata: Iterable[tuple[str, str | bytes]]
    ) -> CallSpan:
        """Start the span of a call with this metadata."""


class OpenTelemetryTracer:
    """Tracer with the given provider, or the process's default one."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        from opentelemetry import trace

        self._tracer = trace.get_tracer("sonant", __version__, provider)

    def start(
        self, service: str, method: str, metadata: Iterable[tuple[str, str | bytes]]
    ) -> CallSpan:
        """Start the span of a call; see `Tracer`."""
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


def create_tracer(enabled: bool) -> Tracer | None:
    """Return a tracer; None if tracing is not enabled.

    Raises ConfigError when the package is missing.
    """
    if not enabled:
        return None
    try:
        return OpenTelemetryTracer()
    except ImportError as error:
        raise ConfigError(
            "trace_requests needs opentelemetry-api: pip install 'sonant[trace]'"
        ) from error
