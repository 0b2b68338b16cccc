"""The natural teacher at its own size with random weights, created once: that takes seconds."""

from __future__ import annotations

import pytest
import torch

from training.kokoro.network import Kokoro

QUICK = -4.0  # bias of the durations: about one frame a symbol


@pytest.fixture(scope="session")
def kokoro() -> Kokoro:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Kokoro()
        torch.nn.init.constant_(network.predictor.duration_proj["linear_layer"].bias, QUICK)
        return Kokoro.load(network.state_dict(), torch.device("cpu"))
