"""Figures of a soak test: growth, slowdown, lost calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.process_samples import Sample, median
from benchmarks.report import Figure
from benchmarks.serve import Step
from benchmarks.server_metrics import Samples
from benchmarks.soak_ledger import (
    UNAVAILABLE,
    CallRecord,
    Log,
    Window,
    disagreements,
    first_audio_ms,
    lost,
)

EARLY, LATE = (8 / 25, 12 / 25), (21 / 25, 1.0)  # windows, as shares of a part
GROWTH_BAR, LATENCY_BAR = 1.05, 1.2
TOLD = 3  # number of examples of errors
GROWING = (  # name, field of ProcessUsage, its scale and unit
    ("memory", "pss", 1e6, "MB"),
    ("resident memory", "rss", 1e6, "MB"),
    ("descriptors", "descriptors", 1.0, ""),
    ("threads", "threads", 1.0, ""),
)
HELD = {  # resources of a call in a server
    "calls": ("sonant_requests", "running", "waiting"),
    "sequences": ("sonant_engine_sequences", "running", "waiting"),
    "KV pages": ("sonant_kv_pages", "used"),
    "decoder states": ("sonant_audio_streams",),
}
"""Name of a gauge, and its states where it has some."""


@dataclass(frozen=True, slots=True)
class Part:
    """Results of one part."""

    name: str
    span: Window
    calls: tuple[CallRecord, ...]
    log: Log
    rest: Samples  # when the last call had ended
    counted: Samples  # increases since the previous part
    samples: tuple[Sample, ...]
    kills: tuple[Window, ...]

    def sampled(self, shares: tuple[float, float]) -> list[Sample]:
        """Return the samples of a window."""
        window = self.span.share(*shares)
        return [one for one in self.samples if one.moment_s in window]


def held(samples: Samples) -> dict[str, float]:
    """Return the resources that calls hold in the server, by name."""
    return {
        name: sum(samples.get(gauge, state=state) for state in states)
        if states
        else samples.get(gauge)
        for name, (gauge, *states) in HELD.items()
    }


def search_figures(tried: Sequence[Step], streams: int, listeners: int) -> Iterator[Figure]:
    """Return the results of the search."""
    outcomes = ", ".join(step.outcome for step in tried)
    yield Figure("streams in real time", (streams,), "at once", note=f"tried {outcomes}")
    yield Figure("listeners", (listeners,), "at once", note="in both parts")


def part_figures(part: Part, before: Samples) -> Iterator[Figure]:
    """Return everything about one part; growth of one without kills."""
    yield from _call_figures(part)
    if part.kills:
        yield from _kill_figures(part)
    else:
        yield from _growth_figures(part)
        yield from _latency_figures(part)
    now = held(part.rest)
    for name, value in held(before).items():
        note = f"{value:g} before, {now[name]:g} at rest afterwards"
        yield Figure(f"{part.name}: {name} not released", (now[name] - value,), "", 0, note=note)


def _call_figures(part: Part) -> Iterator[Figure]:
    name = part.name
    started = part.counted.total("grpc_server_started_total")
    handled = part.counted.total("grpc_server_handled_total")
    codes = Counter(call.code or "no end" for call in part.calls)
    yield Figure(f"{name}: calls that clients made", (len(part.calls),), "", note=_counts(codes))
    kinds = Counter(call.kind for call in part.calls)
    note = f"{part.log.num_calls} in the log, {handled:.0f} ended; by kind {_counts(kinds)}"
    yield Figure(f"{name}: calls that the server took", (started,), "", note=note)
    differ = abs(started - handled) + abs(started - part.log.num_calls)
    note = "between calls taken, calls ended and lines in the log"
    yield Figure(f"{name}: difference in the server's counts", (differ,), "", 0, note=note)
    for what, found in (
        ("lost calls", [str(call) for call in lost(part.calls, part.kills)]),
        ("calls on which log and clients differ", list(disagreements(part.calls, part.log))),
    ):
        yield Figure(f"{name}: {what}", (len(found),), "", 0, note="; ".join(found[:TOLD]))
    if not part.kills:
        troubles = part.log.troubles
        note = "; ".join(line[:200] for line in troubles[:TOLD])
        yield Figure(f"{name}: errors in the log", (len(troubles),), "", 0, note=note)


def _kill_figures(part: Part) -> Iterator[Figure]:
    hit = [c for c in part.calls if any(c.overlaps(kill) for kill in part.kills)]
    ended = sum(call.code == UNAVAILABLE for call in hit)
    note = f"of {len(hit)} calls meanwhile; the others as expected, or they are lost"
    yield Figure("killing: calls that ended UNAVAILABLE", (ended,), "", note=note)
    lengths = tuple(kill.length_s for kill in part.kills)
    yield Figure(
        "killing: until a killed engine is back", lengths, "s", note=f"{len(lengths)} kills"
    )


def _growth_figures(part: Part) -> Iterator[Figure]:
    early, late = part.sampled(EARLY), part.sampled(LATE)
    roles = sorted({role for one in part.samples for role in one.by_role})
    for name, field, scale, unit in GROWING:
        for role in ("", *roles):
            least, most = (median(window, field, role) / scale for window in (early, late))
            yield Figure(
                f"{part.name}: {name}, {role or 'all processes'}",
                (most / least if least else 0.0,),
                "x",
                None if role else GROWTH_BAR,
                note=f"{least:.4g} {unit} early, {most:.4g} {unit} late".replace("  ", " "),
            )


def _latency_figures(part: Part) -> Iterator[Figure]:
    for kind, name in (("unary", "whole answer"), ("stream", "first audio")):
        (early, few), (late, many) = (
            first_audio_ms(part.calls, kind, part.span.share(*shares)) for shares in (EARLY, LATE)
        )
        yield Figure(
            f"{part.name}: time to the {name}, {kind}",
            (late / early if few and many else 0.0,),
            "x",
            LATENCY_BAR if few and many else None,
            note=f"medians: {early:.0f} ms of {few} early, {late:.0f} ms of {many} late",
        )


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
