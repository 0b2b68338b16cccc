"""The sampling kernels against their twin: the same tokens, indices and histories."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from llm.sampling.device_history import PenaltyHistory
from llm.sampling.device_kernels import Scratch, sample_with_kernels
from llm.sampling.device_reference import sample_reference
from llm.sampling.device_sampler import DeviceSampler
from tests.llm.device_rows import coarse_logits, random_logits, random_rows

NUM_KINDS = 5


def some_logits(seed: int, rows: int, vocab: int) -> Tensor:
    """Plain, with many ties, nearly flat, very uneven, or broken in places."""
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
    """A copy."""
    copied = copy.copy(history)
    copied.counts, copied.latest = history.counts.cpu().clone(), history.latest.cpu().clone()
    return copied


def compare_kernels(
    seed: int, device: torch.device, tile: int, vocab: int = 500, rows: int = 8
) -> None:
    """Raise `AssertionError` unless several tokens of random rows come out as the twin's."""
    sampler = DeviceSampler(vocab, device, rows, max_window=64)
    buffers, scratch = sampler.create_buffers(), Scratch(vocab, device, rows, tile)
    history = sampler._history
    batch = random_rows(seed, rows - 2, vocab)  # two rows of padding
    for step in range(3):
        logits = some_logits(seed + step, rows, vocab)
        sampler.load(sampler.prepare(batch, step), buffers)
        records, followed = buffers.records.cpu().clone(), on_cpu(history)
        expected = sample_reference(logits, records, buffers.masks.cpu(), followed)
        found = sample_with_kernels(
            logits.to(device), buffers.records, buffers.masks, history, scratch
        )
        assert found.tolist() == expected.tolist(), (seed, step, found, expected, batch)
        assert torch.equal(buffers.records.cpu(), records), (seed, step)
        assert torch.equal(history.counts.cpu(), followed.counts), (seed, step)
        assert torch.equal(history.latest.cpu(), followed.latest), (seed, step)
