"""Rows with random parameters, for tests of the device sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.batch import ScheduledRow
from llm.request import SamplingParams
from llm.sampling.device.sampler import DeviceSampler
from llm.sampling.logits import TokenMask

CPU = torch.device("cpu")


def a_row(name: str, output_ids: tuple[int, ...] = (), **sampling: Any) -> ScheduledRow:
    return ScheduledRow(name, (1,), 0, (1,), False, True, SamplingParams(**sampling), output_ids)


def random_sampling(chance: np.random.Generator, vocab: int) -> dict[str, Any]:
    """Return parameters of one request, with a random set of features."""

    def some(*values: Any) -> Any:
        return values[chance.integers(len(values))]

    sampling: dict[str, Any] = {
        "temperature": some(0.0, 0.3, 0.7, 1.0, 1.0, 3.0),
        "top_k": some(0, 0, 1, 2, 7, vocab // 2, 2 * vocab),
        "top_p": some(1.0, 1.0, 0.999, 0.9, 0.5, 0.01),
        "min_p": some(0.0, 0.0, 0.05, 0.5),
        "seed": int(chance.integers(2**63)) * 2 + 1,
        "max_tokens": 1000,
    }
    if chance.random() < 0.4:
        sampling |= {
            "repetition_penalty": some(1.0, 1.3, 0.8),
            "frequency_penalty": some(0.0, 0.4, -0.2),
            "presence_penalty": some(0.0, 0.7),
            "penalty_window": some(0, 1, 2, 5, 64),
        }
    if chance.random() < 0.5:
        stops = tuple(chance.choice(vocab, size=some(1, 2, 20), replace=False).tolist())
        sampling |= {"stop_token_ids": stops, "min_tokens": some(0, 4)}
    kind = some("free", "ranges", "cycle")
    starts = np.sort(chance.choice(vocab // 3, size=4, replace=False)).tolist()
    ranges = tuple((3 * start, 3 * start + some(1, 3, 40)) for start in starts)
    ranges = tuple((start, min(end, vocab)) for start, end in ranges)
    if kind == "ranges":
        sampling["allowed_ranges"] = ranges
    elif kind == "cycle":
        sampling["allowed_cycle"] = (ranges[:1], ranges[1:2], ranges[2:])
    return sampling


def random_rows(seed: int, count: int, vocab: int) -> list[ScheduledRow]:
    chance = np.random.default_rng(seed)
    return [
        a_row(
            f"r{n}",
            tuple(chance.integers(vocab, size=chance.integers(9)).tolist()),
            **random_sampling(chance, vocab),
        )
        for n in range(count)
    ]


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def coarse_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    """Return logits rounded to bfloat16: many ties, also at the cuts."""
    return (random_logits(rows, vocab, seed) + 16).bfloat16().float()


def sample_once(
    sampler: DeviceSampler,
    logits: Tensor,
    rows: list[ScheduledRow],
    step: int = 0,
    mask: TokenMask | None = None,
) -> list[int]:
    """Sample with separate buffers."""
    buffers = sampler.create_buffers()
    sampler.load(sampler.prepare(rows, step, mask), buffers)
    token_ids = sampler.sample(logits, buffers)
    assert token_ids.dtype == torch.int32
    return token_ids.tolist()
