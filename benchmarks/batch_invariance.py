"""How often a request gets other tokens among 64 than alone, and what it costs that it does not.

A model of random weights, every request once by itself and once with all the others; greedy, and
sampled with a seed of its own. Random logits are flatter than trained ones, so that a difference in
rounding shows as another token sooner: what is counted here is an upper bound for a trained model.

Configuration flags go to the engine: `--model.batch-invariant` is the other half of the comparison.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.engine_load import pipeline_of, running
from benchmarks.report import Figure, Report, publish
from benchmarks.shapes import SHAPES, Shape
from llm import Engine, Request, SamplingParams
from tts.config import AudioGenerationConfig, add_config_flags
from tts.flags import flag_values

KINDS = {"greedy": 0.0, "sampled": 0.8}  # temperatures
PROMPT_LENGTHS = (16, 128)
NOTHING_SHARED = {"enable_prefix_caching": False}  # every prompt is computed in its own company


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tokens of every request, and how long all of them took."""

    tokens: list[tuple[int, ...]]
    wall_s: float

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens)) / self.wall_s


def requests(kind: str, count: int, num_tokens: int, vocab_size: int) -> list[Request]:
    """The same ones whenever it is asked for them; ids aside, which an engine wants anew."""
    random = Random(0)
    made = []
    for n in range(count):
        prompt = [random.randrange(vocab_size) for _ in range(random.randint(*PROMPT_LENGTHS))]
        sampling = SamplingParams(
            temperature=KINDS[kind], seed=n, max_tokens=num_tokens, ignore_eos=True
        )
        made.append(Request(f"{kind}-{n}-{time.monotonic_ns()}", tuple(prompt), sampling))
    return made


def outcome(engine: Engine, asked: Sequence[Request]) -> Outcome:
    """All at once. Raises `RuntimeError` when one fails."""
    started = time.perf_counter()
    streams = [engine.submit(request) for request in asked]
    chunks = [list(stream) for stream in streams]
    errors = [chunk.error for those in chunks for chunk in those if chunk.error]
    if errors:
        raise RuntimeError(errors[0])
    tokens = [tuple(token for chunk in those for token in chunk.token_ids) for those in chunks]
    return Outcome(tokens, time.perf_counter() - started)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Position of the first token that differs; None when none does."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), None)


def compare(engine: Engine, name: str, kind: str, count: int, num_tokens: int) -> list[Figure]:
    """What company changes for one kind of requests."""
    vocab_size = pipeline_of(engine).vocab_size
    outcome(engine, requests(kind, 2, 8, vocab_size))
    alone = [outcome(engine, [one]) for one in requests(kind, count, num_tokens, vocab_size)]
    together = outcome(engine, requests(kind, count, num_tokens, vocab_size))
    found = [
        first_difference(own.tokens[0], beside)
        for own, beside in zip(alone, together.tokens, strict=True)
    ]
    places = tuple(float(place) for place in found if place is not None)
    share = 100 * len(places) / count
    title = f"{name}, {kind}"
    figures = [Figure(f"{title}: other tokens among {count}", (share,), "% of requests")]
    if places:
        note = f"of {num_tokens} tokens"
        figures.append(Figure(f"{title}: first other token", places, "tokens", note=note))
    rates = tuple(one.rate for one in alone)
    return [
        *figures,
        Figure(f"{title}: alone", rates, "tokens/s"),
        Figure(f"{title}: {count} together", (together.rate,), "tokens/s"),
    ]


def measure(shape: Shape, values: dict[str, Any], count: int, num_tokens: int) -> list[Figure]:
    """Both kinds on one engine."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(shape, Path(folder), values) as engine,
    ):
        pairs = [compare(engine, shape.name, kind, count, num_tokens) for kind in KINDS]
        return [figure for figures in pairs for figure in figures]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        description="Tokens alone and in company.", allow_abbrev=False
    )
    options.add_argument("--shape", choices=SHAPES, default="llama-1b")
    options.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options.add_argument("--requests", type=int, default=64, help="at once")
    options.add_argument("--tokens", type=int, default=128, help="of each")
    add_config_flags(options, AudioGenerationConfig)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    model = {"device_specs": [args.device], "kv_cache": NOTHING_SHARED}
    values = AudioGenerationConfig.merged(
        {"model": model}, flag_values(args, AudioGenerationConfig)
    )
    figures = measure(SHAPES[args.shape], values, args.requests, args.tokens)
    return publish(Report("batch_invariance", tuple(figures)))


if __name__ == "__main__":
    sys.exit(main())
