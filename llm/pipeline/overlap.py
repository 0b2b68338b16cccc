"""`OverlapTextGenerationPipeline`: a batch is started before the results of the last one are read.

    host     launch n │ wait n-1 │ commit n-1, schedule n+1 │ launch n+1 │ wait n │ …
    device   ═══ n-1 ════╪════════════════ n ═══════════════════╪═════ n+1 ═══════
                         └ copied to the host

`execute` returns the outputs of the previous batch. A token that batch n samples and n+1 feeds
never waits for the host: the device writes it to its place (`future_tokens`). Rows that need
earlier tokens on the host (grammars; penalties, unless the device counts them) are sampled
when those have arrived; their forward still overlaps. A batch with log-probabilities is waited
for when it is launched: they are read from its logits, which the next forward may write over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from llm.batch import (
    ModelInputs,
    ModelOutputs,
    SampledTokens,
    ScheduledBatch,
    ScheduledRow,
    StepOutput,
    columns_of,
    host_tokens,
)
from llm.config import PipelineConfig
from llm.models.base import PipelineModel
from llm.models.weights import WeightsAdapter, WeightsFormat
from llm.parallel.group import Group
from llm.pipeline.text_generation import (
    TextGenerationPipeline,
    score_tokens,
    with_rounded_scores,
)
from llm.request import Token
from llm.runner.device_stream import DeviceStream, HostCopy, PendingResult, create_stream
from llm.runner.future_tokens import (
    FutureTokens,
    awaits_token,
    known_outputs,
    split_outputs,
)
from llm.structured.bitmask import needs_tokens
from llm.structured.grammar import TokenSpelling

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AsyncBatch:
    """A batch that was started: the request ids of its sampling rows, and their tokens.

    A batch without sampling rows has no tokens; its end can still be waited for.
    """

    names: tuple[str, ...]  # [rows] request ids
    tokens: PendingResult[Tensor]  # int32 [rows], or frames [rows, K], on the device
    copy: HostCopy
    failures: Mapping[str, str]
    scores: PendingResult[StepOutput] | None = None
    """Log-probabilities without tokens; None when no row requests them."""

    def wait(self) -> dict[str, Token]:
        """Wait for the batch; return the tokens by request id."""
        return dict(zip(self.names, host_tokens(self.copy.wait()), strict=True))

    def output(self) -> StepOutput:
        """Wait for the batch; return its results for the scheduler."""
        tokens = SampledTokens(self.names, host_tokens(self.copy.wait()))
        if self.scores is None:
            return StepOutput(tokens, {}, self.failures)
        return replace(self.scores.value, token_ids=tokens, failures=self.failures)


@final
class OverlapTextGenerationPipeline(TextGenerationPipeline):
    """Pipeline that overlaps host and device; see the module. One decode forward per batch."""

    def __init__(  # noqa: PLR0913 - the base class's, and one more
        self,
        pipeline_config: PipelineConfig,
        pipeline_model: type[PipelineModel[ScheduledRow]] | None = None,
        eos_token_id: int | None = None,
        weight_adapters: Mapping[WeightsFormat, WeightsAdapter] | None = None,
        tokenizer: TokenSpelling | None = None,
        disable_overlap: bool = False,
        *,
        stream: DeviceStream | None = None,
        group: Group | None = None,
    ) -> None:
        """Load the model.

        `disable_overlap`: wait for each batch in the call that starts it.

        Raises `ValueError` for a device that is not asynchronous, unless overlap is disabled, and
        for models without pages or tokens; also the errors of the interface.
        """
        rank = 0 if group is None else group.rank
        device = torch.device(pipeline_config.model.device_specs[rank])
        stream = create_stream(device) if stream is None else stream
        if not (disable_overlap or stream.is_asynchronous):
            raise ValueError(f"overlap needs a GPU: {device} runs every step at once")
        super().__init__(
            pipeline_config,
            pipeline_model,
            eos_token_id,
            weight_adapters,
            tokenizer,
            stream=stream,
            group=group,
        )
        if not self.runner.is_generation:
            raise ValueError("an embedding model generates nothing: there is nothing to overlap")
        if not self.runner.loaded_model.uses_kv_pool:
            raise ValueError("a model that keeps its own cache cannot be run ahead of its results")
        self._is_disabled = disable_overlap
        self._pending: AsyncBatch | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        raise TypeError("OverlapTextGenerationPipeline is final")

    @property
    def overlap_active(self) -> bool:
        """See the interface. A draft model disables overlap: how far a step advances, and so where
        the next one begins, is not known before its drafts are verified.
        """
        return not self._is_disabled and self.speculation is None

    def has_pending_outputs(self) -> bool:
        """See the interface."""
        return self._pending is not None

    def run(self, batch: ScheduledBatch) -> StepOutput:
        """Start a batch, then wait for the previous one; an empty batch only waits.

        Later additions to the batch's live views have no effect. Raises `ValueError`, and starts
        nothing, for several steps and for placeholders that no row of the previous batch fills.
        When waiting for the previous batch fails, this batch is lost with it.
        """
        if self.speculation is not None:
            return super().run(batch)
        if batch.num_steps > 1:
            raise ValueError(
                f"num_steps={batch.num_steps} cannot be combined with enable_overlap_scheduler; "
                "set max_num_steps=1"
            )
        before = self._pending
        with self.runner.session.profiler.step(batch.mode):
            current = self._launch(batch, before)
        self._pending = None
        if before is not None and self.while_waiting is not None:
            self.while_waiting(lambda: before.copy.is_ready)
        output = StepOutput({}) if before is None else before.output()
        if self.overlap_active:
            self._pending = current
            return output
        return output if current is None else current.output()

    def _launch(self, batch: ScheduledBatch, before: AsyncBatch | None) -> AsyncBatch | None:
        if not batch:
            if self.pipeline_config.execute_empty_batches:
                idle = self._stream.launch(lambda: self.runner.forward_idle().logits)
                if before is None:  # or forwards would be started faster than they end
                    self._stream.download(idle).wait()
            return None
        runner, rows = self.runner, batch.sampling_rows
        names = columns_of(rows).request_id
        inputs = self._inputs(batch, names, before)
        depending = self._depending(batch, rows)
        failures: Mapping[str, str] = {}
        scores: PendingResult[StepOutput] | None = None
        is_scored = not batch.is_plain and any(map(_is_scored, batch.rows))
        if not (depending or is_scored):
            plan = runner.token_sampler.prepare(rows)
            tokens = self._launch_work(lambda: runner.step(inputs(), plan)[1])
        else:
            forward = self._launch_work(lambda: self._forward(inputs()))
            is_awaited = before is not None and any(map(awaits_token, depending))
            sampled = before.wait() if before is not None and is_awaited else {}
            mask = self.structured.mask(*split_outputs(rows, sampled))
            failures = mask.failures
            plan = runner.token_sampler.prepare(known_outputs(rows, sampled), mask=mask.tokens)
            tokens = self._launch_work(lambda: runner.sample_tokens(forward.value[1], plan))
            if is_scored:
                scores = self._launch_work(lambda: self._score(batch, *forward.value, tokens.value))
        return AsyncBatch(names, tokens, self._stream.download(tokens), failures, scores)

    def _depending(self, batch: ScheduledBatch, rows: Sequence[ScheduledRow]) -> list[ScheduledRow]:
        """Return the sampling rows whose next token depends on host-side results of earlier
        tokens.
        """
        sampler = self.runner.token_sampler
        if batch.is_plain and not sampler.may_need_tokens:
            return []
        return [row for row in rows if sampler.needs_tokens(row.sampling) or needs_tokens(row)]

    def _forward(self, inputs: ModelInputs) -> tuple[ModelInputs, ModelOutputs]:
        return inputs, self.runner.forward(inputs)

    def _score(
        self, batch: ScheduledBatch, inputs: ModelInputs, outputs: ModelOutputs, tokens: Tensor
    ) -> StepOutput:
        """Compute log-probabilities. The host waits here for the device."""
        rows = [row for row in batch.rows if row.samples]
        found = score_tokens(self, rows, inputs, outputs, tokens)
        sampled = {
            row.request_id: (entry,)
            for row, entry in zip(rows, found, strict=True)
            if entry is not None
        }
        prompts = self.prompt_scores.score(batch.rows, outputs)
        output = StepOutput({}, logprobs=sampled, prompt_logprobs=prompts)
        return with_rounded_scores(self, output)

    def _launch_work(self, work: Callable[[], T]) -> PendingResult[T]:
        def run() -> T:
            with torch.inference_mode():
                return work()

        return self._stream.launch(run)

    def _inputs(
        self, batch: ScheduledBatch, names: tuple[str, ...], before: AsyncBatch | None
    ) -> Callable[[], ModelInputs]:
        """Return a function that creates a batch's inputs on the device from the previous tokens.

        `names` are the request ids of the sampling rows.
        """
        awaited = FutureTokens.find(batch, names, () if before is None else before.names)
        return lambda: self.runner.prepare(
            batch, awaited, None if before is None else before.tokens.value
        )


def _is_scored(row: ScheduledRow) -> bool:
    """Whether a row requests log-probabilities of sampled tokens or of its prompt."""
    return row.echoes or (row.samples and row.sampling.top_logprobs is not None)
