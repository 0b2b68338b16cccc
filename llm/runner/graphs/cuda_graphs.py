"""`GraphRunner`: forwards as one launch, captured beforehand for some shapes (`graphs.shapes`).

    load ─> replan ─> send ─> replay    input buffers, attention's plan, then two launches:
                        ├─ tokens that the forward before has sampled ─> ids [T]
                        ├─ embedding, layers ─> hidden states [T]
                        ├─ norm, head, of the tokens that are sampled ─> float32 logits [S, V]
                        └─ sampling, of the rows that were loaded for it ─> int32 tokens [S]

The smallest shape that has room for a batch is replayed; tokens that pad write to slot 0 of page 0.
Prompts of any number and lengths share a shape's tokens with decode rows; which tokens are
sampled is read from the buffers.

    table    | tokens that were sampled last | 0 | 1 | 2 | … | V - 1 |
    ids      places in it: so a forward feeds tokens that the host does not know yet

For frames the table holds the frames that were sampled last only, and ids are K codes for each
token, of which the first may be a place in it.

All shapes read the same input buffers and write the same logits: one forward at a time, and its
logits are there until the next one.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.attention.base import AttentionBackend, CapturedShape, PlanMemory, PlannedAttention
from llm.batch import (
    ForwardBatch,
    ForwardMode,
    ModelInputs,
    ModelOutputs,
    ReturnHiddenStates,
    ReturnLogits,
    ScheduledBatch,
)
from llm.models.base import PipelineModel
from llm.request import IdRange
from llm.runner.future_tokens import NOTHING_AWAITED, FutureTokens
from llm.runner.graphs.capture import CapturedWork, GraphCapture
from llm.runner.graphs.input_buffers import InputBuffers, Inputs, InputSizes, TokenViews
from llm.runner.graphs.rows import FIRST_AWAITED, GraphRows
from llm.runner.graphs.shapes import GraphLimits, decode_shapes, prompt_shapes
from llm.runner.graphs.stats import GraphStats
from llm.sampling.device.records import NO_ID
from llm.sampling.sampler import CapturedSampling

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class GraphInputs(ModelInputs):
    """Inputs in the buffers, valid until the buffers are loaded again."""

    shape: CapturedShape
    given: tuple[Tensor, Tensor] | None = None  # ids and positions [T] on the device


ALL_IDS = (0, NO_ID)  # of any vocabulary
LoadRecords = Callable[[np.ndarray], None]
"""Function that writes the records int32 [B, record_words] of all rows, with padding rows."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    inputs: Inputs
    tokens: TokenViews
    attention: PlannedAttention[Any]
    work: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: Inputs
    tokens: TokenViews
    attention: PlannedAttention[Any]
    work: CapturedWork


class GraphRunner:
    """Graphs of one model on one device, over a backend that `can_capture`.

    Batches within the limits are replayed once `capture` has run; those with prompts only where the
    backend has captured shapes for prompts and one of them has room.
    """

    def __init__(
        self,
        model: PipelineModel[Any],
        backend: AttentionBackend[Any],
        capture: GraphCapture,
        limits: GraphLimits,
        *,
        logits_dtype: torch.dtype = torch.float32,
        sampling: CapturedSampling | None = None,
        common_ids: IdRange | None = None,
    ) -> None:
        """Allocate the buffers.

        `logits_dtype`: format that logits are rounded to. `sampling` None: sampling is not
        captured. `common_ids`: see `PipelineConfig.common_ids`.

        Raises `RuntimeError` for a model or a backend that cannot be captured, and for a model that
        hands out hidden states.
        """
        for part in (model, backend):
            if not part.can_capture:
                raise RuntimeError(f"{type(part).__name__} cannot be captured")
        if model.return_hidden_states is not ReturnHiddenStates.NONE:
            raise RuntimeError("a captured forward yields logits only: return no hidden states")
        self._model = model
        self._backend = backend
        self._capture = capture
        self._max_context = limits.max_context
        self._logits_dtype = logits_dtype
        self._sampling = sampling
        self.is_limited = common_ids is not None and model.limit_head(common_ids)
        """Whether logits that no row samples from may be left out."""
        self._frame_decoder = decoder = model.frame_decoder
        self._ids_per_token = 1 if decoder is None else decoder.shape.num_ids
        self.decode_shapes = decode_shapes(limits.max_rows)
        self.prompt_shapes: tuple[CapturedShape, ...] = ()
        # A state advances token by token: the rows of a captured forward with states have one each.
        self._has_states = model.states is not None
        can_capture_prompts = backend.can_capture_prompts and not self._has_states
        if can_capture_prompts and model.return_logits is not ReturnLogits.ALL:
            self.prompt_shapes = prompt_shapes(limits.max_rows, limits.max_tokens)
        self._sizes = [shape.num_singles for shape in self.decode_shapes]
        most, device = self._sizes[-1], backend.pool.device
        most_bytes = max(self._input_sizes(shape).num_bytes for shape in self.shapes)
        self._buffers = InputBuffers(most_bytes, device)
        self._logits = torch.zeros(most, model.vocab_size, device=device)
        self._most_rows = most
        self._allocate_tokens(model, device)
        self._latest: Tensor | None = None  # the tokens at the head of the table
        self._captured: dict[CapturedShape, _Captured] = {}
        self._has_warned = False
        self.num_replays = 0
        self.num_eager_decodes = 0
        self.num_prompt_replays = 0
        self.num_eager_prompts = 0

    def _allocate_tokens(self, model: PipelineModel[Any], device: torch.device) -> None:
        """Allocate the table and the ids that it is read into; for frames also hidden states."""
        most, count = self._most_rows, self._ids_per_token
        most_tokens = max(shape.num_tokens for shape in self.shapes)
        long = torch.int64
        self._states: Tensor | None = None
        if self._frame_decoder is None:
            self._first_id = most  # position of token 0 in the table
            self._table = torch.zeros(most + model.vocab_size, dtype=long, device=device)
            torch.arange(model.vocab_size, out=self._table[most:])
            self._ids = torch.zeros(most_tokens, dtype=long, device=device)
            return
        self._first_id = 0
        size = model.shape(model.huggingface_config).hidden_size
        self._states = torch.zeros(most, size, dtype=model.dtype, device=device)
        self._table = torch.zeros(most, count, dtype=long, device=device)
        self._ids = torch.zeros(most_tokens, count, dtype=long, device=device)

    @property
    def shapes(self) -> tuple[CapturedShape, ...]:
        """All captured shapes by number of tokens, ascending."""
        both = (*self.decode_shapes, *self.prompt_shapes)
        return tuple(sorted(both, key=lambda shape: shape.num_tokens))

    def capture(self) -> None:
        """Capture every shape that is not captured yet, the largest first."""
        missing = [shape for shape in reversed(self.shapes) if shape not in self._captured]
        started_s = time.perf_counter()
        for shape in missing:
            self._captured[shape] = self._capture_shape(shape)
        if missing:
            seconds = time.perf_counter() - started_s
            text = "captured %d shapes up to %d rows, %d of them with prompts, in %.2f s"
            num_prompts = sum(shape.num_prompts > 0 for shape in missing)
            logger.info(text, len(missing), self._sizes[-1], num_prompts, seconds)

    def free(self) -> None:
        """Free all graphs, also of those who still refer to them: NCCL's end waits for that. No
        thread may replay one meanwhile.
        """
        for captured in self._captured.values():
            captured.work.reset()
        self._captured.clear()

    def run(self, shapes: Iterable[CapturedShape]) -> None:
        """Run the forwards of shapes with padding rows, without capturing them."""
        for shape in shapes:
            self._prepare(shape).work()

    def _capture_shape(self, shape: CapturedShape) -> _Captured:
        found = self._prepare(shape)
        work = self._capture.capture(found.work)
        return _Captured(found.inputs, found.tokens, found.attention, work)

    def _prepare(self, shape: CapturedShape) -> _Prepared:
        """Load padding rows into the buffers, and return their forward."""
        inputs, rows = self._buffers.inputs(self._input_sizes(shape)), GraphRows.padding(0)
        page_size = self._backend.pool.page_size
        pages = rows.used_pages(page_size)
        memory = PlanMemory(inputs.slots.device, inputs.tables)
        plan = self._backend.capture_plan(shape, self._max_context, memory)
        self._buffers.begin()
        inputs.records.take()[:] = 0
        inputs.needed.take()[:] = ALL_IDS
        rows.fill(inputs, shape, pages, first_id=self._first_id, num_ids=self._ids_per_token)
        if self._has_states:
            rows.fill_states(inputs)
        tokens = TokenViews(self._ids, inputs)
        self._backend.replan(plan, rows.batch(tokens, 0, pages))
        self._buffers.send()
        rows = GraphRows.padding(shape.num_tokens)
        batch = rows.batch(tokens, 0, rows.used_pages(page_size))
        if shape.num_prompts:
            batch = replace(batch, mode=ForwardMode.MIXED)
        if self._has_states:
            read, written = inputs.states.device.view(2, -1)
            batch = replace(batch, states=(read, written))
        attention = PlannedAttention(batch, self._backend, plan)
        work = partial(self._step, batch, attention, inputs)
        return _Prepared(inputs, tokens, attention, work)

    def _step(self, batch: ForwardBatch, attention: PlannedAttention[Any], inputs: Inputs) -> None:
        if self._frame_decoder is None:
            torch.index_select(self._table, 0, inputs.ids.device, out=batch.input_ids)
        else:
            self._write_frames(inputs.ids.device, batch.input_ids)
        sampled = inputs.sampled.device if len(inputs.sampled.device) else None
        logits = self._logits[: len(batch.input_ids if sampled is None else sampled)]
        states = None if self._states is None else self._states[: len(logits)]
        needed = inputs.needed.device if self.is_limited else None
        self._model.write_logits(batch, attention, logits, sampled, states, needed)
        if self._logits_dtype != logits.dtype:
            logits.copy_(logits.to(self._logits_dtype))
        if self._sampling is not None:
            records = inputs.records.device.view(len(logits), -1)
            self._table[: len(logits)].copy_(self._sampling.program(logits, records, states))

    def _write_frames(self, ids: Tensor, target: Tensor) -> None:
        """Write the codes int64 [T × K], or the frames of the table that they name, to [T, K]."""
        codes = ids.view(target.shape)
        places = FIRST_AWAITED - codes[:, :1]  # negative for known frames
        latest = self._table[places.flatten().clamp(min=0)]
        target.copy_(torch.where(places >= 0, latest, codes))

    @property
    def samples(self) -> bool:
        """Whether a replay includes sampling."""
        return self._sampling is not None

    def stats(self) -> GraphStats:
        """Return the number of replayed and eager forwards so far."""
        return GraphStats(
            len(self._captured),
            self.num_replays,
            self.num_eager_decodes,
            self.num_prompt_replays,
            self.num_eager_prompts,
        )

    def prepare(
        self,
        batch: ScheduledBatch,
        awaited: FutureTokens = NOTHING_AWAITED,
        sampled: Tensor | None = None,
    ) -> GraphInputs | None:
        """Load a batch's rows for its first forward, and plan attention for them.

        Tokens that are `awaited` are taken from those `sampled` before. Returns None, and counts an
        eager forward, when the batch cannot be replayed.
        """
        rows = GraphRows.of(batch) if self._is_plain(batch) else None
        shape = None if rows is None else self._shape_for(rows)
        if shape is not None and sampled is not None and len(sampled) > self._most_rows:
            shape = None  # the table has no room for them
        if rows is None or shape is None:
            self.num_eager_decodes += batch.mode.is_decode
            self.num_eager_prompts += batch.mode.is_extend
            return None
        if sampled is not None and awaited:
            self._keep(sampled)
        return self._inputs(rows, shape, awaited)

    def _is_plain(self, batch: ScheduledBatch) -> bool:
        """Whether the rows only request tokens of the unmodified model."""
        if self._frame_decoder is not None and any(
            bytes in map(type, tokens) for tokens in batch.columns.token_ids
        ):
            return False  # vectors are no codes
        if batch.is_plain or batch.mode.is_idle:
            return not batch.mode.is_idle
        if any(batch.columns.lora):
            return False
        prompts = () if batch.mode.is_decode else [row for row in batch.rows if row.is_extend]
        return not any(row.echoes or row.embeds for row in prompts)

    def _shape_for(self, rows: GraphRows) -> CapturedShape | None:
        """Return the smallest shape that has room for the batch."""
        count, singles = len(rows.request_ids), rows.num_singles
        if not self.fits(count):
            return None
        # A decode forward of a model of frames is captured for frames: it takes no text tokens.
        takes_all = self._frame_decoder is None or rows.mode.is_decode
        if takes_all and singles == count == len(rows.sampling_rows):
            return self.decode_shapes[bisect_left(self._sizes, count)]
        needed = (singles, count - singles, len(rows.token_ids) - singles)
        return next((shape for shape in self.prompt_shapes if shape.has_room(*needed)), None)

    def fits(self, num_rows: int) -> bool:
        """Whether a batch of so many rows fits the graphs; logs once when it does not."""
        if num_rows > self._sizes[-1] and not self._has_warned:
            self._has_warned = True
            text = "batches of more than %d rows (this one has %d) run without CUDA graphs"
            logger.warning(text, self._sizes[-1], num_rows)
        return num_rows <= self._sizes[-1] and bool(self._captured)

    def advance(self, next_tokens: Tensor, inputs: GraphInputs) -> GraphInputs:
        """Return the inputs of the forward that feeds `next_tokens` [B], without waiting.

        Every row must have sampled.
        """
        before = inputs.forward_batch
        if len(inputs.sampling_rows) != len(before.request_ids):
            raise ValueError("only a batch in which every row samples can continue")
        lengths = tuple([length + 1 for length in before.context_lens])
        self._keep(next_tokens)
        return self._decode(before.request_ids, lengths, before.pages)

    def _keep(self, sampled: Tensor) -> None:
        """Copy tokens [B] to the head of the table, unless they were sampled there."""
        if sampled is not self._latest:
            self._table[: len(sampled)].copy_(sampled)
            self._latest = sampled

    def prepare_tensors(self, batch: ForwardBatch) -> GraphInputs:
        """Load a decode batch whose ids and positions are on the device already."""
        inputs = self._decode(batch.request_ids, batch.context_lens, batch.pages)
        inputs.given = (batch.input_ids, batch.positions)
        return inputs

    def _decode(
        self,
        request_ids: tuple[str, ...],
        context_lens: tuple[int, ...],
        pages: tuple[Sequence[int], ...],
    ) -> GraphInputs:
        rows = GraphRows.decoding(request_ids, context_lens, pages)
        shape = self.decode_shapes[bisect_left(self._sizes, len(request_ids))]
        return self._inputs(rows, shape, FutureTokens(None, None))

    def _inputs(self, rows: GraphRows, shape: CapturedShape, awaited: FutureTokens) -> GraphInputs:
        captured, pages = self._captured[shape], rows.used_pages(self._backend.pool.page_size)
        self._buffers.begin()
        rows.fill(
            captured.inputs,
            shape,
            pages,
            first_id=self._first_id,
            awaited=awaited,
            num_ids=self._ids_per_token,
        )
        if self._has_states:
            rows.fill_states(captured.inputs)
        first = shape.first_token(rows.num_singles)
        batch = rows.batch(captured.tokens, first, pages)
        self._backend.replan(captured.attention.plan, batch)
        return GraphInputs(
            forward_batch=batch,
            kv_cache_inputs=captured.attention,
            sampling_rows=rows.sampling_rows,
            logit_offsets=rows.logit_offsets,
            adapters=("",) * len(rows.request_ids),
            shape=shape,
        )

    def _input_sizes(self, shape: CapturedShape) -> InputSizes:
        """Return the input sizes; a decode forward samples all tokens and needs no indices for
        that.
        """
        num_sampled, num_rows = 0, shape.num_singles
        if shape.num_prompts:
            num_rows = num_sampled = min(num_rows + shape.num_prompts, self._sizes[-1])
        words = 0 if self._sampling is None else self._sampling.record_words
        tables = self._backend.table_words(shape, self._max_context)
        num_ids, num_states = self._ids_per_token, shape.num_singles if self._has_states else 0
        sizes = (num_rows * words, shape.num_tokens, num_sampled, tables)
        return InputSizes(*sizes, ids_per_token=num_ids, num_states=num_states)

    def replay(
        self,
        inputs: GraphInputs,
        load: LoadRecords | None = None,
        *,
        reads_logits: bool = False,
    ) -> ModelOutputs:
        """Send the inputs that were loaded last and run their forward once.

        The logits are valid until the next replay. `load` writes the sampling parameters; None: no
        sampling. With sampling those that no row samples from may be those of an earlier step,
        unless the caller `reads_logits`.
        """
        captured = self._captured[inputs.shape]
        records, needed = captured.inputs.records.take(), captured.inputs.needed.take()
        num_rows = len(inputs.sampling_rows)
        needed[:] = ALL_IDS
        if load is None or self._sampling is None:
            records[:] = 0
        else:
            records = records.reshape(-1, self._sampling.record_words)
            load(records)
            needed_ids = self._sampling.needed_ids
            if self.is_limited and not reads_logits and needed_ids is not None:
                needed[:] = needed_ids(records[:num_rows])
        self._buffers.send()
        if inputs.given is not None:
            ids, positions = inputs.given
            captured.inputs.ids.device[: len(ids)].copy_(ids + self._first_id)
            captured.inputs.positions.device[: len(positions)].copy_(positions)
        captured.work.replay()
        if self.samples:
            self._latest = None
        is_decode = inputs.forward_batch.mode.is_decode
        self.num_replays += is_decode
        self.num_prompt_replays += not is_decode
        logits = self._logits[:num_rows]
        states = None if self._states is None else self._states[:num_rows]
        return ModelOutputs(logits, logits, inputs.logit_offsets, states)

    def tokens(self, inputs: GraphInputs) -> Tensor:
        """Return a copy of the tokens int32 [B], or frames [B, K], that the replay has sampled."""
        self._latest = self._table[: len(inputs.sampling_rows)].int()
        return self._latest
