"""`GraphRunner`: decode forwards as one launch, captured beforehand for some numbers of rows.

    rows        1 2 3 4 5 6 7 8 9 …                 the smallest bucket that holds them is replayed;
    buckets     1 2   4       8      12 16 24 …     rows that pad write to slot 0 of page 0

    load ─> replan ─> replay        input buffers, then attention's plan, then one launch:
                        ├─ embedding, layers, norm, head ─> float32 logits [bucket, V]
                        └─ sampling, of the rows that were loaded for it ─> int32 tokens [bucket]

All buckets read the same input buffers and write the same logits: one forward at a time, and its
logits are there until the next one.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.attention.base import AttentionBackend, PlannedAttention
from llm.batch import ForwardBatch, ForwardMode, ModelInputs, ModelOutputs, ScheduledBatch
from llm.models.base import PipelineModel
from llm.runner.graph_capture import CapturedWork, GraphCapture
from llm.runner.graph_figures import GraphFigures
from llm.runner.input_buffers import InputBuffers

logger = logging.getLogger(__name__)

MAX_GRAPH_ROWS = 512
RECORD_BYTES = 3 * 2**19  # of one captured layer, beside its scratch; the head counts as one
PADDING_PAGES = (0,)


def graph_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that are captured, ascending: at most `MAX_GRAPH_ROWS` of them."""
    most = min(max_rows, MAX_GRAPH_ROWS)
    sizes = (1, 2, 4, 8, 12, *range(16, 64, 8), *range(64, 256, 16), *range(256, most, 32))
    return (*(size for size in sizes if size < most), most)


def estimate_graph_bytes(max_rows: int, vocab_size: int, width: int, num_layers: int) -> int:
    """Device memory of all buckets: logits, what the head puts out (`width` bytes for a value), and
    what the driver keeps of each kernel.
    """
    buckets = graph_buckets(max_rows)
    records = len(buckets) * (num_layers + 1) * RECORD_BYTES
    return buckets[-1] * vocab_size * (4 + width) + records


@dataclass(kw_only=True, slots=True)
class GraphInputs(ModelInputs):
    """Inputs that lie in the buffers, until those are loaded again."""

    bucket: int


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """Host values of a decode forward: [B] each."""

    request_ids: tuple[str, ...]
    token_ids: Sequence[int]
    context_lens: tuple[int, ...]  # the fed token counted
    pages: tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class _Captured:
    attention: PlannedAttention[Any]
    work: CapturedWork


class GraphRunner:
    """For one model on one device, over a backend that `can_capture`.

    Batches of up to `max_rows` rows and contexts of up to `max_context` tokens are replayed once
    `capture` has run.
    """

    def __init__(
        self,
        model: PipelineModel[Any],
        backend: AttentionBackend[Any],
        capture: GraphCapture,
        *,
        max_rows: int,
        max_context: int,
        logits_dtype: torch.dtype = torch.float32,
        sample: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`logits_dtype`: what logits are rounded to. `sample` turns logits [B, V] into int32 [B]
        tokens; None: sampling is not captured.

        Raises `RuntimeError` for a model or a backend that cannot be captured.
        """
        for part in (model, backend):
            if not part.can_capture:
                raise RuntimeError(f"{type(part).__name__} cannot be captured")
        self._model = model
        self._backend = backend
        self._capture = capture
        self._max_context = max_context
        self._logits_dtype = logits_dtype
        self._sample = sample
        self.buckets = graph_buckets(max_rows)
        most, device = self.buckets[-1], backend.pool.device
        self._buffers = InputBuffers(most, device)
        self._logits = torch.zeros(most, model.vocab_size, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int32, device=device)
        self._captured: dict[int, _Captured] = {}
        self._has_warned = False
        self.num_replays = 0
        self.num_eager_decodes = 0

    def capture(self) -> None:
        """Capture every bucket that is not captured yet, the largest first."""
        missing = [size for size in reversed(self.buckets) if size not in self._captured]
        started_s = time.perf_counter()
        for size in missing:
            self._captured[size] = self._capture_bucket(size)
        if missing:
            seconds = time.perf_counter() - started_s
            text = "decoding captured for %d numbers of rows up to %d in %.2f s"
            logger.info(text, len(missing), missing[0], seconds)

    def _capture_bucket(self, num_rows: int) -> _Captured:
        slots = self._buffers.columns(num_rows)[2]
        plan = self._backend.capture_plan(num_rows, self._max_context, slots)
        rows = _DecodeRows((), (), (), ())
        self._load(rows, num_rows)
        batch = self._padded(rows, num_rows)
        self._backend.replan(plan, batch)
        attention = PlannedAttention(batch, self._backend, plan)
        return _Captured(attention, self._capture.capture(partial(self._step, batch, attention)))

    def _step(self, batch: ForwardBatch, attention: PlannedAttention[Any]) -> None:
        num_rows = len(batch.query_lens)
        logits = self._logits[:num_rows]
        self._model.write_logits(batch, attention, logits)
        if self._logits_dtype != logits.dtype:
            logits.copy_(logits.to(self._logits_dtype))
        if self._sample is not None:
            self._tokens[:num_rows].copy_(self._sample(logits))

    @property
    def samples(self) -> bool:
        """Whether a replay samples, too."""
        return self._sample is not None

    def figures(self) -> GraphFigures:
        """What was replayed so far, and what was not."""
        return GraphFigures(len(self._captured), self.num_replays, self.num_eager_decodes)

    def can_run(self, batch: ScheduledBatch) -> bool:
        """Whether a batch's first forward is replayed; counts decode batches that are not."""
        if batch.mode is not ForwardMode.DECODE:
            return False
        is_plain = all(row.samples and not row.lora for row in batch.rows)
        fits = is_plain and self.fits(len(batch.rows))
        self.num_eager_decodes += not fits
        return fits

    def fits(self, num_rows: int) -> bool:
        """Whether a bucket holds so many rows. Says so once when none does."""
        if num_rows > self.buckets[-1] and not self._has_warned:
            self._has_warned = True
            text = "decode batches of more than %d rows (this one has %d) run without CUDA graphs"
            logger.warning(text, self.buckets[-1], num_rows)
        return num_rows <= self.buckets[-1] and bool(self._captured)

    def prepare(self, batch: ScheduledBatch) -> GraphInputs:
        """Load the rows of a batch that `can_run`, and plan attention for them."""
        rows = batch.rows
        return self._inputs(
            _DecodeRows(
                tuple([row.request_id for row in rows]),
                [row.token_ids[0] for row in rows],
                tuple([row.start + 1 for row in rows]),
                tuple([row.pages for row in rows]),
            )
        )

    def advance(self, next_tokens: Tensor, inputs: GraphInputs) -> GraphInputs:
        """The inputs of the forward that feeds `next_tokens` [B]; the host is not waited for."""
        before = inputs.forward_batch
        rows = _DecodeRows(
            before.request_ids,
            [0] * len(before.request_ids),
            tuple([length + 1 for length in before.context_lens]),
            before.pages,
        )
        advanced = self._inputs(rows)
        advanced.forward_batch.input_ids.copy_(next_tokens)
        return advanced

    def prepare_tensors(self, batch: ForwardBatch) -> GraphInputs:
        """The same for a decode batch whose ids and positions are on the device already."""
        ids = [0] * len(batch.request_ids)
        inputs = self._inputs(_DecodeRows(batch.request_ids, ids, batch.context_lens, batch.pages))
        inputs.forward_batch.input_ids.copy_(batch.input_ids)
        inputs.forward_batch.positions.copy_(batch.positions)
        return inputs

    def _inputs(self, rows: _DecodeRows) -> GraphInputs:
        num_rows = len(rows.request_ids)
        bucket = self.buckets[bisect_left(self.buckets, num_rows)]
        self._load(rows, bucket)
        self._backend.replan(self._captured[bucket].attention.plan, self._padded(rows, bucket))
        ids, positions, slots = self._buffers.columns(bucket)
        forward_batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            request_ids=rows.request_ids,
            query_lens=(1,) * num_rows,
            context_lens=rows.context_lens,
            pages=rows.pages,
            page_size=self._backend.pool.page_size,
            input_ids=ids[:num_rows],
            positions=positions[:num_rows],
            slot_mapping=slots[:num_rows],
        )
        return GraphInputs(
            forward_batch=forward_batch,
            kv_cache_inputs=self._captured[bucket].attention,
            sampling_rows=tuple(range(num_rows)),
            logit_offsets=tuple(range(num_rows + 1)),
            adapters=("",) * num_rows,
            bucket=bucket,
        )

    def _load(self, rows: _DecodeRows, bucket: int) -> None:
        size, num_rows = self._backend.pool.page_size, len(rows.request_ids)
        numbers = np.zeros((3, bucket), dtype=np.int64)
        if num_rows:
            positions = np.array(rows.context_lens, dtype=np.int64) - 1
            index = (positions // size).tolist()
            pages = [table[place] for table, place in zip(rows.pages, index, strict=True)]
            numbers[0, :num_rows] = rows.token_ids
            numbers[1, :num_rows] = positions
            numbers[2, :num_rows] = np.array(pages, dtype=np.int64) * size + positions % size
        self._buffers.load(numbers)

    def _padded(self, rows: _DecodeRows, bucket: int) -> ForwardBatch:
        """A batch of the whole bucket over the buffers."""
        missing = bucket - len(rows.request_ids)
        ids, positions, slots = self._buffers.columns(bucket)
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            request_ids=rows.request_ids + ("",) * missing,
            query_lens=(1,) * bucket,
            context_lens=rows.context_lens + (1,) * missing,
            pages=rows.pages + (PADDING_PAGES,) * missing,
            page_size=self._backend.pool.page_size,
            input_ids=ids,
            positions=positions,
            slot_mapping=slots,
        )

    def replay(self, inputs: GraphInputs) -> ModelOutputs:
        """The forward of inputs that were loaded last. Its logits are there until the next one."""
        self._captured[inputs.bucket].work.replay()
        self.num_replays += 1
        logits = self._logits[: len(inputs.sampling_rows)]
        return ModelOutputs(logits, logits, inputs.logit_offsets)

    def tokens(self, inputs: GraphInputs) -> Tensor:
        """int32 [B], what the replay has sampled: a copy, for the caller to keep."""
        # Not a plain one: a GPU makes those in another engine, and changing over takes time.
        return self._tokens[: len(inputs.sampling_rows)] + 0
