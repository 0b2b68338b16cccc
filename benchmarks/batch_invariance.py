"""Share of requests that get other tokens in a batch of 64 than alone, and the cost of preventing
it.

Two engines, one after the other: with default settings, and with `--model.batch-invariant`.

A model of random weights runs every request once alone and once with all the others; greedy, and
sampled with a seed per request. Random logits are flatter than trained ones, so that a rounding
difference changes a token sooner: the counts are an upper bound for a trained model.

After one token that differs, most later ones differ, too. Configuration flags apply to both
engines. Fewer requests or tokens take less time, because every request also runs alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.engine_load import pipeline_of, running
from benchmarks.report import Figure, Report, publish, until_interrupted
from benchmarks.shapes import SHAPES, Shape
from llm import Engine, Request, SamplingParams, as_ids
from tts.config.flags import add_config_flags
from tts.config.pipeline import AudioGenerationConfig
from tts.config.sources import flag_values

KINDS = {"greedy": 0.0, "sampled": 0.8}  # temperatures
PROMPT_LENGTHS = (16, 128)
# so that every prompt is computed in its own batch
NOTHING_SHARED = {"enable_prefix_caching": False}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tokens of every request, and the time of all of them."""

    tokens: list[tuple[int, ...]]
    wall_s: float

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens)) / self.wall_s


def requests(kind: str, count: int, num_tokens: int, vocab_size: int) -> list[Request]:
    """Return the same requests at each call, with new ids."""
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
    """Run all requests at once. Raises `RuntimeError` when one fails."""
    started = time.perf_counter()
    streams = [engine.submit(request) for request in asked]
    chunks = [list(stream) for stream in streams]
    errors = [chunk.error for those in chunks for chunk in those if chunk.error]
    if errors:
        raise RuntimeError(errors[0])
    tokens = [
        tuple(token for chunk in those for token in as_ids(chunk.token_ids)) for those in chunks
    ]
    return Outcome(tokens, time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Requests of one kind on one engine, alone and together."""

    alone: tuple[Outcome, ...]  # one request each
    together: Outcome

    @property
    def other_tokens(self) -> list[tuple[bool, ...]]:
        """Tokens of every request that differ between both runs."""
        return [
            tuple(a != b for a, b in zip(own.tokens[0], beside, strict=True))
            for own, beside in zip(self.alone, self.together.tokens, strict=True)
        ]

    def figures(self, title: str, bar: float | None = None) -> Iterator[Figure]:
        """Return the figures; `bar` is the maximum percentage of tokens that differ."""
        others = self.other_tokens
        changed = [tokens for tokens in others if any(tokens)]
        length = len(others[0])
        share = 100 * sum(map(sum, others)) / (length * len(others))
        requests_share = 100 * len(changed) / len(others)
        text = f"{title}: other tokens among {len(others)}"
        yield Figure(f"{text}, of all tokens", (share,), "%", bar)
        yield Figure(f"{text}, in requests", (requests_share,), "% of requests")
        if changed:
            places = tuple(float(tokens.index(True)) for tokens in changed)
            note = f"of {length} tokens"
            yield Figure(f"{title}: first other token", places, "tokens", note=note)
        rates = tuple(one.rate for one in self.alone)
        yield Figure(f"{title}: alone", rates, "tokens/s")
        yield Figure(f"{title}: {len(others)} together", (self.together.rate,), "tokens/s")


def compare(engine: Engine, kind: str, count: int, num_tokens: int) -> Comparison:
    """Compare both runs for one kind of request."""
    vocab_size = pipeline_of(engine).vocab_size
    outcome(engine, requests(kind, count, 8, vocab_size))
    alone = [outcome(engine, [one]) for one in requests(kind, count, num_tokens, vocab_size)]
    return Comparison(tuple(alone), outcome(engine, requests(kind, count, num_tokens, vocab_size)))


def measure(
    shape: Shape, values: Mapping[str, Any], count: int, num_tokens: int
) -> Iterator[tuple[str, Comparison]]:
    """Measure every kind on one engine."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(shape, Path(folder), values) as engine,
    ):
        for kind in KINDS:
            yield kind, compare(engine, kind, count, num_tokens)


def both(shape: Shape, values: Mapping[str, Any], count: int, num_tokens: int) -> Iterator[Figure]:
    """Measure default settings, then batch-invariant ones, and the ratio of both times."""
    usual: dict[str, Comparison] = {}
    for is_invariant in (False, True):
        switch = {"model": {"batch_invariant": is_invariant}}
        own = AudioGenerationConfig.merged(dict(values), switch)
        for kind, found in measure(shape, own, count, num_tokens):
            way = "batch-invariant" if is_invariant else "as usual"
            bar = 0.0 if is_invariant else None
            yield from found.figures(f"{shape.name}, {kind}, {way}", bar)
            if is_invariant:
                yield from _cost(f"{shape.name}, {kind}", usual[kind], found)
            usual.setdefault(kind, found)


def _cost(title: str, usual: Comparison, invariant: Comparison) -> Iterator[Figure]:
    together = usual.together.rate / invariant.together.rate
    pairs = zip(usual.alone, invariant.alone, strict=True)
    alone = tuple(one.rate / other.rate for one, other in pairs)
    note = "times as long as usual"
    yield Figure(f"{title}: batch-invariant, alone", alone, "x", note=note)
    count = len(usual.alone)
    yield Figure(f"{title}: batch-invariant, {count} together", (together,), "x", note=note)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        description="Tokens alone and in a batch.", allow_abbrev=False
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
    figures = both(SHAPES[args.shape], values, args.requests, args.tokens)
    return publish(Report("batch_invariance", tuple(until_interrupted(figures))))


if __name__ == "__main__":
    sys.exit(main())
