"""Difference of a language model's text with narrower weights from its text in float32.

The float32 model continues each prompt greedily. Every other format then

    is fed the same tokens   differences of logits and log-probabilities, share of equal
                             likeliest tokens
    generates                share of prompts with the same text, first difference of others

Positions after the end of the float32 text do not count. A format has to reach the two bars
to be the default for text on a CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Figure, Report, lines_of, publish, until_interrupted
from llm.batch import ForwardMode, ScheduledBatch, ScheduledRow
from llm.config import KVCacheConfig, ModelConfig, PipelineConfig, QuantizationEncoding
from llm.request import SamplingParams
from llm.runner.model_runner import ModelRunner
from tts.checkpoint.files import load_eos_ids
from tts.families.prompt import PromptBuilder

PROMPTS = Path(__file__).with_name("text_prompts.txt")
REFERENCE = QuantizationEncoding.FLOAT32
OTHERS = (QuantizationEncoding.INT8, QuantizationEncoding.BFLOAT16)
NUM_TOKENS = 32
AGREEMENT_BAR = 97.0  # percent of the tokens
LOGPROB_BAR = 0.05  # nats, mean
PAGE_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Continuation:
    """Results for B prompts: likeliest tokens [B, N], and logits [B, N, V]."""

    ids: Tensor
    logits: Tensor

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities [B, N, V]."""
        return torch.log_softmax(self.logits, dim=-1)


def create_runner(folder: Path, encoding: QuantizationEncoding, pages: int) -> ModelRunner:
    """Create a runner on the CPU with room for so many pages."""
    model = ModelConfig(
        model_path=str(folder),
        device_specs=["cpu"],
        quantization_encoding=encoding,
        # One page is for padding.
        kv_cache=KVCacheConfig(kv_cache_page_size=PAGE_SIZE, num_pages=pages + 1),
    )
    runner = ModelRunner(PipelineConfig(model=model))
    runner.initialize()
    return runner


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one checkpoint, and the number of tokens to generate."""

    folder: Path
    ids: Sequence[tuple[int, ...]]
    num_tokens: int

    @classmethod
    def read(cls, folder: Path, texts: Sequence[str], num_tokens: int) -> Prompts:
        """Encode texts with the tokenizer of the checkpoint."""
        builder = PromptBuilder.load(folder)
        return cls(folder, [builder.text_prompt(text) for text in texts], num_tokens)

    @property
    def pages_each(self) -> int:
        """Number of pages for the longest prompt with its continuation."""
        return math.ceil((max(map(len, self.ids)) + self.num_tokens) / PAGE_SIZE)

    def continued(
        self, encoding: QuantizationEncoding, *forced: Tensor | None
    ) -> list[Continuation]:
        """Run one model once for each value of `forced`: the tokens [B, N] to feed, or None for its
        own likeliest ones.
        """
        runner = create_runner(self.folder, encoding, self.pages_each * len(self.ids))
        try:
            return [self._continue(runner, tokens) for tokens in forced]
        finally:
            runner.shutdown()

    @torch.inference_mode()
    def _continue(self, runner: ModelRunner, forced: Tensor | None) -> Continuation:
        logits = [self._step(runner, self.ids, [0] * len(self.ids), ForwardMode.EXTEND)]
        chosen = [logits[0].argmax(-1)]
        for place in range(self.num_tokens - 1):
            fed = chosen[place] if forced is None else forced[:, place]
            starts = [len(prompt) + place for prompt in self.ids]
            rows = [(token,) for token in fed.tolist()]
            logits.append(self._step(runner, rows, starts, ForwardMode.DECODE))
            chosen.append(logits[-1].argmax(-1))
        return Continuation(torch.stack(chosen, 1), torch.stack(logits, 1))

    def _step(
        self,
        runner: ModelRunner,
        fed: Sequence[tuple[int, ...]],
        starts: Sequence[int],
        mode: ForwardMode,
    ) -> Tensor:
        """Return the logits [B, V] of a step in which each row feeds tokens from a position on."""
        rows = []
        for n, (tokens, start) in enumerate(zip(fed, starts, strict=True)):
            pages = range(1 + n * self.pages_each, 1 + (n + 1) * self.pages_each)
            is_extend = mode is ForwardMode.EXTEND
            rows.append(ScheduledRow(f"{n}", tokens, start, pages, is_extend, True, GREEDY))
        inputs = runner.prepare(ScheduledBatch(tuple(rows), mode))
        return runner.forward(inputs).next_token_logits.float().clone()


@dataclass(frozen=True, slots=True)
class Divergence:
    """Comparison of a format with float32."""

    agreement: float  # share of the reference's tokens that are also its likeliest
    logprob_error: float  # mean |difference| of the log-probability of those tokens, nats
    logit_error: float  # mean |difference| over the vocabulary
    worst_logit: float  # the largest one
    first_others: tuple[int | None, ...]  # index of each prompt's first token that differs

    @property
    def identical(self) -> float:
        """Share of the prompts with the same text."""
        return self.first_others.count(None) / len(self.first_others)

    def figures(self, name: str, num_tokens: int) -> Iterator[Figure]:
        """Return the figures; the first two have bars."""
        agreement = (100 * self.agreement,)
        yield Figure(f"{name}: same likeliest token", agreement, "%", AGREEMENT_BAR, at_least=True)
        note = "of the tokens that float32 chose, mean |difference|"
        error = (self.logprob_error,)
        yield Figure(f"{name}: log-probability", error, "nats", LOGPROB_BAR, note=note)
        yield Figure(f"{name}: logits, mean |difference|", (self.logit_error,), "")
        yield Figure(f"{name}: logits, largest |difference|", (self.worst_logit,), "")
        note = f"of {len(self.first_others)} prompts, {num_tokens} tokens each"
        yield Figure(f"{name}: same text", (100 * self.identical,), "%", note=note)
        others = tuple(float(place) for place in self.first_others if place is not None)
        if others:
            yield Figure(f"{name}: first token that differs", others, "")


def compare(
    reference: Continuation, fed: Continuation, free: Continuation, counts: Tensor
) -> Divergence:
    """Compare; `fed` was fed the reference's tokens; `counts` [B, N] are the positions that
    count.
    """
    targets = reference.ids[..., None]
    errors = reference.logprobs.gather(-1, targets) - fed.logprobs.gather(-1, targets)
    logit_errors = (reference.logits - fed.logits)[counts].abs()
    differs = (reference.ids != free.ids) & counts
    return Divergence(
        agreement=(reference.ids == fed.ids)[counts].double().mean().item(),
        logprob_error=errors.squeeze(-1)[counts].abs().mean().item(),
        logit_error=logit_errors.mean().item(),
        worst_logit=logit_errors.max().item(),
        first_others=tuple(row.tolist().index(True) if row.any() else None for row in differs),
    )


def up_to_the_end(ids: Tensor, ends: Sequence[int]) -> Tensor:
    """Return bool [B, N]: the tokens of each row up to and including its first end token."""
    is_end = torch.isin(ids, torch.tensor(ends, dtype=ids.dtype))
    return is_end.cumsum(1) - is_end.long() == 0


def measure(
    prompts: Prompts, encodings: Sequence[QuantizationEncoding]
) -> Iterator[tuple[QuantizationEncoding, Divergence]]:
    """Measure each format in turn; one model at a time is in memory."""
    (reference,) = prompts.continued(REFERENCE, None)
    counts = up_to_the_end(reference.ids, load_eos_ids(prompts.folder))
    for encoding in encodings:
        fed, free = prompts.continued(encoding, reference.ids, None)
        yield encoding, compare(reference, fed, free, counts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Text of narrower weights compared with float32.", allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a text checkpoint")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="text file, one per line")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="that follow each prompt")
    parser.add_argument("--encoding", nargs="+", choices=OTHERS, default=OTHERS)
    args = parser.parse_args(argv)
    prompts = Prompts.read(args.model, lines_of(args.prompts), args.tokens)
    figures = (
        figure
        for name, found in measure(prompts, [QuantizationEncoding(e) for e in args.encoding])
        for figure in found.figures(name, args.tokens)
    )
    return publish(Report("divergence", tuple(until_interrupted(figures))))


if __name__ == "__main__":
    sys.exit(main())
