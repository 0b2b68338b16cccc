"""Clips as people record them, as the encoder of voices learns from them."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO

import numpy as np
import pytest
import soundfile
import soxr
import torch
from torch import Tensor

from tests.training.takes import TOY
from training.evaluate import cloning
from training.speech_codec.recordings import at_peak, coded, cut_off, recorded, telephone

RATE = TOY.sample_rate
LOW_HZ, HIGH_HZ = cloning.PHONE_BAND_HZ


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def noise() -> Tensor:
    """Return noise of all frequencies with pauses, [8, a second]."""
    return at_peak(torch.randn(8, RATE) * (torch.arange(RATE) // 3000 % 2), 0.7)


def power(sound: Tensor, low: float, high: float) -> Tensor:
    """Return the power of clips of a second between two frequencies, [B]."""
    return torch.fft.rfft(sound)[:, int(low) : int(high)].abs().square().sum(1)


def test_recorded_clips_are_others_of_the_same_size() -> None:
    time_s = torch.arange(RATE) / RATE
    tone = 0.3 * torch.sin(2 * torch.pi * 200 * time_s)
    clips = torch.cat((tone.repeat(16, 1), torch.zeros(1, RATE)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = recorded(clips, RATE)
    assert found.shape == clips.shape
    assert found.isfinite().all()
    assert float(found.abs().max()) < 1
    voiced, levels = found[:16], found[:16].abs().amax(1)
    assert float(levels.max() / levels.min()) > 2
    spectra = torch.fft.rfft(voiced).abs()
    assert (spectra.argmax(1) == 200).sum() > 12  # most still have the tone above their noise
    alike = torch.corrcoef(voiced - voiced.mean(1, keepdim=True))
    assert float((alike - torch.eye(16)).max()) < 0.99999  # each is recorded in its own way
    assert not found[16].any()


def test_recorded_clips_have_room_noise_bands_and_levels(noise: Tensor) -> None:
    found = recorded(noise.repeat(32, 1), RATE)
    above = power(found, 5000, 12_000) / power(found, 0, 12_000)
    assert 0.1 < float((above < 1e-3).float().mean()) < 0.6  # telephones, files of low rates
    pauses = found[:, 2000:2900].square().mean(1) / found.square().mean(1)
    assert float((pauses > 1e-3).float().mean()) > 0.4
    steps = found * 32767
    whole = (steps - steps.round()).abs().amax(1) < 1e-2
    assert 0.3 < float(whole.float().mean()) < 0.7


def test_a_telephone_is_that_of_the_evaluation(noise: Tensor) -> None:
    found = telephone(noise, RATE)
    wanted = []
    for clip in noise.numpy():
        samples, rate = soundfile.read(BytesIO(cloning.phone(clip, RATE)))
        assert rate == cloning.PHONE_HZ
        wanted.append(soxr.resample(samples, rate, RATE))
    for own, other in zip(found.numpy(), np.stack(wanted), strict=True):
        assert np.corrcoef(own, other)[0, 1] > 0.995
    assert float((power(found, 5000, 12_000) / power(found, LOW_HZ, HIGH_HZ)).max()) < 1e-9


def test_a_telephone_has_256_levels(noise: Tensor) -> None:
    found = telephone(noise, cloning.PHONE_HZ, (-100.0, 1e6))  # of its own rate, the whole band
    assert found[0].mul(1e5).round().unique().numel() <= 256
    error = (found - noise).square().mean() / noise.square().mean()
    assert 1e-6 < float(error) < 1e-3


def test_nothing_is_above_a_files_band(noise: Tensor) -> None:
    found = cut_off(noise.repeat(4, 1), RATE)
    above = power(found, 11_500, 12_000) / power(found, 0, 3000)
    assert float((above < 1e-6).float().mean()) > 0.8
    assert float((power(found, 0, 3000) / power(noise.repeat(4, 1), 0, 3000)).min()) > 0.99


def test_a_small_codec_errs_where_there_is_sound(noise: Tensor) -> None:
    found = coded(noise)
    assert found.shape == noise.shape
    shares = (found - noise).square().mean(1) / noise.square().mean(1)
    assert float(shares.max() / shares.min()) > 2
    assert float(found[:, 1000:2000].abs().max()) < 1e-6
