"""The network of the aligner's training, as the service computes it without torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.closeness import error
from training.aligner_network import AlignerNetwork
from tts.speech.aligner import NUM_LABELS, Aligner, AlignerConfig, LetterStream

SMALL = AlignerConfig(codebook_size=50, frames_per_code=4, table_width=8, width=16)


@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_the_service_computes_the_trained_network(length: int) -> None:
    torch.manual_seed(1)
    network = AlignerNetwork(SMALL).eval()
    codes = np.random.default_rng(length).integers(0, SMALL.codebook_size, length)
    with torch.no_grad():
        expected = network(torch.from_numpy(codes)[None])[0].log_softmax(-1).numpy()
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    got = LetterStream(Aligner(SMALL, weights)).push(tuple(codes), is_last=True)
    assert got.shape == (4 * length, NUM_LABELS)
    assert error(got, expected) < 1e-5  # float32 rounds the sums of a stream in another order
