"""Device time of the codes of frames: first codes sampled, the depth transformer, later codes.

    qwen   Qwen3-TTS 0.6B: 15 later codes, 5 layers
    csm    CSM-1B: 31 later codes, 4 layers

Random weights of the published sizes in bfloat16; temperature 0.9, top_k 50. On a GPU a figure is a
replay of a captured graph that does nothing else, otherwise a call.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Figure, Report, arguments, publish
from benchmarks.speech_shapes import SPEAKERS
from llm.batch import ScheduledRow
from llm.request import SamplingParams
from llm.runner.model_runner import ModelRunner
from llm.sampling.device.frames import DeviceFrameSampler
from tts.config.flags import add_config_flags
from tts.config.pipeline import AUTO_DECODER, AudioGenerationConfig
from tts.config.sources import flag_values

SHAPES = ("qwen", "csm")
BATCHES = (1, 8, 64, 256)
BAR_MS = {("qwen", 64): 2.0}  # on one H200
REPLAYS = 10


def rows_of(count: int) -> list[ScheduledRow]:
    """Return rows that sample their first frame."""
    return [
        ScheduledRow(
            f"r{n}",
            (1,),
            0,
            (1,),
            False,
            True,
            SamplingParams(temperature=0.9, top_k=50, seed=n),
        )
        for n in range(count)
    ]


def times_ms(work: Callable[[], object], device: torch.device, repeat: int) -> tuple[float, ...]:
    """Return several measurements of one call in milliseconds."""
    work()  # compiles kernels
    if device.type != "cuda":
        found = []
        for _ in range(repeat):
            started = time.perf_counter()
            work()
            found.append(1000 * (time.perf_counter() - started))
        return tuple(found)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    measured = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        measured.append(start.elapsed_time(end) / REPLAYS)
    return tuple(measured)


def measure(name: str, batches: Sequence[int], values: dict[str, Any], repeat: int) -> list[Figure]:
    """Measure the frames of one model for each number of rows."""
    write, found = SPEAKERS[name].write, []
    assert write is not None
    with tempfile.TemporaryDirectory() as folder:
        own = {
            "model": {"model_path": str(write(Path(folder)))},
            "audio_decoder": AUTO_DECODER,
            "run_model_test_mode": True,
        }
        runner = ModelRunner(AudioGenerationConfig(**AudioGenerationConfig.merged(own, values)))
        runner.initialize()
    decoder, device = runner.loaded_model.frame_decoder, runner.device
    assert decoder is not None
    level = runner.session.kernels().launch_level
    sampler = DeviceFrameSampler(decoder, device, max(batches), max(batches), level)
    model, captured = runner.loaded_model, sampler.captured
    assert captured is not None
    for count in batches:
        logits = torch.randn(count, decoder.shape.codebook_size, device=device)
        states = torch.randn(count, runner.hidden_size, device=device, dtype=model.dtype)
        plan = sampler.prepare(rows_of(count))
        records = torch.zeros(count, captured.record_words, dtype=torch.int32)
        sampler.load(plan, records.numpy())
        work = partial(captured.program, logits, records.to(device), states)
        with torch.inference_mode():
            found.append(
                Figure(
                    f"{name}: {count} rows",
                    times_ms(work, device, repeat),
                    "ms",
                    BAR_MS.get((name, count)) if device.type == "cuda" else None,
                )
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Device time of the codes of frames.", repeat=9, has_model=False)
    options.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    options.add_argument("--rows", type=int, nargs="+", default=list(BATCHES))
    add_config_flags(options, AudioGenerationConfig)
    args = options.parse_args(argv)
    figures: list[Figure] = []
    for name in args.shape:
        figures += measure(name, args.rows, flag_values(args, AudioGenerationConfig), args.repeat)
    return publish(Report("frames", tuple(figures)))


if __name__ == "__main__":
    sys.exit(main())
