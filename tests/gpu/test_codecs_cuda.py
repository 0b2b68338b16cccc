"""Published codecs on a CUDA device: the CPU's sound, batches like single windows, kept states."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from decoder import AudioDecoder, ReadyWindow, StreamState, create_decoder, render
from tests.decoder.codecs import (
    WRITERS,
    audio_of,
    random_codes,
    write_mimi,
)
from tests.decoder.toys import windows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = 3e-3  # of the loudest sample: products and convolutions use TF32


class Pair(NamedTuple):
    folder: Path
    cpu: AudioDecoder
    cuda: AudioDecoder


@pytest.fixture(scope="module", params=sorted(WRITERS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    WRITERS[request.param](folder)
    cpu, cuda = (
        create_decoder(folder, device=device, allow_pickle=True) for device in ("cpu", "cuda")
    )
    return Pair(folder, cpu, cuda)


def close(got: np.ndarray, expected: np.ndarray) -> bool:
    limit = TOLERANCE * np.abs(expected).max()
    return got.shape == expected.shape and np.abs(got - expected).max() < limit


def test_the_device_sounds_like_the_cpu(pair: Pair) -> None:
    codes = random_codes(pair.cpu, 30)
    assert close(audio_of(pair.cuda, codes), audio_of(pair.cpu, codes))
    options = pair.cpu.spec.recommended
    assert close(audio_of(pair.cuda, codes, options), audio_of(pair.cpu, codes, options))


def test_a_batch_sounds_like_its_windows_alone(pair: Pair) -> None:
    rows = [random_codes(pair.cpu, 20, seed) for seed in range(4)]
    streams = [windows_of(pair.cpu.spec, pair.cpu.spec.recommended, codes) for codes in rows]
    for block in zip(*streams, strict=True):
        together = render(pair.cuda, [ReadyWindow("s", window) for window in block])
        for window, got in zip(block, together, strict=True):
            assert close(got, render(pair.cuda, [ReadyWindow("s", window)])[0])


def test_recordings_become_the_same_codes(pair: Pair) -> None:
    count = 20 * int(pair.cpu.spec.samples_per_frame)
    clip = (0.2 * np.random.default_rng(0).normal(size=count)).astype(np.float32)
    cpu, cuda = (np.array(decoder.encode(clip)) for decoder in (pair.cpu, pair.cuda))
    assert np.mean(cpu == cuda) > 0.9  # a value on the border of two codes may fall either way


def test_a_state_is_kept_on_the_device(tmp_path: Path) -> None:
    write_mimi(tmp_path)
    decoder = create_decoder(tmp_path, device="cuda", options={"stateful": True})
    codes, state = random_codes(decoder, 24), StreamState()
    windows = windows_of(decoder.spec, decoder.spec.recommended, codes)
    parts = [render(decoder, [ReadyWindow("s", window, state)])[0] for window in windows]
    assert close(np.concatenate(parts), audio_of(create_decoder(tmp_path), codes))
