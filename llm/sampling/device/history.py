"""`PenaltyHistory`: counts on the device of the tokens that each penalised request has generated.

    request id ─> slot      counts [slots, V]   occurrences within the penalty window
                            latest [slots, L]   token n at n % L, to remove it from the window

The sampler counts the tokens that it draws (of a frame the first code), so that the host need not
know them. The host only assigns slots, and fills a slot again when its request changes or was
preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llm.batch import ScheduledRow
from llm.memory.transfer import to_device
from llm.request import first_codes
from llm.sampling.device.records import effective_window
from llm.sequence import FUTURE_TOKEN

MAX_COUNT = 2**15 - 1  # largest value of a count; larger counts are clamped


@dataclass(frozen=True, slots=True)
class HistoryUpdate:
    """A slot to fill: the tokens of a request so far."""

    slot: int
    window: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _TrackedHistory:
    """A request that has a slot."""

    slot: int
    counted: int = -1  # index of the next token to be counted; -1: none was counted
    turn: int = 0  # turn of its last claim


class HistorySlots:
    """Assigns slots to requests, and tracks how many of their tokens have been counted."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._tracked: dict[str, _TrackedHistory] = {}
        self._turn = 0

    def claim(
        self, rows: Sequence[ScheduledRow], step: int
    ) -> tuple[list[int], list[HistoryUpdate]]:
        """Return a slot for each row, and the updates that must be made first.

        Raises `ValueError` for more rows than slots, and for a row to be filled whose last token is
        not known on the host yet.
        """
        if len(rows) > self._num_slots:
            raise ValueError(f"{len(rows)} rows have penalties, {self._num_slots} can be followed")
        self._turn += 1
        followed = [self._tracked.get(row.request_id) for row in rows]
        for one in followed:
            if one is not None:
                one.turn = self._turn
        slots, updates = [], []
        for row, found in zip(rows, followed, strict=True):
            index = len(row.output_ids) + step
            one = self._track(row.request_id) if found is None else found
            if one.counted != index:
                updates.append(_replay(row, index, one.slot))
            one.counted = index + 1
            slots.append(one.slot)
        return slots, updates

    def _track(self, request_id: str) -> _TrackedHistory:
        """Assign a slot to a request: a free one, or the one that was not claimed for longest."""
        if not self._free:
            self.release(min(self._tracked, key=lambda name: self._tracked[name].turn))
        one = self._tracked[request_id] = _TrackedHistory(self._free.pop(), turn=self._turn)
        return one

    def release(self, request_id: str) -> None:
        """Free the slot of a request; no effect when it has none."""
        one = self._tracked.pop(request_id, None)
        if one is not None:
            self._free.append(one.slot)


def _replay(row: ScheduledRow, index: int, slot: int) -> HistoryUpdate:
    tokens = tuple(first_codes(row.output_ids))
    if FUTURE_TOKEN in tokens or len(tokens) != index:
        raise ValueError(f"the tokens of {row.request_id} are neither counted nor known")
    return HistoryUpdate(slot, effective_window(row.sampling), tokens)


class PenaltyHistory:
    """Tensors of all slots. `max_window` bounds the penalty windows that an output can outgrow."""

    def __init__(
        self, num_slots: int, vocab_size: int, max_window: int, device: torch.device
    ) -> None:
        if max_window > MAX_COUNT:
            raise ValueError(f"a window of {max_window} tokens: counts only hold {MAX_COUNT}")
        self.counts = torch.zeros(num_slots, vocab_size, dtype=torch.int16, device=device)
        self.latest = torch.zeros(num_slots, max_window, dtype=torch.int32, device=device)

    def fill(self, updates: Sequence[HistoryUpdate]) -> None:
        """Set slots to the tokens that their requests have generated, without waiting."""
        device = self.counts.device
        if len(updates) == 1:
            self.counts[updates[0].slot].zero_()  # a copy of its number would take longer
        elif updates:
            slots = torch.tensor([replay.slot for replay in updates])
            self.counts.index_fill_(0, to_device(slots, device), 0)
        generated = [replay for replay in updates if replay.tokens]
        if not generated:  # new requests
            return
        counted = np.concatenate([_counted(replay) for replay in generated], axis=1)
        self._scatter(self.counts, counted, device)
        length = self.latest.shape[1]
        latest = np.concatenate([_latest(replay, length) for replay in generated], axis=1)
        self._scatter(self.latest, latest, device)

    @staticmethod
    def _scatter(target: Tensor, entries: np.ndarray, device: torch.device) -> None:
        """Set target[entries[0], entries[1]] = entries[2]."""
        slots, columns, values = to_device(torch.from_numpy(entries), device)
        target[slots, columns] = values.to(target.dtype)


def _counted(replay: HistoryUpdate) -> np.ndarray:
    """Return int64 [3, n]: slot, id, count of the tokens in the window."""
    window = replay.tokens[-replay.window :]  # [-0:], for window 0, takes all tokens
    ids, counts = np.unique(np.array(window, dtype=np.int64), return_counts=True)
    return np.stack([np.full_like(ids, replay.slot), ids, np.minimum(counts, MAX_COUNT)])


def _latest(replay: HistoryUpdate, length: int) -> np.ndarray:
    """Return int64 [3, n]: slot, position, token of the last `length` tokens."""
    tokens = np.array(replay.tokens, dtype=np.int64)
    places = np.arange(len(tokens))[-length:]
    return np.stack([np.full_like(places, replay.slot), places % length, tokens[-length:]])
