"""The decoder's excitation: pulses and noise, their filters, and phases that are carried."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from decoder.codecs.source_filter.excitation import Curve, Drive, drive_of, pulses
from decoder.codecs.source_filter.modules import SpeechCodec
from training.speech_codec.config import DESIGNS
from training.speech_codec.crops import phases
from training.speech_codec.pitch import HIGHEST_HZ, LOWEST_HZ, held, pitch_loss, true_drive
from training.speech_codec.plans import CURVE_GRID

TOY = DESIGNS["toy"]
HOP, RATE = TOY.stft_hop, TOY.sample_rate


def steady(hz: float, points: int) -> Drive:
    passed = torch.arange(points, dtype=torch.float64) * hz * HOP / RATE
    level = torch.ones(1, points)
    return Drive(level * hz, level, passed[None] % 1)


def toy_codec() -> SpeechCodec:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        codec = SpeechCodec(TOY)
        for block in codec.decoder.blocks:  # so that every block is heard
            torch.nn.init.constant_(block.scale, 1.0)
        torch.nn.init.normal_(codec.decoder.pitch.weight, std=0.1)  # so that pitch moves
    return codec.eval()


@pytest.mark.parametrize("hz", [50.0, 120.0, 440.0, 800.0])
def test_pulses_have_equal_harmonics_of_the_pitch_and_nothing_else(hz: float) -> None:
    samples = pulses(steady(hz, 101), HOP, RATE)[0].double()  # a second: bins of 1 Hz
    power = (torch.fft.rfft(samples).abs() / len(samples)).square() * 2
    count = int(RATE / 2 / hz)
    at = torch.arange(1, count + 1) * int(hz)
    inner = at[at < RATE / 2]
    assert torch.allclose(power[inner], torch.full((len(inner),), 1 / count).double(), rtol=1e-3)
    rest = power.clone()
    rest[at] = 0
    assert float(rest.sum()) < 1e-6


def test_gliding_pulses_do_not_fold_back() -> None:
    """An octave in a second: no line between harmonics, as folding would draw."""
    hz = 150 * 2 ** torch.linspace(0, 1, 101)[None]
    curve = Curve((hz / 200).log2(), torch.full_like(hz, 20.0))
    drive = drive_of(*curve.tones(), HOP / RATE, torch.zeros(1, dtype=torch.float64))
    samples = pulses(drive, HOP, RATE)[0].double()
    turns = _turns(hz)
    assert float((drive.turns[0, -1] - turns[-1] + 0.5) % 1) == pytest.approx(0.5, abs=1e-5)
    # resampled to a steady pitch: one value per 1/1024 of a turn
    even = torch.arange(1024 * int(turns[-1])) / 1024
    warped = torch.from_numpy(np.interp(even, turns[:-1], samples.numpy()))
    power = torch.fft.rfft(warped[: 1024 * 128] * torch.hann_window(1024 * 128)).abs().square()
    orders = power[: 128 * 20].view(-1, 128)  # rows: around harmonic 0, 1, ...
    lines, between = orders[1:, :3].sum(), orders[1:, 16:112].sum()
    assert float(between) < 1e-4 * float(lines)


def _turns(hz: Tensor) -> Tensor:
    """The phase at every sample, by fine sums."""
    j = torch.arange(HOP) / HOP
    fine = hz[0, :-1, None] + hz[0].diff()[:, None] * (j + 0.5 / HOP)
    return torch.nn.functional.pad(fine.double().flatten().cumsum(0) / RATE, (1, 0))


def test_pulses_follow_the_phase_that_they_are_given() -> None:
    drive = steady(100.0, 40)
    late = drive._replace(turns=(drive.turns + 0.3) % 1)
    first, second = pulses(drive, HOP, RATE)[0], pulses(late, HOP, RATE)[0]
    shift = round(0.7 * RATE / 100)  # .3 of a turn on is .7 back
    assert torch.allclose(second[shift:], first[:-shift], atol=1e-2)
    corrected = drive._replace(turns=drive.turns.clone())
    corrected.turns[:, 20:] += 0.1  # reached between points 19 and 20
    moved = pulses(corrected, HOP, RATE)[0]
    assert torch.equal(moved[: 19 * HOP], first[: 19 * HOP])
    back = round(0.9 * RATE / 100)
    assert torch.allclose(moved[20 * HOP + back :], first[20 * HOP : -back], atol=1e-2)


def test_a_filter_of_one_gives_the_source_back() -> None:
    decoder = toy_codec().decoder
    bins = TOY.bins
    with torch.no_grad():
        decoder.filters.weight.zero_()
        decoder.spectra.weight.zero_()
        decoder.spectra.bias.fill_(-100.0)
        ones = torch.stack((torch.zeros(bins), torch.zeros(bins), torch.full((bins,), -100.0)))
        decoder.filters.bias.copy_(ones.repeat(TOY.spectra_per_frame, 1).flatten())
        x = torch.randn(1, 10, TOY.decoder_dim, generator=torch.Generator().manual_seed(1))
        drive = steady(133.0, 20 + decoder.reach)
        got = decoder.synthesise(x, drive)[0]
    full = TOY.n_fft - HOP  # from here on windows overlap as they will
    assert torch.allclose(got[full:], pulses(drive, HOP, RATE)[0, full : len(got)], atol=1e-5)


def test_the_untrained_output_is_about_as_loud_as_speech() -> None:
    codec = toy_codec()
    with torch.inference_mode():
        x = torch.randn(1, 50, TOY.decoder_dim, generator=torch.Generator().manual_seed(4))
        samples = codec.decoder.synthesise(x, steady(150.0, 100 + codec.decoder.reach))
    assert 0.01 < float(samples.std()) < 0.2


def test_a_curve_is_within_its_range_and_learns_pitch_where_there_is_voice() -> None:
    read = torch.tensor([[[-50.0, 0.0], [0.0, 0.0], [50.0, 0.0]]])
    hz = Curve.of(read).tones()[0][0]
    assert torch.allclose(hz, torch.tensor([LOWEST_HZ, 200.0, HIGHEST_HZ]))
    octaves, logits = torch.full((1, 6), 0.0), torch.full((1, 6), 9.0)
    pitch = torch.tensor([[0.0, 0.0, 0.0, 0.0, 400.0, 400.0]])
    octaves[0, 3:] = 1.0
    right = pitch_loss(Curve(octaves, torch.where(pitch > 0, logits, -logits)), pitch)
    wrong = pitch_loss(Curve(1 - octaves, torch.where(pitch > 0, logits, -logits)), pitch)
    unvoiced = pitch_loss(Curve(octaves, -logits), pitch)
    assert float(right) < 1e-3
    assert float(wrong) == pytest.approx(1, abs=1e-3)
    assert float(unvoiced) > 0.2


def test_pitch_is_held_where_there_is_no_voice() -> None:
    pitch = torch.tensor([[0.0, 0, 100, 110, 0, 0, 0, 200, 0]])
    assert held(pitch).tolist() == [[0, 100, 100, 110, 110, 110, 200, 200, 200]]
    drive = true_drive(pitch, torch.zeros(1, 9))
    assert drive.voiced.tolist() == [[0, 0, 1, 1, 0, 0, 0, 1, 0]]
    assert float(drive.hz.min()) == LOWEST_HZ


def test_phases_are_those_of_the_teachers_source() -> None:
    """Two lines; 2 pi times the phase is what training.kokoro.vocoder.Merge takes the sine of."""
    generator = np.random.default_rng(0)
    pitch = generator.uniform(80, 300, 50)
    found = phases(pitch, np.array([0, 20 * CURVE_GRID]))
    for first, end in ((0, 20), (20, 50)):
        wanted = np.cumsum((pitch[first:end] / RATE) % 1) * CURVE_GRID
        off = (found[first:end] - wanted + 0.5) % 1 - 0.5
        assert np.abs(off).max() < 1e-6
    assert math.isclose(found[20], pitch[20] * CURVE_GRID / RATE % 1, rel_tol=1e-6)
