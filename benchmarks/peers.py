"""transformers on the same shape, device and tokens: what it gives without an engine around it.

`generate` at batch 1 with its dynamic cache, with its static cache and what it compiles for that;
and `generate_batch`, its continuous batching over a paged cache. Weights are random, in bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine_load import Job, release_memory
from benchmarks.shapes import Shape

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

CACHES = ("dynamic", "static")
BLOCK_SIZE = 256  # tokens; transformers' own default


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of one way to generate, and what else must be known of it."""

    tokens_per_s: float
    note: str


def create(shape: Shape, device: torch.device) -> PreTrainedModel:
    """transformers' model of this shape, weights random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(shape.values)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.generation_config.pad_token_id = 0
    return model.eval()


def greedy(num_tokens: int, **options: Any) -> GenerationConfig:
    """Exactly so many tokens, each the likeliest."""
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )


def alone(model: PreTrainedModel, job: Job, cache: str, repeat: int) -> Rate:
    """One sequence; the second of two warm-up calls runs what the first has compiled."""
    ids = torch.tensor([job.prompt_ids], device=model.device)
    config = greedy(job.num_tokens, cache_implementation=cache)
    walls = [_timed(model, ids, config) for _ in range(repeat + 2)]
    note = f"sdpa, {cache} cache, prefill of {len(job.prompt_ids)} included; "
    return Rate(job.num_tokens / min(walls[2:]), note + f"first call {walls[0]:.1f} s")


def _timed(model: PreTrainedModel, ids: torch.Tensor, config: GenerationConfig) -> float:
    started = time.perf_counter()
    generate: Any = model.generate
    tokens = generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
    num_new = tokens[0, ids.shape[1] :].tolist()  # waits for the device
    if len(num_new) != config.max_new_tokens:
        raise RuntimeError(f"{len(num_new)} tokens instead of {config.max_new_tokens}")
    return time.perf_counter() - started


def together(model: PreTrainedModel, jobs: Sequence[Job]) -> Rate:
    """Jobs of one length by `generate_batch`; making its cache and graphs is not counted."""
    from transformers import ContinuousBatchingConfig

    num_tokens, longest = jobs[0].num_tokens, max(len(job.prompt_ids) for job in jobs)
    blocks_each = -(-(longest + num_tokens) // BLOCK_SIZE) + 1
    generate_batch: Any = model.generate_batch
    outputs = generate_batch(
        inputs=[list(job.prompt_ids) for job in jobs],
        generation_config=greedy(num_tokens),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=blocks_each * len(jobs) + 1, max_batch_tokens=8192
        ),
    ).values()
    made = sum(len(output.generated_tokens) for output in outputs)
    if made != num_tokens * len(jobs):
        errors = {output.error for output in outputs if output.error}
        raise RuntimeError(f"{made} tokens instead of {num_tokens * len(jobs)}; {errors}")
    start = min(output.created_time for output in outputs)
    end = max(output.lifespan[1] for output in outputs)
    note = f"{longest} tokens in, {num_tokens} out; {model.config._attn_implementation}"
    return Rate(made / (end - start), note)


@dataclass(frozen=True, slots=True)
class Ways:
    """What is tried: one job with each cache, and every crowd of jobs together."""

    job: Job
    caches: Sequence[str]
    crowds: Sequence[Sequence[Job]]
    repeat: int


def measure(shape: Shape, device: torch.device, ways: Ways) -> Iterator[tuple[str, Rate | str]]:
    """Way and rate, each as soon as it is known; for one that fails, why."""
    yield from _rates(create(shape, device), ways)
    torch.compiler.reset()
    release_memory()


def _rates(model: PreTrainedModel, ways: Ways) -> Iterator[tuple[str, Rate | str]]:
    for cache in ways.caches:
        one = partial(alone, model, ways.job, cache, ways.repeat)
        yield f"transformers, {cache} cache", attempt(one)
    for jobs in ways.crowds:
        yield f"transformers, {len(jobs)} requests", attempt(partial(together, model, jobs))


def attempt(measured: Callable[[], Rate]) -> Rate | str:
    """What is measured, or why it cannot be: others' code ends no run of ours."""
    try:
        return measured()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
