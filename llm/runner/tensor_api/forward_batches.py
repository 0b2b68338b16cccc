"""`ForwardBatch`es from scheduled rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from llm.batch import ForwardBatch, ForwardMode, ScheduledRow
from llm.memory.transfer import to_device


def batch_of_rows(
    rows: Sequence[ScheduledRow], mode: ForwardMode, page_size: int, device: torch.device
) -> ForwardBatch:
    """Create a batch in which row b feeds its tokens at the positions from its `start` on."""
    numbers = (
        _decoded(rows, page_size) if mode is ForwardMode.DECODE else _extended(rows, page_size)
    )
    input_ids, positions, slot_mapping = to_device(torch.from_numpy(numbers), device)
    return ForwardBatch(
        mode=mode,
        request_ids=tuple(row.request_id for row in rows),
        query_lens=tuple(len(row.token_ids) for row in rows),
        context_lens=tuple(row.context_len for row in rows),
        pages=tuple(row.pages for row in rows),
        page_size=page_size,
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
    )


def _decoded(rows: Sequence[ScheduledRow], size: int) -> np.ndarray:
    """Return int64 [3, B]: id, position and slot of the one token of each row."""
    token_ids, positions, slots = [], [], []
    for row in rows:
        position = row.start
        token_ids.append(row.token_ids[0])
        positions.append(position)
        slots.append(row.pages[position // size] * size + position % size)
    return np.array([token_ids, positions, slots], dtype=np.int64)


def _extended(rows: Sequence[ScheduledRow], size: int) -> np.ndarray:
    """Return int64 [3, T]: id, position and slot of each token."""
    positions = [np.arange(row.start, row.context_len) for row in rows]
    slots = [
        np.asarray(row.pages, dtype=np.int64)[position // size] * size + position % size
        for row, position in zip(rows, positions, strict=True)
    ]
    token_ids = [token for row in rows for token in row.token_ids]
    numbers = [token_ids, np.concatenate(positions), np.concatenate(slots)]
    return np.array(numbers, dtype=np.int64)
