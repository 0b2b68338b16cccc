"""Clips as people record them, drawn for each clip on its device.

In this order: a room, noise, a tone control, an overdriven microphone; then for some a band without
anything above it (files of a lower rate, telephones, small codecs), the samples of 8 bits of a
telephone, the errors of a codec of few bits; last noise of the device, a level and 16 bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Shares of the clips; those with a band are not from telephones.
ROOM, NOISE, OVERDRIVEN, BAND, TELEPHONE, CODED = 0.5, 0.7, 0.1, 0.25, 0.3, 0.25
DEVICE_NOISE, WHOLE = 0.3, 0.5
PHONE_HZ = 8_000  # samples per second of a telephone
PHONE_BAND_HZ = 300.0, 3400.0
PHONE_STEPS = 127  # of either sign
MU = 255.0  # of the telephone's compression; the A-law is close to less of it
LOWEST_BAND_HZ = 3_400.0
CODED_FFT = 512


def recorded(clips: Tensor, rate: int) -> Tensor:
    """Clips [B, S] as of rooms, devices, telephones and files, drawn for each."""
    sound = in_a_room(clips, rate)
    sound = _some(NOISE, sound + _noise(sound, rate, 8.0, 45.0), sound)
    sound = toned(sound, rate)
    sound = at_peak(_some(OVERDRIVEN, overdriven(sound), sound), _between(0.05, 1.0, sound))
    kind = torch.rand(len(clips), 1, device=clips.device)
    band = _between(50, 400, sound), _between(3000, 3900, sound)
    heard = telephone(sound, rate, band, _between(80, 255, sound))
    sound = torch.where(kind < TELEPHONE, heard, sound)
    sound = torch.where(kind > 1 - BAND, cut_off(sound, rate), sound)
    sound = _some(CODED, coded(sound), sound)
    sound = _some(DEVICE_NOISE, sound + _noise(sound, rate, 25.0, 60.0), sound)
    sound = at_peak(sound, _between(0.02, 0.98, sound))
    return _some(WHOLE, (sound * 32767).round() / 32767, sound)


def in_a_room(clips: Tensor, rate: int) -> Tensor:
    """Add echoes that decay by 60 dB in .1 to .8 s, from none to nearly as loud as the sound."""
    rows, size = clips.shape
    length = rate // 2
    time_s = torch.arange(length, device=clips.device) / rate
    room = torch.randn(rows, length, device=clips.device)
    room = room * 1e-3 ** (time_s / _between(0.1, 0.8, clips))
    room = room / room.square().sum(1, keepdim=True).sqrt()
    level = 0.9 * _between(0.0, 1.0, clips).square()
    room = room * _some(ROOM, level, torch.zeros_like(level))
    room[:, 0] = 1.0
    bins = 1 << (size + length).bit_length()
    return torch.fft.irfft(torch.fft.rfft(clips, bins) * torch.fft.rfft(room, bins), bins)[:, :size]


def toned(sound: Tensor, rate: int) -> Tensor:
    """Turn a tone control by up to 6 dB in ten times the frequency."""
    spectrum, hz = _spectrum(sound, rate)
    tilt = (hz.clamp_min(50) / 1000) ** _between(-0.3, 0.3, sound)
    return torch.fft.irfft(spectrum * tilt, sound.shape[1])


def overdriven(sound: Tensor) -> Tensor:
    """Cut the peaks off, at .2 to .8 of the largest."""
    most = sound.abs().amax(1, keepdim=True) * _between(0.2, 0.8, sound)
    return sound.clamp(-most, most)


def cut_off(sound: Tensor, rate: int) -> Tensor:
    """Leave nothing above a frequency, from that of telephones on."""
    spectrum, hz = _spectrum(sound, rate)
    share = _between(0.0, 1.0, sound)
    high = LOWEST_BAND_HZ * (rate / 2 / LOWEST_BAND_HZ) ** share
    return torch.fft.irfft(spectrum * torch.sigmoid((high - hz) / 20), sound.shape[1])


def telephone(
    sound: Tensor,
    rate: int,
    band: tuple[Tensor | float, Tensor | float] = PHONE_BAND_HZ,
    mu: Tensor | float = MU,
) -> Tensor:
    """Return what a telephone leaves of clips within -1 and 1: a band, of 8,000 samples per second
    8 bits each, whose steps grow with the level."""
    size = sound.shape[1] * PHONE_HZ // rate
    scale = sound.shape[1] / size
    spectrum, hz = _spectrum(sound, rate)
    passed = torch.sigmoid((hz - band[0]) / 8) * torch.sigmoid((band[1] - hz) / 8)
    narrow = torch.fft.irfft(spectrum * passed, size) / scale  # bins above its rate are left out
    narrow, mu = narrow.clamp(-1, 1), torch.as_tensor(mu, device=sound.device)
    steps = ((mu * narrow.abs()).log1p() / mu.log1p() * PHONE_STEPS).round()
    heard = (steps / PHONE_STEPS * mu.log1p()).expm1() / mu * narrow.sign()
    return torch.fft.irfft(torch.fft.rfft(heard), sound.shape[1]) * scale


def coded(sound: Tensor) -> Tensor:
    """Add errors that are shares of the sound, and drop what is faint next to its neighbours."""
    window = torch.hann_window(CODED_FFT, device=sound.device)
    settings = {"n_fft": CODED_FFT, "hop_length": CODED_FFT // 4, "window": window}
    spectrum = torch.stft(sound, return_complex=True, **settings)
    spectrum = spectrum * (1 + _between(0.02, 0.5, sound)[..., None] * torch.randn_like(spectrum))
    size = spectrum.abs()
    near = F.avg_pool1d(size.transpose(1, 2), 9, 1, 4).transpose(1, 2)
    kept = size > near * _between(-0.7, 0.7, sound)[..., None]
    return torch.istft(spectrum * kept, length=sound.shape[1], **settings)


def at_peak(sound: Tensor, peak: Tensor | float) -> Tensor:
    """Return clips whose largest value is `peak`; silence stays."""
    return sound / sound.abs().amax(1, keepdim=True).clamp_min(1e-4) * peak


def _noise(sound: Tensor, rate: int, least: float, most: float) -> Tensor:
    """Noise, white or with more below, between so many dB below each clip."""
    spectrum, hz = _spectrum(torch.randn_like(sound), rate)
    slope = _between(0.0, 1.2, sound)
    noise = torch.fft.irfft(spectrum / (hz.clamp_min(80) / 1000) ** slope, sound.shape[1])
    level = _level(sound) * 10 ** (-_between(least, most, sound) / 20)
    return noise * level / _level(noise).clamp_min(1e-9)


def _spectrum(sound: Tensor, rate: int) -> tuple[Tensor, Tensor]:
    """Return the spectra [B, bins] and their frequencies [bins]."""
    spectrum = torch.fft.rfft(sound)
    return spectrum, torch.linspace(0, rate / 2, spectrum.shape[1], device=sound.device)


def _level(sound: Tensor) -> Tensor:
    return sound.square().mean(1, keepdim=True).sqrt()


def _between(low: float, high: float, sound: Tensor) -> Tensor:
    """Draw a number for each clip, [B, 1]."""
    return low + (high - low) * torch.rand(len(sound), 1, device=sound.device)


def _some(share: float, changed: Tensor, sound: Tensor) -> Tensor:
    """Return the changed one of a share of the clips."""
    return torch.where(torch.rand(len(sound), 1, device=sound.device) < share, changed, sound)
