"""Random weights are created on their device."""

from __future__ import annotations

import pytest
import torch

from llm.models.random_weights import RandomWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_they_are_on_the_device_and_the_same_each_time() -> None:
    first, again = (RandomWeights("cuda:0").shaped("a.weight", (64, 256)) for _ in range(2))
    assert first.device.type == "cuda"
    assert torch.equal(first, again)
    assert first.std().item() == pytest.approx(2 * 256**-0.5, rel=0.05)
    assert not torch.equal(first, RandomWeights("cuda:0").shaped("b.weight", (64, 256)))


def test_narrow_ones_are_the_rounded_ones() -> None:
    shape = (5, 2**20)  # in several parts
    wide = RandomWeights("cuda:0").shaped("a.weight", shape)
    narrow = RandomWeights("cuda:0", torch.bfloat16).shaped("a.weight", shape)
    assert torch.equal(narrow, wide.bfloat16())
    assert len(narrow.unique(dim=0)) == len(narrow)
