"""Streams on a simulated device: rows of a step, windows of a decoder call, late audio.

The scheduler, the decode loop and the streams are those of a server with `--pace-streams`
(tests.tts.engine.simulated_device), so that many streams can be scheduled on any machine. `--shape`
selects the model, `--streams` how many play at once, `--chunk-size` the blocks, as the server's
option. `--plain` is without `--pace-streams`.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.report import Figure, Report, arguments, publish
from tests.tts.engine.simulated_device import SHAPES, Shape, Simulation
from tts.engine.pacer import DeadlinePacer, DecodePacer


def percentile_ms(values: Sequence[float], percent: int) -> float:
    """Return a percentile of seconds, in ms."""
    return 1000 * statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def measure(
    shape: Shape,
    streams: Sequence[int],
    seconds: float,
    warm_up_s: float,
    pacer: type[DecodePacer] = DeadlinePacer,
) -> Report:
    """Simulate each number of streams."""
    figures = []
    for count in streams:
        work = Simulation(shape, pacer()).run(count, seconds=seconds, warm_up_s=warm_up_s)
        found, name = asyncio.run(work), f"{shape.name}, {count} simulated streams"
        firsts = "/".join(f"{percentile_ms(found.first_s, p):.0f}" for p in (50, 95, 99))
        late_ms = 1000 * max(found.late_s)
        figures += [
            Figure(
                f"{name}: late",
                (found.num_late,),
                "",
                note=f"of {len(found.late_s)} streams, at most {late_ms:.0f} ms; first sound "
                f"p50/p95/p99 {firsts} ms",
            ),
            Figure(f"{name}: rows of a step", (found.rows,), "", note=f"{found.steps_per_s:.0f}/s"),
            Figure(
                f"{name}: windows of a call",
                (found.windows,),
                "",
                note=f"{found.calls_per_s:.0f}/s",
            ),
        ]
    return Report("pacing", tuple(figures))


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Streams on a simulated device.", repeat=1, has_model=False)
    parser.add_argument("--shape", choices=SHAPES, default="b")
    parser.add_argument("--streams", type=int, nargs="+", default=[240], help="at once")
    parser.add_argument("--seconds", type=float, default=6.0, help="counted, after the warm-up")
    parser.add_argument("--warm-up-s", type=float, default=6.4)
    parser.add_argument("--chunk-size", help="codes of each block, with commas")
    parser.add_argument("--plain", action="store_true", help="without --pace-streams")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    if args.chunk_size:
        sizes = tuple(map(int, args.chunk_size.split(",")))
        shape = replace(shape, streaming=replace(shape.streaming, chunk_sizes=sizes))
    pacer = DecodePacer if args.plain else DeadlinePacer
    return publish(measure(shape, args.streams, args.seconds, args.warm_up_s, pacer))


if __name__ == "__main__":
    sys.exit(main())
