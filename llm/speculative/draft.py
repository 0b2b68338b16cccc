"""`DraftModel`: a small model that drafts tokens for the target model.

Its keys and values lie in a pool of its own under the same page ids, so a page table, a cached
prefix and a preemption mean the same to both models. For that to hold, both are fed the same
positions in every step:

    step            target is fed       draft is fed
    prompt          p p p p             p p p p
    verification    t d1 d2 d3          t, d1, d2, d3       one after the other; d3 for its KV only
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from llm.batch import ForwardMode, ModelInputs, ScheduledBatch, ScheduledRow
from llm.config import PipelineConfig
from llm.errors import ConfigError
from llm.kv_cache.kv_pool import KVPool
from llm.request import SamplingParams
from llm.runner.model_runner import ModelRunner
from llm.sampling.sampler import SamplingPlan

# fields that a draft sets itself; its pages are the target's
OWN_CACHE_FIELDS = frozenset({"kv_cache_format"})
DRAFT_STREAM = 0xD1B54A32D192ED03  # selects another stream of random numbers of a seed


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One drafted token of each of B rows, and the distribution it was drawn from."""

    token_ids: tuple[int, ...]  # [B]
    logits: Tensor  # [B, V]
    plan: SamplingPlan


class DraftModel:
    """Draft model on the target's device. `runner` is initialized; its pool uses the target's page
    ids.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    @property
    def kv_blocks(self) -> list[KVPool]:
        """Return the pool of each replica."""
        pool = self.runner.token_to_kv_pool
        return [] if pool is None else [pool]

    def ingest(self, batch: ScheduledBatch) -> None:
        """Feed the tokens that the target is fed, without drafting."""
        rows = tuple(row._replace(samples=False) for row in batch.rows)
        self.runner.forward(self.runner.prepare(ScheduledBatch(rows, batch.mode)))

    def propose(
        self, rows: Sequence[ScheduledRow], num_tokens: int, *, own_stream: bool
    ) -> list[DraftStep]:
        """Draft `num_tokens` for each row with its own sampling parameters.

        With `own_stream` the draws are independent of the target's draws for the same tokens;
        otherwise they use the same random numbers, so that similar distributions yield the same
        tokens.
        """
        if own_stream:
            rows = [row._replace(sampling=_with_own_stream(row.sampling)) for row in rows]
        runner, model = self.runner, self.runner.loaded_model
        inputs = runner.prepare(ScheduledBatch(tuple(rows), ForwardMode.DECODE))
        sampled: list[list[int]] = [[] for _ in rows]
        steps = []
        for step in range(num_tokens):
            outputs = runner.forward(inputs)
            plan = runner.sampler.prepare(rows, step, sampled)
            token_ids = runner.sampler.sample(outputs.next_token_logits, plan)
            inputs = model.prepare_next_token_inputs(token_ids, inputs)
            steps.append(DraftStep(tuple(token_ids.tolist()), outputs.next_token_logits, plan))
            for tokens, token in zip(sampled, steps[-1].token_ids, strict=True):
                tokens.append(token)
        runner.forward(_without_logits(inputs))
        return steps

    def shutdown(self) -> None:
        """Free model and memory."""
        self.runner.shutdown()


def create_draft_runner(
    config: PipelineConfig, max_length: int, num_pages: int | None = None
) -> ModelRunner:
    """Create a runner for `config.draft_model`, not initialized, with pages like the target's.

    Raises `ConfigError` when the draft model is too short or on another device.
    """
    assert config.draft_model is not None
    model, target = config.draft_model, config.model
    if "device_specs" in model.model_fields_set and model.device_specs != target.device_specs:
        raise ConfigError(f"draft_model.device_specs must be the model's {target.device_specs}")
    for name in sorted(model.kv_cache.model_fields_set - OWN_CACHE_FIELDS):
        raise ConfigError(f"draft_model.kv_cache.{name}: the draft shares the model's pages")
    cache = {
        "kv_cache_page_size": target.kv_cache.kv_cache_page_size,
        "num_pages": num_pages,
        "kv_cache_format": model.kv_cache.kv_cache_format,
        "device_memory_utilization": target.kv_cache.device_memory_utilization,
    }
    values = model.model_dump(exclude_unset=True) | {
        "kv_cache": cache,
        "device_specs": target.device_specs,
    }
    try:
        own = PipelineConfig(
            model=values,
            max_length=max_length,
            max_batch_size=config.max_batch_size,
            max_batch_input_tokens=config.max_batch_input_tokens,
            force=config.force,
            custom_architectures=config.custom_architectures,
            allow_pickle=config.allow_pickle,
            use_vendor_blas=config.use_vendor_blas,
            profiling=config.profiling,
        )
    except ConfigError as error:
        raise ConfigError(f"draft_model: {error}") from error
    return ModelRunner(own, is_draft=True)


def _without_logits(inputs: ModelInputs) -> ModelInputs:
    num_rows = len(inputs.forward_batch.query_lens)
    inputs.logit_rows = inputs.forward_batch.positions.new_empty(0)
    inputs.logit_offsets = (0,) * (num_rows + 1)
    inputs.sampling_rows = ()
    return inputs


@lru_cache(maxsize=1024)
def _with_own_stream(sampling: SamplingParams) -> SamplingParams:
    return dataclasses.replace(sampling, seed=sampling.seed ^ DRAFT_STREAM)
