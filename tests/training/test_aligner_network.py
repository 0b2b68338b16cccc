"""The aligner's training, and its network as the service computes it without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.closeness import error
from training import aligner
from training.aligner_network import AlignerNetwork
from training.speech_codec.config import DESIGNS, save_config
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


def test_letters_that_follow_from_codes_are_learned(tmp_path: Path) -> None:
    toy = DESIGNS["toy"]
    save_config(toy, tmp_path / "toy.json")
    draw = np.random.default_rng(0)
    for part in ("", "2"):
        codes = draw.integers(0, toy.codebook_size, 1000).astype(np.uint16)
        letters = np.repeat(codes % 2, 4).astype(np.uint8)
        np.savez(tmp_path / f"codes{part}.npz", codes=codes, letters=letters)
    assert [path.stem for path in aligner.part_files(tmp_path / "codes")] == ["codes", "codes2"]
    sizes = ["--batch", "2", "--max-hours", "1", "--steps", "30", "--lr", "1e-2"]
    where = ["--codes", str(tmp_path / "codes"), "--config", str(tmp_path / "toy.json")]
    aligner.main([*where, "--out", str(tmp_path / "aligner"), "--until", "600", *sizes])
    stream = LetterStream(Aligner.load(tmp_path / "aligner"))
    found = stream.push(tuple(codes[:50].tolist()), is_last=True).argmax(-1)
    assert np.mean(found == letters[:200]) > 0.9
