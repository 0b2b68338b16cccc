"""Prometheus metrics of the service, in base units, with the standard names of gRPC metrics.

`Metrics` has its own registry, so two servers in one process do not mix. The engine's values are
read at each scrape from the newest `EngineStatus` of `Metrics.engine` and `Metrics.text_engine`.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tts.observe.engine_metrics import EngineCollector

LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60)
UNDERRUN_BUCKETS_S = (0.0, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
FACTOR_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 5)
TEXT_PREFIX = "sonant_text_"  # of the engine of a second model, for text
SOUND = "sound"  # result of a check
CALL_LABELS = ("grpc_service", "grpc_method")


class Metrics:
    """All metrics of one server, with their registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.text_engine = EngineCollector(TEXT_PREFIX)
        self.register_engines(self.registry)
        self.started = self._counter(
            "grpc_server_started", "Calls that reached a method.", CALL_LABELS
        )
        self.handled = self._counter(
            "grpc_server_handled", "Calls that ended, by code.", (*CALL_LABELS, "grpc_code")
        )
        self.handling = Histogram(
            "grpc_server_handling_seconds",
            "Length of calls.",
            CALL_LABELS,
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.errors = self._counter(
            "sonant_errors", "Calls that failed, by code and reason.", ("grpc_code", "reason")
        )
        self.first_audio = self._histogram(
            "sonant_time_to_first_audio_seconds",
            "From the call's arrival to its first audio message.",
            LATENCY_BUCKETS_S,
        )
        self.real_time_factor = self._histogram(
            "sonant_real_time_factor", "Seconds of work per second of audio.", FACTOR_BUCKETS
        )
        self.underrun = self._histogram(
            "sonant_stream_underrun_seconds",
            "Silence of a player that began with the first audio, for each stream that ended.",
            UNDERRUN_BUCKETS_S,
        )
        self.audio = self._counter("sonant_audio_seconds", "Audio sent.")
        self.characters = self._counter("sonant_input_characters", "Characters asked for.")
        self.prompt_tokens = self._counter("sonant_prompt_tokens", "Prompt tokens.")
        self.output_tokens = self._counter("sonant_output_tokens", "Tokens generated.")
        self.checks = self._counter(
            "sonant_speech_checks", "Segments compared with their text, by result.", ("result",)
        )
        self.retries = self._counter(
            "sonant_speech_retries", "Segments spoken again, by result before.", ("reason",)
        )
        self.given_up = self._counter(
            "sonant_speech_given_up",
            "Segments sent although no attempt was sound, by first result.",
            ("reason",),
        )
        self._broken_lexicons = self._broken_lexicons_gauge()
        self._requests = Gauge(
            "sonant_requests",
            "Calls that run, and calls that wait for a place.",
            ("state",),
            registry=self.registry,
            multiprocess_mode="livesum",
        )

    def register_engines(self, registry: CollectorRegistry) -> None:
        """Add the engines' metrics to a registry."""
        registry.register(self.engine)
        registry.register(self.text_engine)

    def _broken_lexicons_gauge(self) -> Gauge:
        return Gauge(
            "sonant_broken_lexicons",
            "Lexicon files that could not be read when they were read last, in the worst process.",
            registry=self.registry,
            multiprocess_mode="livemax",
        )

    def note_broken_lexicons(self, number: int) -> None:
        """Set `sonant_broken_lexicons`."""
        self._broken_lexicons.set(number)

    def note_requests(self, running: int, waiting: int) -> None:
        """Set the two states of `sonant_requests`."""
        self._requests.labels("running").set(running)
        self._requests.labels("waiting").set(waiting)

    def segment_checked(self, results: Sequence[str]) -> None:
        """Count the attempts to speak a segment, by the results of their checks in order."""
        for result in results:
            self.checks.labels(result).inc()
        for reason in results[:-1]:
            self.retries.labels(reason).inc()
        if results[-1] != SOUND:
            self.given_up.labels(results[0]).inc()

    def call_ended(self, service: str, method: str, code: str, seconds: float) -> None:
        """Count one finished call."""
        self.handled.labels(service, method, code).inc()
        self.handling.labels(service, method).observe(seconds)

    def value(self, name: str, **labels: str) -> float:
        """Return the current value of one sample, 0 before the first."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def text(self) -> str:
        """Return the metrics in the exposition format."""
        return generate_latest(self.registry).decode()

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)
