"""`CausalModel`: base class of decoder-only language models; architectures add their layers.

input ids ─embed+layers─> hidden states [T] ─selected rows────────> norm ─> head ─> logits [R, V]
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from llm.batch import (
    ForwardBatch,
    KVCacheInputs,
    ModelInputs,
    ModelOutputs,
    ReturnHiddenStates,
    ReturnLogits,
    ScheduledRow,
)
from llm.layers.decoder import Head, RMSNorm
from llm.memory.transfer import to_device
from llm.models.base import PipelineModel
from llm.models.session import EngineSession
from llm.request import IdRange
from llm.sampling.log_probabilities import (
    LogProbabilities,
    log_probabilities,
    with_unpredicted_first,
)


class CausalModel(PipelineModel[ScheduledRow]):
    """A decoder-only model whose context is one row of a scheduled batch."""

    can_capture: ClassVar[bool] = True
    final_norm: RMSNorm
    logits_of: Head

    @abstractmethod
    def hidden_states(self, batch: ForwardBatch, cache: KVCacheInputs) -> Tensor:
        """Return [T, hidden] of the last layer, before the final norm."""

    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[ScheduledRow]],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> ModelInputs:
        """See `PipelineModel`. The cache inputs hold the forward batch of the same rows."""
        num_replicas = self.pipeline_config.model.data_parallel_degree
        if len(replica_batches) != num_replicas:
            raise ValueError(f"{len(replica_batches)} replica batches for {num_replicas} replicas")
        if kv_cache_inputs is None:
            raise ValueError(f"{type(self).__name__} needs kv_cache_inputs")
        if return_n_logits < 1:
            raise ValueError(f"return_n_logits={return_n_logits} must be at least 1")
        rows = [row for batch in replica_batches for row in batch]
        fed = tuple(len(row.token_ids) for row in rows)
        forward_batch = kv_cache_inputs.forward_batch
        if fed != forward_batch.query_lens:
            raise ValueError(f"the rows feed {fed} tokens, the cache {forward_batch.query_lens}")
        num_logits = self._num_logits(rows, return_n_logits)
        logit_rows = None  # all tokens
        if num_logits != list(fed):
            wanted = zip(accumulate(fed), num_logits, strict=True)
            tokens = [token for end, count in wanted for token in range(end - count, end)]
            logit_rows = _index(tokens, forward_batch.positions.device)
        return ModelInputs(
            forward_batch=forward_batch,
            kv_cache_inputs=kv_cache_inputs,
            sampling_rows=tuple(index for index, row in enumerate(rows) if row.generates),
            logit_rows=logit_rows,
            logit_offsets=tuple(accumulate(num_logits, initial=0)),
            adapters=tuple(row.lora for row in rows),
        )

    def _num_logits(self, rows: Sequence[ScheduledRow], return_n_logits: int) -> list[int]:
        """Return how many rows of logits each batch row needs, counted from its end."""
        if self.return_logits is ReturnLogits.ALL:
            return [len(row.token_ids) for row in rows]
        count = return_n_logits if self.return_logits is ReturnLogits.VARIABLE else 1
        for row in rows:
            if row.generates and count > len(row.token_ids):
                raise ValueError(f"{count} logits wanted of {len(row.token_ids)} tokens fed")
        return [len(row.token_ids) if row.echoes else count if row.generates else 0 for row in rows]

    def prepare_next_token_inputs(
        self, next_tokens: Tensor, prev_model_inputs: ModelInputs
    ) -> ModelInputs:
        """See `PipelineModel`. Every row must have sampled."""
        cache = prev_model_inputs.kv_cache_inputs
        num_rows = len(prev_model_inputs.forward_batch.query_lens)
        if cache is None or len(prev_model_inputs.sampling_rows) != num_rows:
            raise ValueError("only a batch in which every row samples can continue")
        if len(next_tokens) != num_rows:
            raise ValueError(f"{len(next_tokens)} next tokens for {num_rows} rows")
        advanced = cache.advanced(next_tokens)
        return ModelInputs(
            forward_batch=advanced.forward_batch,
            kv_cache_inputs=advanced,
            sampling_rows=prev_model_inputs.sampling_rows,
            logit_offsets=tuple(range(num_rows + 1)),
            adapters=prev_model_inputs.adapters,
        )

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """See `PipelineModel`."""
        cache = model_inputs.kv_cache_inputs
        if cache is None:
            raise ValueError(f"{type(self).__name__} needs kv_cache_inputs")
        if self.lora_manager is not None:
            query_lens = model_inputs.forward_batch.query_lens
            self.lora_manager.begin(model_inputs.adapters, query_lens)
        with torch.inference_mode():
            hidden = self.hidden_states(model_inputs.forward_batch, cache)
            rows = model_inputs.logit_rows
            wanted = hidden if rows is None else hidden[rows]
            if len(wanted):
                logits = self.logits_of(wanted)
            else:
                logits = torch.empty(0, self.vocab_size, device=hidden.device)
            offsets = model_inputs.logit_offsets
            last = [offsets[row + 1] - 1 for row in model_inputs.sampling_rows]
            is_all = len(last) == len(logits)
            next_token_logits = logits if is_all else logits[_index(last, logits.device)]
            states = self._returned_states(hidden, model_inputs)
            return ModelOutputs(logits, next_token_logits, offsets, states)

    def write_logits(
        self,
        batch: ForwardBatch,
        cache: KVCacheInputs,
        target: Tensor,
        tokens: Tensor | None = None,
        states: Tensor | None = None,
        needed: Tensor | None = None,
    ) -> None:
        """See `PipelineModel`. Every row is computed without an adapter."""
        if self.lora_manager is not None:
            num_rows = len(batch.query_lens)
            self.lora_manager.begin(("",) * num_rows, batch.query_lens)
        with torch.inference_mode():
            hidden = self.hidden_states(batch, cache)
            wanted = hidden if tokens is None else hidden.index_select(0, tokens)
            self.logits_of(wanted, target, needed)
            if states is not None:
                states.copy_(self.final_norm(wanted))

    def limit_head(self, common: IdRange) -> bool:
        """See `PipelineModel`."""
        return self.logits_of.limit(common)

    def _returned_states(self, hidden: Tensor, model_inputs: ModelInputs) -> Tensor | None:
        match self.return_hidden_states:
            case ReturnHiddenStates.ALL:
                return hidden
            case ReturnHiddenStates.ALL_NORMALIZED:
                return self.final_norm(hidden)
            case ReturnHiddenStates.LAST:
                ends = model_inputs.forward_batch.row_offsets[1:]
                return hidden[_index([end - 1 for end in ends], hidden.device)]
        return None

    def compute_log_probabilities(
        self,
        session: EngineSession,
        model_inputs: ModelInputs,
        model_outputs: ModelOutputs,
        next_tokens: Tensor,
        batch_top_n: list[int],
        batch_echo: list[bool],
    ) -> list[LogProbabilities | None]:
        """See `PipelineModel`. Never from logits changed by temperature or penalties."""
        num_rows = len(model_inputs.sampling_rows)
        lengths = (len(model_outputs.next_token_logits), len(next_tokens))
        if {*lengths, len(batch_top_n), len(batch_echo)} != {num_rows}:
            raise ValueError(
                f"{num_rows} sampling rows, but {lengths[0]} rows of logits, {lengths[1]} tokens, "
                f"{len(batch_top_n)} top_n and {len(batch_echo)} echo"
            )
        for top_n in batch_top_n:
            if not 0 <= top_n <= self.vocab_size:
                raise ValueError(f"top_n={top_n} must be in [0, {self.vocab_size}]")
        if any(batch_echo) and self.return_logits is not ReturnLogits.ALL:
            raise ValueError("echo needs a model that returns the logits of all tokens")
        found: list[LogProbabilities | None] = []
        for place, (top_n, echo) in enumerate(zip(batch_top_n, batch_echo, strict=True)):
            logits, tokens = model_outputs.next_token_logits[place, None], next_tokens[place, None]
            is_first = False
            if echo:
                row = model_inputs.sampling_rows[place]
                logits, tokens = _echoed(model_inputs, model_outputs, row, tokens)
                batch = model_inputs.forward_batch
                is_first = batch.query_lens[row] == batch.context_lens[row]
            entry = log_probabilities(logits, tokens, top_n) if top_n else None
            found.append(with_unpredicted_first(entry) if entry and is_first else entry)
        return found


def _echoed(
    model_inputs: ModelInputs, model_outputs: ModelOutputs, row: int, sampled: Tensor
) -> tuple[Tensor, Tensor]:
    """Return all logits of a row, and the tokens they predict: those fed but the first, and
    `sampled`.
    """
    start, end = model_outputs.logit_offsets[row : row + 2]
    fed = model_inputs.forward_batch.input_ids[start + 1 : end]
    return model_outputs.logits[start:end], torch.cat([fed, sampled.long()])


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(rows, dtype=torch.int64), device)
