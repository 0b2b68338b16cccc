"""Rows of random queries, keys and values, and dense attention in float64 as the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from llm.attention.base import AttentionOptions
from llm.batch import ForwardBatch, ForwardMode

HEAD_DIM = 16


def options(
    window: int | None = None, soft_cap: float | None = None, num_heads: int = 4
) -> AttentionOptions:
    """Return options for layers that all have the same window."""
    windows = () if window is None else (window,)
    return AttentionOptions(num_heads, torch.float32, windows, soft_cap)


class Row:
    """One sequence's queries, keys and values, of which steps use parts."""

    def __init__(
        self,
        length: int,
        heads: tuple[int, int],
        pages: list[int],
        seed: int,
        head_dim: int = HEAD_DIM,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        self.query = torch.randn(length, num_heads, head_dim, generator=generator)
        self.key_value = torch.randn(length, 2, num_kv_heads, head_dim, generator=generator)
        self.pages = pages
        self.request_id = f"row {seed}"

    def expected(
        self, start: int, end: int, window: int | None = None, soft_cap: float | None = None
    ) -> Tensor:
        """Return dense causal attention of positions [start, end), float64."""
        group = self.query.shape[1] // self.key_value.shape[2]
        keys, values = self.key_value[:end].double().repeat_interleave(group, dim=2).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", self.query[start:end].double(), keys)
        distance = torch.arange(start, end)[:, None] - torch.arange(end)[None]
        hidden = (distance < 0) | (distance >= (window or end))
        scores = scores / keys.shape[-1] ** 0.5
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(hidden, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)


def forward_batch(page_size: int, parts: list[tuple[Row, int, int]]) -> ForwardBatch:
    positions = [p for _, start, end in parts for p in range(start, end)]
    slots = [
        row.pages[p // page_size] * page_size + p % page_size
        for row, start, end in parts
        for p in range(start, end)
    ]
    return ForwardBatch(
        mode=ForwardMode.MIXED,
        request_ids=tuple(row.request_id for row, _, _ in parts),
        query_lens=tuple(end - start for _, start, end in parts),
        context_lens=tuple(end for _, _, end in parts),
        pages=tuple(row.pages for row, _, _ in parts),
        page_size=page_size,
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
    )


def shuffled_pages(num_pages: int, seed: int) -> list[int]:
    order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
    return order.tolist()
