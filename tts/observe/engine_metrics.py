"""Statistics of the engine and the audio decoder as Prometheus metrics, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from llm import EngineStats, Histogram
from tts.observe.engine_status import AudioStats, EngineStatus, ReplicatedStatus

BATCH_HISTOGRAMS = (
    ("rows", "sonant_batch_rows", "Requests of one batch."),
    ("input_tokens", "sonant_batch_input_tokens", "Tokens fed to one batch."),
    ("context_tokens", "sonant_batch_context_tokens", "Tokens in the KV cache after one batch."),
    ("schedule_s", "sonant_batch_schedule_seconds", "Time to decide on one batch."),
    ("execute_s", "sonant_batch_execute_seconds", "Time to run one batch."),
)
"""Field of the engine's statistics, metric name and description; all by kind of batch."""


PREFIX = "sonant_"


class EngineCollector(Collector):
    """Collector of an engine's last snapshot; empty before the first one.

    `prefix` begins the names of the metrics, which begin with PREFIX here. Those of several
    replicas have the label `replica`, the number from 0.
    """

    def __init__(self, prefix: str = PREFIX) -> None:
        self._prefix = prefix
        self.status: EngineStatus | None = None

    def collect(self) -> Iterable[Metric]:
        """Iterate over the snapshot's metrics (called by the registry at each scrape)."""
        status = self.status
        if status is None:
            return
        if isinstance(status, ReplicatedStatus):
            metrics = _of_replicas(status.replicas)
        else:
            metrics = _of_engine(status)
        for metric in metrics:
            yield metric if self._prefix == PREFIX else _renamed(metric, self._prefix)


def _of_replicas(replicas: Sequence[EngineStatus]) -> Iterable[Metric]:
    """Return one metric of each name, with the samples of all replicas."""
    up = GaugeMetricFamily(
        "sonant_replica_up", "Whether a replica takes calls: 1, or 0.", labels=["replica"]
    )
    found: dict[str, Metric] = {up.name: up}
    for number, status in enumerate(replicas):
        label = str(number)
        up.add_metric([label], int(status.is_alive and not status.is_draining))
        for metric in _of_engine(status):
            empty = Metric(metric.name, metric.documentation, metric.type)
            found.setdefault(metric.name, empty).samples += [
                sample._replace(labels={**sample.labels, "replica": label})
                for sample in metric.samples
            ]
    return found.values()


def _of_engine(status: EngineStatus) -> Iterable[Metric]:
    """Iterate over the metrics of one engine."""
    yield from _state(status)
    if status.linear_layers:
        layers = GaugeMetricFamily(
            "sonant_linear_layers", "Linear layers, by what multiplies.", labels=["backend"]
        )
        for backend, count in status.linear_layers:
            layers.add_metric([backend], count)
        yield layers
    if status.stats is not None:
        yield from _batches(status.stats)
        yield from _sequences(status.stats)
        yield from _drafts(status.stats)
        yield from _graphs(status.stats)
    if status.audio is not None:
        yield from _audio(status.audio)


def _renamed(metric: Metric, prefix: str) -> Metric:
    """Return a metric whose name and samples begin with another prefix."""
    renamed = Metric(prefix + metric.name.removeprefix(PREFIX), metric.documentation, metric.type)
    for sample in metric.samples:
        name = prefix + sample.name.removeprefix(PREFIX)
        renamed.samples.append(sample._replace(name=name))
    return renamed


def _state(status: EngineStatus) -> Iterator[Metric]:
    stats = status.stats
    states = {"running": status.running, "waiting": status.waiting}
    pages = {"used": status.used_pages, "total": status.total_pages}
    if stats is not None:
        states |= {"decoding": stats.decoding, "paused": stats.paused}
        pages |= {"cached": stats.cached_pages, "host": stats.host_pages}
    yield _gauge("sonant_engine_sequences", "Sequences in the engine.", states)
    loaded = "Whether the model is loaded: 1, or 0 when it was unloaded for lack of calls."
    yield GaugeMetricFamily("sonant_engine_loaded", loaded, value=int(status.is_loaded))
    yield _gauge("sonant_kv_pages", "Pages of the KV pool.", pages)
    yield GaugeMetricFamily(
        "sonant_audio_streams", "Decoder states alive.", value=status.audio_streams
    )
    preempted = "Sequences put back for lack of pages."
    yield _counter("sonant_preemptions", preempted, status.preemptions)
    hits = "Prompt tokens taken from the prefix cache."
    yield _counter("sonant_prefix_cache_hit_tokens", hits, status.prefix_hit_tokens)


def _batches(stats: EngineStats) -> Iterator[Metric]:
    for field, name, text in BATCH_HISTOGRAMS:
        family = HistogramMetricFamily(name, text, labels=["mode"])
        for figures in stats.batches:
            _add(family, [figures.mode.value], getattr(figures, field))
        yield family
    missed = "Prompt tokens that were computed."
    yield _counter("sonant_prefix_cache_miss_tokens", missed, stats.prefix_miss_tokens)
    moved = CounterMetricFamily(
        "sonant_swapped_pages", "Prefix pages copied to and from host memory.", labels=["to"]
    )
    moved.add_metric(["host"], stats.pages_to_host)
    moved.add_metric(["device"], stats.pages_from_host)
    yield moved
    exchanged = CounterMetricFamily(
        "sonant_exchanged_pages",
        "KV pages of prompts moved between engines with roles.",
        labels=["direction"],
    )
    exchanged.add_metric(["received"], stats.pages_received)
    exchanged.add_metric(["sent"], stats.pages_sent)
    yield exchanged
    yield _counter("sonant_empty_forwards", "Forwards without a row.", stats.empty_steps)
    yield _counter("sonant_failed_batches", "Batches whose forward failed.", stats.failed_steps)


def _sequences(stats: EngineStats) -> Iterator[Metric]:
    figures = stats.sequences
    first = "From submission to the first token."
    yield _histogram("sonant_time_to_first_token_seconds", first, figures.first_token_s)
    gap = "Between two tokens of a sequence, or two turns of several."
    yield _histogram("sonant_inter_token_seconds", gap, figures.token_gap_s)
    cancelled = "From a running request's cancellation to its pages being free."
    yield _histogram("sonant_cancel_seconds", cancelled, figures.cancel_s)
    finished = CounterMetricFamily(
        "sonant_sequences_finished", "Sequences that ended, by reason.", labels=["reason"]
    )
    for reason, count in figures.finished.items():
        finished.add_metric([reason.value], count)
    yield finished


def _drafts(stats: EngineStats) -> Iterator[Metric]:
    """Iterate over metrics by position in the draft, from 0; none without a draft model."""
    if stats.speculative is None:
        return
    drafted = CounterMetricFamily(
        "sonant_drafted_tokens", "Tokens that a draft model proposed.", labels=["position"]
    )
    accepted = CounterMetricFamily(
        "sonant_accepted_tokens", "Of them those that the model accepted.", labels=["position"]
    )
    for family, counts in (
        (drafted, stats.speculative.drafted),
        (accepted, stats.speculative.accepted),
    ):
        for position, count in enumerate(counts):
            family.add_metric([str(position)], count)
        yield family


def _graphs(stats: EngineStats) -> Iterator[Metric]:
    """Iterate over metrics of captured forwards; none without captures."""
    graphs = stats.graphs
    if graphs is None:
        return
    counts = {
        "decode": ("Decode forwards", graphs.replays, graphs.eager_decodes),
        "prompt": ("Forwards with prompts", graphs.prompt_replays, graphs.eager_prompts),
    }
    for kind, (text, replays, eager) in counts.items():
        forwards = CounterMetricFamily(
            f"sonant_{kind}_forwards", f"{text}, captured or launch by launch.", labels=["run"]
        )
        forwards.add_metric(["graph"], replays)
        forwards.add_metric(["eager"], eager)
        yield forwards


def _audio(figures: AudioStats) -> Iterator[Metric]:
    decode = "Time of one call of the audio decoder."
    yield _histogram("sonant_block_decode_seconds", decode, figures.decode_s)
    blocks = "Blocks that one call of the audio decoder rendered."
    yield _histogram("sonant_block_batch", blocks, figures.blocks)
    yield _counter("sonant_audio_rendered_seconds", "Audio rendered.", figures.audio_s)
    waiting = "Blocks and chunks of text that wait for their readers."
    yield GaugeMetricFamily("sonant_buffered_messages", waiting, value=figures.buffered)


def _gauge(name: str, text: str, by_state: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, value in by_state.items():
        family.add_metric([state], value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text)
    _add(family, [], histogram)
    return family


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    """Add one histogram with cumulative counts, as the exposition format requires."""
    buckets, seen = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        seen += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), seen))
    family.add_metric(labels, buckets=buckets, sum_value=histogram.total)
