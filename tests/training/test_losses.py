"""The codec's losses: another voice is distinguished from errors that cancel."""

from __future__ import annotations

import pytest
import torch

from training.losses import MelLoss, timbre_distance


def test_the_same_samples_are_no_distance_apart() -> None:
    samples = torch.randn(2, 8000, generator=torch.Generator().manual_seed(0)) / 10
    distance, timbre = MelLoss(16_000)(samples, samples)
    assert (float(distance), float(timbre)) == (0, 0)


def test_a_filtered_voice_is_farther_in_timbre_than_noise_of_the_same_size() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(2, 8, 200, generator=generator)
    tilt = torch.linspace(-0.3, 0.3, 8)[None, :, None].expand_as(wanted)
    noise = tilt * torch.randn(wanted.shape, generator=generator).sign()
    assert noise.abs().mean() == pytest.approx(float(tilt.abs().mean()))
    assert timbre_distance(tilt, wanted) == pytest.approx(float(tilt.square().mean()), rel=1e-4)
    assert timbre_distance(noise, wanted) < 0.05 * timbre_distance(tilt, wanted)


def test_quiet_frames_have_no_timbre() -> None:
    wanted = torch.full((1, 4, 10), -4.0)
    wanted[..., :5] = 0.0
    quiet = torch.zeros_like(wanted)
    quiet[..., 5:] = 1.0
    assert timbre_distance(quiet, wanted) == 0
    assert timbre_distance(1 - quiet, wanted) == 1


def test_silence_is_finite() -> None:
    silence = torch.zeros(1, 4000, requires_grad=True)
    _, timbre = MelLoss(16_000)(silence, torch.zeros(1, 4000))
    timbre.backward()
    assert silence.grad is not None
    assert bool(silence.grad.isfinite().all())
