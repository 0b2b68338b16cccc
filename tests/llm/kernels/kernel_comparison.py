"""The sampling kernels against their reference: the same tokens, indices and histories."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.batch import ScheduledRow
from llm.sampling.device.history import PenaltyHistory
from llm.sampling.device.kernels import Scratch, sample_with_kernels
from llm.sampling.device.reference import sample_reference
from llm.sampling.device.sampler import DeviceSampler
from llm.sampling.logits import TokenMask
from tests.llm.sampling.device_rows import a_row, coarse_logits, random_logits, random_rows

NUM_KINDS = 5

Cuts = tuple[dict[str, Any], ...]


def some_logits(seed: int, rows: int, vocab: int) -> Tensor:
    """Return logits: plain, with many ties, nearly flat, very uneven, or with NaN."""
    match seed % NUM_KINDS:
        case 1:
            return coarse_logits(rows, vocab, seed)
        case 2:
            return random_logits(rows, vocab, seed, scale=0.001)
        case 3:
            return random_logits(rows, vocab, seed, scale=30.0)
    logits = random_logits(rows, vocab, seed)
    if seed % NUM_KINDS == 4:
        logits[0, ::3] = torch.nan
        logits[1, 5] = torch.inf
        logits[2, 7:] = -torch.inf
        logits[3] = torch.nan
    return logits


def on_cpu(history: PenaltyHistory) -> PenaltyHistory:
    """Return a copy on the CPU."""
    copied = copy.copy(history)
    copied.counts, copied.latest = history.counts.cpu().clone(), history.latest.cpu().clone()
    return copied


@dataclass(frozen=True, slots=True)
class Comparison:
    """One sampler whose histories continue, and the tile of its kernels; None: whole rows."""

    sampler: DeviceSampler
    device: torch.device
    tile: int | None

    def step(
        self,
        batch: list[ScheduledRow],
        logits: Tensor,
        step: int = 0,
        mask: TokenMask | None = None,
    ) -> None:
        """Raise `AssertionError` unless the next tokens equal the reference's."""
        sampler, device = self.sampler, self.device
        buffers, history = sampler.create_buffers(), sampler._history
        scratch = Scratch(sampler.vocab_size, device, buffers.max_rows, self.tile)
        sampler.load(sampler.prepare(batch, step, mask), buffers)
        records, followed = buffers.records.cpu().clone(), on_cpu(history)
        expected = sample_reference(logits, records, buffers.masks.cpu(), followed)
        found = sample_with_kernels(
            logits.to(device),
            buffers.records,
            buffers.masks,
            history,
            scratch,
            level=int(device.type == "cuda"),
        )
        assert found.tolist() == expected.tolist(), (step, found, expected, batch)
        assert torch.equal(buffers.records.cpu(), records)
        assert torch.equal(history.counts.cpu(), followed.counts)
        assert torch.equal(history.latest.cpu(), followed.latest)


def compare_kernels(
    seed: int, device: torch.device, tile: int | None, vocab: int = 500, rows: int = 8
) -> None:
    """Compare several tokens of random rows."""
    compared = Comparison(DeviceSampler(vocab, device, rows, max_window=64), device, tile)
    batch = random_rows(seed, rows - 2, vocab)  # two rows of padding
    for step in range(3):
        compared.step(batch, some_logits(seed + step, rows, vocab), step)


def compare_late_cuts(
    device: torch.device, tile: int | None, vocab: int = 2000, seeds: int = 6
) -> None:
    """Compare where one token is likely, and only thousands of unlikely ones make up top_p."""
    compared = Comparison(DeviceSampler(vocab, device, 6), device, tile)
    logits = random_logits(6, vocab, scale=0.3)
    logits[:, 77] += 10.0
    cuts: Cuts = ({"top_p": 0.98}, {"top_p": 0.999}, {"top_p": 0.99, "min_p": 1e-5}, {"top_p": 0.5})
    more: Cuts = ({"top_p": 0.999, "top_k": 900}, {"top_p": 0.99, "min_p": 0.5})
    for seed in range(seeds):
        batch = [a_row(f"r{n}", seed=seed, **cut) for n, cut in enumerate((*cuts, *more))]
        compared.step(batch, logits)


def compare_bitmasks(
    device: torch.device, tile: int | None, vocab: int = 500, seeds: int = 4
) -> None:
    """Compare rows restricted to a random half of the vocabulary, to one token, and to none."""
    compared = Comparison(DeviceSampler(vocab, device, 8), device, tile)
    chance = np.random.default_rng(0)
    for seed in range(seeds):
        allowed = chance.random((4, -(-vocab // 32) * 32)) < 0.5
        allowed[1:3] = False
        allowed[1, 3] = True
        words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
        mask = TokenMask(torch.arange(4, device=device), torch.from_numpy(words).to(device))
        cuts: Cuts = ({}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 5}, {"temperature": 0.0})
        batch = [
            a_row(f"r{n}", seed=seed, json_schema="{}", stop_token_ids=(1,), **cut)
            for n, cut in enumerate(cuts)
        ]
        batch.append(a_row("free", seed=seed, top_k=30))
        compared.step(batch, some_logits(seed, 8, vocab), 0, mask)
