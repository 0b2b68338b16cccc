"""Difference of a language model's text with narrower weights from its text in float32.

The float32 model (`--reference`: another format) continues each prompt greedily: texts, or with
`--speech` what the default voice is to say, of a checkpoint with its codec in a folder `codec`; for
a `--shape` with random weights random tokens. Every other format then

    is fed the same tokens   differences of logits and log-probabilities, divergence (KL) of the
                             distributions, share of equal likeliest tokens
    generates                share of prompts with the same text, first difference of others

Positions after the end of the float32 text do not count. A format has to reach the two bars
to be the default for text on a CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import Figure, Report, lines_of, publish, until_interrupted
from benchmarks.shapes import SHAPES
from decoder import create_decoder
from llm.batch import ForwardMode, ScheduledBatch, ScheduledRow
from llm.config import KVCacheConfig, ModelConfig, QuantizationEncoding
from llm.request import SamplingParams
from llm.runner.model_runner import ModelRunner
from tts.checkpoint.files import load_eos_ids
from tts.config.pipeline import AUTO_DECODER, AudioGenerationConfig
from tts.families.base import Checkpoint
from tts.families.prompt import PromptBuilder
from tts.families.registry import find_family

PROMPTS = Path(__file__).with_name("text_prompts.txt")
REFERENCE = QuantizationEncoding.FLOAT32
OTHERS = (
    QuantizationEncoding.INT8,
    QuantizationEncoding.BFLOAT16,
    QuantizationEncoding.FLOAT8_E4M3FN,
)
NUM_RANDOM, RANDOM_LEN = 8, 16  # prompts of random tokens, and their length
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


def create_runner(
    folder: Path, encoding: QuantizationEncoding, pages: int, *, is_random: bool = False
) -> ModelRunner:
    """Create a runner on the CPU with room for so many pages."""
    model = ModelConfig(
        model_path=str(folder),
        device_specs=["cpu"],
        quantization_encoding=encoding,
        # One page is for padding.
        kv_cache=KVCacheConfig(kv_cache_page_size=PAGE_SIZE, num_pages=pages + 1),
    )
    runner = ModelRunner(
        AudioGenerationConfig(
            model=model, audio_decoder=AUTO_DECODER, run_model_test_mode=is_random
        )
    )
    runner.initialize()
    return runner


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one checkpoint, and the number of tokens to generate."""

    folder: Path
    ids: Sequence[tuple[int, ...]]
    num_tokens: int
    is_random: bool = False  # the model has random weights

    @classmethod
    def read(cls, folder: Path, texts: Sequence[str], num_tokens: int) -> Prompts:
        """Encode texts with the tokenizer of the checkpoint."""
        builder = PromptBuilder.load(folder)
        return cls(folder, [builder.text_prompt(text) for text in texts], num_tokens)

    @classmethod
    def spoken(cls, folder: Path, texts: Sequence[str], num_tokens: int) -> Prompts:
        """Encode what the default voice of a speech checkpoint is to say."""
        checkpoint = Checkpoint(folder)
        family = find_family(checkpoint)
        if family is None:
            raise SystemExit(f"{folder} writes text only")
        builder = PromptBuilder(checkpoint, family, create_decoder(folder / "codec").spec)
        voices = family.voices()
        voice = next(voice for voice in voices.voices if voice.name == voices.default)
        prompts = (builder.speech_prompt(text, voice) for text in texts)
        ids = [tuple(token for token in prompt if isinstance(token, int)) for prompt in prompts]
        return cls(folder, ids, num_tokens)

    @classmethod
    def random(cls, folder: Path, vocab_size: int, num_tokens: int) -> Prompts:
        """Return random tokens for a folder that `Shape.write` has made."""
        made = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (NUM_RANDOM, RANDOM_LEN), generator=made)
        return cls(folder, [tuple(row) for row in ids.tolist()], num_tokens, is_random=True)

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
        pages = self.pages_each * len(self.ids)
        runner = create_runner(self.folder, encoding, pages, is_random=self.is_random)
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
    """Comparison of a format with the reference."""

    agreement: float  # share of the reference's tokens that are also its likeliest
    logprob_error: float  # mean |difference| of the log-probability of those tokens, nats
    divergence: float  # of the distributions from the reference's (KL), mean, nats
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
        note = "of the tokens that the reference chose, mean |difference|"
        error = (self.logprob_error,)
        yield Figure(f"{name}: log-probability", error, "nats", LOGPROB_BAR, note=note)
        yield Figure(f"{name}: divergence", (self.divergence,), "nats", note="KL, mean")
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
    divergence = F.kl_div(fed.logprobs, reference.logprobs, reduction="none", log_target=True)
    logit_errors = (reference.logits - fed.logits)[counts].abs()
    differs = (reference.ids != free.ids) & counts
    return Divergence(
        agreement=(reference.ids == fed.ids)[counts].double().mean().item(),
        logprob_error=errors.squeeze(-1)[counts].abs().mean().item(),
        divergence=divergence.sum(-1)[counts].mean().item(),
        logit_error=logit_errors.mean().item(),
        worst_logit=logit_errors.max().item(),
        first_others=tuple(row.tolist().index(True) if row.any() else None for row in differs),
    )


def up_to_the_end(ids: Tensor, ends: Sequence[int]) -> Tensor:
    """Return bool [B, N]: the tokens of each row up to and including its first end token."""
    is_end = torch.isin(ids, torch.tensor(ends, dtype=ids.dtype))
    return is_end.cumsum(1) - is_end.long() == 0


def measure(
    prompts: Prompts,
    encodings: Sequence[QuantizationEncoding],
    against: QuantizationEncoding = REFERENCE,
) -> Iterator[tuple[QuantizationEncoding, Divergence]]:
    """Measure each format in turn; one model at a time is in memory."""
    (reference,) = prompts.continued(against, None)
    ends = () if prompts.is_random else load_eos_ids(prompts.folder)
    counts = up_to_the_end(reference.ids, tuple(ends))
    for encoding in encodings:
        fed, free = prompts.continued(encoding, reference.ids, None)
        yield encoding, compare(reference, fed, free, counts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Text of narrower weights compared with float32.", allow_abbrev=False
    )
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--model", type=Path, help="checkpoint folder")
    models.add_argument("--shape", choices=SHAPES, help="random weights of a published shape")
    parser.add_argument("--speech", action="store_true", help="the prompts are spoken")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="text file, one per line")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="that follow each prompt")
    parser.add_argument("--encoding", nargs="+", choices=OTHERS, default=OTHERS)
    parser.add_argument("--reference", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        prompts = _prompts(args, Path(scratch))
        encodings = [QuantizationEncoding(name) for name in args.encoding]
        measured = measure(prompts, encodings, QuantizationEncoding(args.reference))
        figures = (
            figure for name, found in measured for figure in found.figures(name, args.tokens)
        )
        return publish(Report("divergence", tuple(until_interrupted(figures))))


def _prompts(args: argparse.Namespace, scratch: Path) -> Prompts:
    if args.shape:
        shape = SHAPES[args.shape]
        return Prompts.random(
            shape.write(scratch / "model"), shape.values["vocab_size"], args.tokens
        )
    read = Prompts.spoken if args.speech else Prompts.read
    return read(args.model, lines_of(args.prompts), args.tokens)


if __name__ == "__main__":
    sys.exit(main())
