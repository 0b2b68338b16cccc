"""What training runs share: the mean of weights, the learning rate, steps until time is over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training.progress import Mean, Progress, Rate


def test_a_mean_follows_the_weights_and_does_not_change_them() -> None:
    network = nn.BatchNorm1d(2)
    mean = Mean(network, every=2, share=0.1)
    assert not mean.network.training
    with torch.no_grad():
        network.weight.fill_(3.0)
    network.running_mean.fill_(8.0)
    mean.update(1)
    assert mean.network.weight.tolist() == [1, 1]
    mean.update(2)
    assert mean.network.weight.tolist() == [2, 2]  # half of the newest, as for all early steps
    assert mean.network.running_mean.tolist() == [4, 4]
    mean.update(8)
    assert mean.network.weight.tolist() == [2.25, 2.25]
    mean.update(400)
    assert mean.network.weight.tolist() == pytest.approx([2.325] * 2)
    assert network.weight.tolist() == [3, 3]
    assert not mean.network.weight.requires_grad


def test_a_rate_rises_and_falls() -> None:
    optimisers = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=9.0) for _ in range(2)]
    rate, seen = Rate(2.0, 4, 0.1), []
    for step, share in ((0, 0.0), (3, 0.0), (9, 0.5), (10, 1.0)):
        rate.set(step, share, *optimisers)
        seen.append(optimisers[1].param_groups[0]["lr"])
        assert optimisers[0].param_groups[0]["lr"] == seen[-1]
    assert seen == pytest.approx([0.5, 2.0, 1.1, 0.2])


def test_progress_ends_with_its_steps_or_its_minutes(capsys) -> None:
    progress = Progress(1000, 4, log_s=1000)
    shares = []
    for share in progress:
        shares.append(share)
        assert progress.log_losses({"loss": torch.tensor(0.5)}) == (progress.step == 0)
    assert shares == pytest.approx([0, 0.25, 0.5, 0.75], abs=1e-3)
    assert progress.step == 4
    assert capsys.readouterr().out.count("step 1 loss 0.5000") == 1
    over = Progress(0, 0, log_s=1000)
    assert all(share < 1 for share in over)
