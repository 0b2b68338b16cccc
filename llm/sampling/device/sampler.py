"""`DeviceSampler`: all rows of a batch in one program on the device; the host never waits for it.

    plan = sampler.prepare(rows, …)      host values, frozen
    sampler.load(plan, buffers)          into fixed memory, behind the queued work
    tokens = sampler.sample(logits, buffers)       may be inside a captured CUDA graph

    sampler.write(plan, buffers, records)          the same, with records that the caller
    tokens = sampler.sample(logits, buffers, …)    copies to the device together with other data

A row's token depends on its logits, its parameters, its seed and the index of the token alone.
The method, and the differences to `Sampler` (which is used on the CPU), are described in
`reference`. Rows that were not loaded get token 0. Each `sample` advances the loaded rows to
their next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from llm.batch import ScheduledRow, columns_of
from llm.errors import RequestError
from llm.kernels.together import compile_together
from llm.request import SamplingParams, Token
from llm.sampling.device.history import HistorySlots, HistoryUpdate, PenaltyHistory
from llm.sampling.device.records import (
    RECORD_WORDS,
    Flag,
    RecordTable,
    effective_window,
    needed_ids,
)
from llm.sampling.device.reference import sample_reference
from llm.sampling.logits import TokenMask
from llm.sampling.sampler import CapturedSampling, TokenSampler, has_penalties

if TYPE_CHECKING:
    from llm.sampling.device.kernels import Scratch

MAX_VOCABULARY = 2**19  # keeps sums of weights and counts within 64 bits
SCRATCH_BYTES = 2**16 + 2**10  # per row, for the kernels; and for each tile of 1,024 ids:
TILE_BYTES = 576
MAX_WINDOW = 8192  # tokens of a penalty window, unless it covers the whole output


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Plan for the next token of each row."""

    records: np.ndarray  # int32 [B, words]
    updates: tuple[HistoryUpdate, ...] = ()  # histories to fill first
    mask: TokenMask | None = None  # bitmasks 0 to n
    words: Tensor | None = None  # int32 [m, ⌈V / 32⌉] on the host: bitmasks n to n + m


class SamplingBuffers:
    """Fixed memory that sampling reads, so that a graph can capture it."""

    def __init__(self, vocab_size: int, device: torch.device, max_rows: int) -> None:
        integer = {"dtype": torch.int32, "device": device}
        self.records = torch.zeros(max_rows, RECORD_WORDS, **integer)  # type: ignore[call-overload]
        self.masks = torch.zeros(max_rows, -(-vocab_size // 32), **integer)  # type: ignore[call-overload]
        self.num_loaded = 0  # rows from here on are padding
        self.scratch: Scratch | None = None  # memory of the kernels
        if device.type == "cuda":
            from llm.sampling.device.kernels import Scratch

            self.scratch = Scratch(vocab_size, device, max_rows)

    @property
    def max_rows(self) -> int:
        """Number of rows that fit."""
        return len(self.records)


class DeviceSampler:
    """Sampler for logits [B, vocab_size] on `device`, with B up to `max_rows`.

    Histories of `num_histories` (default `max_rows`) penalised requests are kept at once; each
    takes 2 × `vocab_size` + 4 × `max_window` bytes. `level` is the kernels' launch level, see
    `KernelSet`. Not thread-safe.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        max_rows: int,
        num_histories: int | None = None,
        max_window: int = MAX_WINDOW,
        level: int = 0,
    ) -> None:
        if vocab_size > MAX_VOCABULARY:
            raise ValueError(f"{vocab_size} tokens: sampling is exact up to {MAX_VOCABULARY}")
        self.vocab_size = vocab_size
        self._level = level
        self._device = device
        self._max_rows = max_rows
        self._table = RecordTable(vocab_size)
        count = max_rows if num_histories is None else num_histories
        self._slots = HistorySlots(count)
        self._history = PenaltyHistory(count, vocab_size, max_window, device)
        self._max_window = max_window

    def check(self, sampling: SamplingParams) -> None:
        """Raise `RequestError` for a penalty window beyond the limit."""
        if has_penalties(sampling) and effective_window(sampling) > self._max_window:
            raise RequestError(
                f"penalty_window={sampling.penalty_window} must be at most {self._max_window} on "
                "a GPU, or 0 for the whole output"
            )

    def create_buffers(self) -> SamplingBuffers:
        """Create buffers for up to `max_rows` rows."""
        return SamplingBuffers(self.vocab_size, self._device, self._max_rows)

    def warm_up(self, buffers: SamplingBuffers) -> None:
        """Compile the kernels, so that no request waits for that."""
        if buffers.scratch is not None:
            logits = torch.zeros(1, self.vocab_size, device=self._device)
            compile_together(lambda: self.sample(logits, buffers))
            self.sample(logits, buffers)

    def prepare(
        self, rows: Sequence[ScheduledRow], step: int = 0, mask: TokenMask | None = None
    ) -> DevicePlan:
        """Plan the next token of each row, `step` tokens after its `output_ids`.

        Only the number of those tokens matters: they need not be known on the host if they were
        sampled here. `mask` is that of the rows with a grammar. Every plan must be loaded and
        sampled, in order of creation. Raises `ValueError` for a penalty window longer than
        `max_window`, and the errors of `HistorySlots.claim`.
        """
        columns = columns_of(rows)
        indices = list(map(len, columns.output_ids))
        if step:
            indices = [index + step for index in indices]
        places = self._table.places(columns, indices)
        records = self._table.take(places)
        records["index"] = indices
        updates = self._claim(rows, records, step)
        words = self._set_masks(rows, records, places, mask)
        plain = records.view(np.int32).reshape(len(rows), RECORD_WORDS)
        return DevicePlan(plain, updates, mask, words)

    def _claim(
        self, rows: Sequence[ScheduledRow], records: np.ndarray, step: int
    ) -> tuple[HistoryUpdate, ...]:
        """Assign slots to the penalised rows; return the slots to fill."""
        penalised = (records["flags"] & Flag.PENALTIES).nonzero()[0]
        if not len(penalised):
            return ()
        if records["window"][penalised].max() > self._max_window:
            raise ValueError(f"penalty_window must be at most {self._max_window}")
        chosen = [rows[place] for place in penalised.tolist()]
        records["slot"][penalised], updates = self._slots.claim(chosen, step)
        return tuple(updates)

    def _set_masks(
        self,
        rows: Sequence[ScheduledRow],
        records: np.ndarray,
        places: Sequence[int],
        mask: TokenMask | None,
    ) -> Tensor | None:
        """Number the bitmasks: those of grammars, then those of candidates in many slices."""
        held = [] if mask is None else [n for n, row in enumerate(rows) if row.sampling.json_schema]
        words = self._table.words(places)
        masked = [*held, *words]
        if not masked:
            return None
        records["mask"][masked] = np.arange(len(masked))
        records["flags"][masked] |= Flag.MASK
        return torch.from_numpy(np.stack(list(words.values()))) if words else None

    def load(self, plan: DevicePlan, buffers: SamplingBuffers) -> None:
        """Copy a plan behind the device's queued work, without waiting."""
        num_rows = len(plan.records)
        records = _pinned(torch.from_numpy(plan.records), self._device)
        buffers.records[:num_rows].copy_(records, non_blocking=True)
        if num_rows < buffers.num_loaded:
            buffers.records[num_rows : buffers.num_loaded].zero_()
        buffers.num_loaded = num_rows
        self._load_rest(plan, buffers)

    def write(self, plan: DevicePlan, buffers: SamplingBuffers, records: np.ndarray) -> None:
        """Write records int32 [B, words] that the caller will copy; the other rows are padding."""
        num_rows = len(plan.records)
        records[:num_rows] = plan.records
        records[num_rows:] = 0
        self._load_rest(plan, buffers)

    def _load_rest(self, plan: DevicePlan, buffers: SamplingBuffers) -> None:
        count = 0
        if plan.mask is not None:
            count = len(plan.mask.words)
            buffers.masks[:count].copy_(plan.mask.words, non_blocking=True)
        if plan.words is not None:
            words = _pinned(plan.words, self._device)
            buffers.masks[count : count + len(words)].copy_(words, non_blocking=True)
        self._history.fill(plan.updates)

    def sample(
        self,
        logits: Tensor,
        buffers: SamplingBuffers,
        records: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return int32 [B] token ids for logits [B, V], which are not changed.

        `records` int32 [B, words]: those that were written; None: those of the buffers. On a GPU
        the ids are stored in `out`, or in the buffers until the next call; nothing is allocated.
        """
        if len(logits) > buffers.max_rows:
            raise ValueError(f"{len(logits)} rows, but room for {buffers.max_rows}")
        if records is None:
            records = buffers.records[: len(logits)]
        if buffers.scratch is None:
            tokens = sample_reference(logits, records, buffers.masks, self._history)
            return tokens if out is None else out.copy_(tokens)
        from llm.sampling.device.kernels import sample_with_kernels

        return sample_with_kernels(
            logits, records, buffers.masks, self._history, buffers.scratch, out, self._level
        )

    def release(self, request_id: str) -> None:
        """Free what is kept for a request that has ended; no effect for unknown ids."""
        self._table.release(request_id)
        self._slots.release(request_id)


class BufferedSampler(TokenSampler[DevicePlan]):
    """A `DeviceSampler` with its buffers."""

    may_need_tokens = False

    def __init__(self, sampler: DeviceSampler) -> None:
        self._sampler = sampler
        self._buffers = buffers = sampler.create_buffers()
        # Without `self`: a reference cycle would keep the memory until garbage collection.
        self.captured = CapturedSampling(
            lambda logits, records, _: sampler.sample(logits, buffers, records),
            RECORD_WORDS,
            needed_ids,
        )

    def warm_up(self) -> None:
        """See `TokenSampler`."""
        self._sampler.warm_up(self._buffers)

    def admit(self, sampling: SamplingParams) -> None:
        """See `TokenSampler`."""
        self._sampler.check(sampling)

    def needs_tokens(self, sampling: SamplingParams) -> bool:
        """See `TokenSampler`."""
        return False

    def prepare(
        self,
        rows: Sequence[ScheduledRow],
        step: int = 0,
        sampled: Sequence[Sequence[Token]] | None = None,
        mask: TokenMask | None = None,
    ) -> DevicePlan:
        """See `TokenSampler`."""
        return self._sampler.prepare(rows, step, mask)

    def load(self, plan: DevicePlan, records: np.ndarray) -> None:
        """See `TokenSampler`."""
        self._sampler.write(plan, self._buffers, records)

    def sample(self, logits: Tensor, plan: DevicePlan, states: Tensor | None = None) -> Tensor:
        """See `TokenSampler`."""
        self._sampler.load(plan, self._buffers)
        return self._sampler.sample(logits, self._buffers).clone()  # the buffers own the original

    def release(self, request_id: str) -> None:
        """See `TokenSampler`."""
        self._sampler.release(request_id)


def sampler_bytes(vocab_size: int, max_rows: int, num_histories: int | None = None) -> int:
    """Return the device memory of a `DeviceSampler`, and of its buffers."""
    histories = (max_rows if num_histories is None else num_histories) * (
        2 * vocab_size + 4 * MAX_WINDOW
    )
    scratch = SCRATCH_BYTES + TILE_BYTES * -(-vocab_size // 1024)
    return histories + max_rows * (4 * RECORD_WORDS + vocab_size // 8 + scratch)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return pinned memory, from which copies to the device do not block."""
    return tensor if device.type == "cpu" else tensor.pin_memory()
