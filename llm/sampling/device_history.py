"""`PenaltyHistory`: on the device, how often each penalised request has generated each token.

    request id ─> slot      counts [slots, V]   occurrences within the penalty window
                            latest [slots, L]   token n at n % L: what leaves the window when

Sampling itself counts a token it has drawn, so the host need not know it. The host only says which
slot is whose, and has a slot filled anew when it changes hands or a request comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llm.batch import ScheduledRow
from llm.memory_copy import to_device
from llm.sampling.device_records import effective_window
from llm.sequence import FUTURE_TOKEN

MAX_COUNT = 2**15 - 1  # what the counts hold; a token that came more often counts as often


@dataclass(frozen=True, slots=True)
class Replay:
    """A slot to fill anew: the tokens of a request so far."""

    slot: int
    window: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Followed:
    """A request that has a slot."""

    slot: int
    counted: int = -1  # index of the token that is to be counted next; -1: nothing was
    turn: int = 0  # when it was claimed last


class HistorySlots:
    """Which request has which slot, and how many of its tokens have been counted there."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._followed: dict[str, _Followed] = {}
        self._turn = 0

    def claim(self, rows: Sequence[ScheduledRow], step: int) -> tuple[list[int], list[Replay]]:
        """A slot for each row, and those that must be filled first.

        Raises `ValueError` for more rows than slots, and for a row to be filled whose last token
        nobody on the host knows yet.
        """
        if len(rows) > self._num_slots:
            raise ValueError(f"{len(rows)} rows have penalties, {self._num_slots} can be followed")
        self._turn += 1
        followed = [self._followed.get(row.request_id) for row in rows]
        for one in followed:
            if one is not None:
                one.turn = self._turn
        slots, replays = [], []
        for row, found in zip(rows, followed, strict=True):
            index = len(row.output_ids) + step
            one = self._follow(row.request_id) if found is None else found
            if one.counted != index:
                replays.append(_replay(row, index, one.slot))
            one.counted = index + 1
            slots.append(one.slot)
        return slots, replays

    def _follow(self, request_id: str) -> _Followed:
        """Give a request a slot: a free one, or that of whoever was not claimed for longest."""
        if not self._free:
            self.release(min(self._followed, key=lambda name: self._followed[name].turn))
        one = self._followed[request_id] = _Followed(self._free.pop(), turn=self._turn)
        return one

    def release(self, request_id: str) -> None:
        """Forget a request; harmless when it has no slot."""
        one = self._followed.pop(request_id, None)
        if one is not None:
            self._free.append(one.slot)


def _replay(row: ScheduledRow, index: int, slot: int) -> Replay:
    tokens = tuple(row.output_ids)
    if FUTURE_TOKEN in tokens or len(tokens) != index:
        raise ValueError(f"the tokens of {row.request_id} are neither counted nor known")
    return Replay(slot, effective_window(row.sampling), tokens)


class PenaltyHistory:
    """The tensors. `max_window` bounds the penalty windows that an output can outgrow."""

    def __init__(
        self, num_slots: int, vocab_size: int, max_window: int, device: torch.device
    ) -> None:
        if max_window > MAX_COUNT:
            raise ValueError(f"a window of {max_window} tokens: counts only hold {MAX_COUNT}")
        self.counts = torch.zeros(num_slots, vocab_size, dtype=torch.int16, device=device)
        self.latest = torch.zeros(num_slots, max_window, dtype=torch.int32, device=device)

    def fill(self, replays: Sequence[Replay]) -> None:
        """Set slots to what their requests have generated. The host waits for nothing."""
        if not replays:
            return
        device = self.counts.device
        slots = torch.tensor([replay.slot for replay in replays])
        self.counts.index_fill_(0, to_device(slots, device), 0)
        counted = np.concatenate([_counted(replay) for replay in replays], axis=1)
        self._scatter(self.counts, counted, device)
        length = self.latest.shape[1]
        latest = np.concatenate([_latest(replay, length) for replay in replays], axis=1)
        self._scatter(self.latest, latest, device)

    @staticmethod
    def _scatter(target: Tensor, entries: np.ndarray, device: torch.device) -> None:
        """target[entries[0], entries[1]] = entries[2]."""
        slots, columns, values = to_device(torch.from_numpy(entries), device)
        target[slots, columns] = values.to(target.dtype)


def _counted(replay: Replay) -> np.ndarray:
    """int64 [3, n]: slot, id, count of the tokens in the window."""
    window = replay.tokens[-replay.window :]  # 0 means all, and so does [-0:]
    ids, counts = np.unique(np.array(window, dtype=np.int64), return_counts=True)
    return np.stack([np.full_like(ids, replay.slot), ids, np.minimum(counts, MAX_COUNT)])


def _latest(replay: Replay, length: int) -> np.ndarray:
    """int64 [3, n]: slot, place, token of the last `length` tokens."""
    tokens = np.array(replay.tokens, dtype=np.int64)
    places = np.arange(len(tokens))[-length:]
    return np.stack([np.full_like(places, replay.slot), places % length, tokens[-length:]])
