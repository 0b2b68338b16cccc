"""`OverlapTextGenerationPipeline`: a batch is started before the results of the last one are read.

    host     launch n │ wait n-1 │ commit n-1, schedule n+1 │ launch n+1 │ wait n │ …
    device   ═══ n-1 ════╪════════════════ n ═══════════════════╪═════ n+1 ═══════
                         └ copied to the host

`execute` returns the batch before's outputs. A token that batch n samples and n+1 feeds never waits
for the host: the device puts it in its place (`future_tokens`). Rows whose next token depends on
earlier ones beyond the model (penalties, grammars) are sampled when those have arrived; the forward
overlaps even then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from llm.batch import ScheduledBatch, ScheduledRow, StepOutput
from llm.config import PipelineConfig
from llm.models.base import PipelineModel
from llm.models.weights import WeightsAdapter, WeightsFormat
from llm.pipeline.base import TextGenerationPipelineInterface
from llm.pipeline.future_tokens import FutureTokens, known_outputs
from llm.runner.device_stream import DeviceStream, HostCopy, Launched, create_stream
from llm.sampling.sampler import has_penalties
from llm.sequence import FUTURE_TOKEN


@dataclass(frozen=True, slots=True)
class AsyncBatch:
    """A batch that was started: its sampling rows, and their tokens on both sides.

    A batch without sampling rows has no tokens.
    """

    rows: tuple[ScheduledRow, ...]
    tokens: Launched[Tensor] | None = None  # int32 [rows], on the device
    copy: HostCopy | None = None

    def wait(self) -> dict[str, int]:
        """The tokens by request id; returns when the device is done with the batch."""
        if self.copy is None:
            return {}
        tokens = self.copy.wait().tolist()
        return {row.request_id: token for row, token in zip(self.rows, tokens, strict=True)}


@final
class OverlapTextGenerationPipeline(TextGenerationPipelineInterface):
    """See the module. One decode forward per batch, no log-probabilities."""

    def __init__(  # noqa: PLR0913, PLR0917 - seed 002
        self,
        pipeline_config: PipelineConfig,
        pipeline_model: type[PipelineModel[ScheduledRow]] | None = None,
        eos_token_id: int | None = None,
        weight_adapters: Mapping[WeightsFormat, WeightsAdapter] | None = None,
        tokenizer: object | None = None,
        disable_overlap: bool = False,
        *,
        stream: DeviceStream | None = None,
    ) -> None:
        """`disable_overlap`: wait for each batch in the call that starts it.

        Raises `ValueError` for a device that does its work at once, unless overlap is disabled,
        and what the interface raises.
        """
        device = torch.device(pipeline_config.model.device_specs[0])
        self._stream = create_stream(device) if stream is None else stream
        if not (disable_overlap or self._stream.is_asynchronous):
            raise ValueError(f"overlap needs a GPU: {device} runs every step at once")
        super().__init__(
            pipeline_config, pipeline_model, eos_token_id, weight_adapters, tokenizer
        )
        self._is_disabled = disable_overlap
        self._pending: AsyncBatch | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        raise TypeError("OverlapTextGenerationPipeline is final")

    @property
    def overlap_active(self) -> bool:
        """See the interface."""
        return not self._is_disabled

    def has_pending_outputs(self) -> bool:
        """See the interface."""
        return self._pending is not None

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Start a batch, then wait for the one before it; an empty batch only does the latter.

        What the caller does to the batch's live views afterwards changes nothing. Raises
        `ValueError`, and nothing is started, for several steps, log-probabilities and
        placeholders that no row of the batch before fills. When the batch before cannot be
        waited for, this one is lost with it.
        """
        _check(batch)
        before = self._pending
        current = self._launch(batch, before)
        self._pending = None
        output = _output(before)
        if not self._is_disabled:
            self._pending = current
            return output
        return _output(current)

    def _launch(self, batch: ScheduledBatch, before: AsyncBatch | None) -> AsyncBatch | None:
        if not batch:
            if self._config.execute_empty_batches:
                self._stream.launch(self.runner.forward_idle)
            return None
        cloned = ScheduledBatch(tuple(map(_cloned, batch.rows)), batch.mode)
        future = FutureTokens.find(cloned.rows, () if before is None else before.rows)
        sampled = None if before is None else before.tokens

        def forward() -> Tensor:
            with torch.inference_mode():
                inputs = self.runner.prepare(cloned)
                if sampled is not None:
                    future.fill(inputs.forward_batch.input_ids, sampled.value)
                return self.runner.forward(inputs).next_token_logits

        logits = self._stream.launch(forward)
        rows = tuple(row for row in cloned.rows if row.samples)
        if not rows:
            return AsyncBatch(rows)
        tokens = self._stream.launch(self._sampling(rows, logits, before))
        return AsyncBatch(rows, tokens, self._stream.download(tokens))
