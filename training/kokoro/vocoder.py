"""The teacher's last stage: a harmonic source, two upsamplings, an inverse STFT of 20 samples."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kokoro.blocks import Conv, Pointwise, SnakeBlock, Upsampling, Valid, valid_frames

SAMPLE_RATE = 24_000
HARMONICS = 9
PITCH_HOP = 300  # samples per pitch value
N_FFT, HOP = 20, 5
BINS = N_FFT // 2 + 1
VOICED_HZ = 10.0
SINE_SIZE = 0.1
VOICED_NOISE, UNVOICED_NOISE = 0.003, SINE_SIZE / 3


class Merge(nn.Module):
    """Nine harmonics of the pitch and breath, merged to one excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.l_linear = nn.Linear(HARMONICS, 1)

    def forward(self, pitch: Tensor, noise: float) -> Tensor:
        """pitch [B, P] in Hz to samples [B, 300 P]. Independent noise of every harmonic is merged
        before it is drawn: it is as large as the weights' norm. Turns are added up in float64, so
        that the phase is exact after minutes."""
        order = torch.arange(1, HARMONICS + 1, device=pitch.device)[None, :, None]
        step = PITCH_HOP * (pitch[:, None] * order / SAMPLE_RATE) % PITCH_HOP  # turns of a value
        turns = step.double().cumsum(2) % 1  # in the middle of a value's samples
        following = F.pad(step[..., 1:], (0, 1))
        before = torch.cat((torch.zeros_like(step[..., :1]), step[..., 1:]), 2)
        share = (torch.arange(PITCH_HOP, device=pitch.device) + 0.5) / PITCH_HOP - 0.5
        passed = share * torch.where(share < 0, before[..., None], following[..., None])
        phase = 2 * math.pi * (turns.float()[..., None] + passed).flatten(2)
        voiced = (pitch > VOICED_HZ).float().repeat_interleave(PITCH_HOP, 1)
        weight, bias = self.l_linear.weight[0], self.l_linear.bias
        sines = (torch.sin(phase) * (SINE_SIZE * weight[None, :, None])).sum(1) * voiced
        size = noise * (voiced * VOICED_NOISE + (1 - voiced) * UNVOICED_NOISE)
        return torch.tanh(sines + size * torch.randn_like(sines) * weight.norm() + bias)


class Generator(nn.Module):
    """Frames at 12.5 ms to samples."""

    forward_basis: Tensor
    inverse_basis: Tensor
    window_power: Tensor

    def __init__(self, pointwise: Pointwise) -> None:
        super().__init__()
        self.m_source = Merge()
        self.ups = nn.ModuleList([Upsampling(512, 256, 20, 10), Upsampling(256, 128, 12, 6)])
        self.noise_convs = nn.ModuleList(
            [Conv(2 * BINS, 256, 12, stride=6, padding=3), Conv(2 * BINS, 128, 1)]
        )
        self.noise_res = nn.ModuleList(
            [SnakeBlock(256, 7, pointwise), SnakeBlock(128, 11, pointwise)]
        )
        self.resblocks = nn.ModuleList(
            SnakeBlock(width, kernel, pointwise) for width in (256, 128) for kernel in (3, 7, 11)
        )
        self.conv_post = Conv(128, 2 * BINS, 7)
        for name, value in _bases().items():
            self.register_buffer(name, value, persistent=False)

    def forward(
        self, x: Tensor, timbre: Tensor, pitch: Tensor, frames: Tensor, noise: float
    ) -> Tensor:
        """x [B, 512, 1, 2 F], timbre [B, 128], pitch [B, 2 F], frames [B], to [B, 600 F]."""
        length = x.shape[3]
        inner, outer = valid_frames(20 * frames, 10 * length), _spectra(frames, length)
        harmonics = self._analyse(self.m_source(pitch, noise), 600 * frames, outer)
        if x.is_cuda:
            harmonics = harmonics.contiguous(memory_format=torch.channels_last)
        stages = ((valid_frames(2 * frames, length), inner), (inner, outer))
        for stage, (before, after) in enumerate(stages):
            x = F.leaky_relu(x, 0.1) * before.mask
            side = self.noise_convs[stage](harmonics)
            side = self.noise_res[stage](side, timbre, after)
            x = self.ups[stage](x)
            if stage == 1:  # one spectrum more than hops: the first is reflected
                x = torch.cat((x[..., 1:2], x), 3)
            x = x + side
            blocks = self.resblocks[3 * stage : 3 * stage + 3]
            x = sum(block(x, timbre, after) for block in blocks) / len(blocks)
        x = self.conv_post(F.leaky_relu(x, 0.01) * outer.mask)
        return self._synthesise(x[:, :, 0].transpose(1, 2), outer, 300 * length)

    def _analyse(self, samples: Tensor, ends: Tensor, valid: Valid) -> Tensor:
        """samples [B, S] to magnitudes and phases [B, 22, 1, S / 5 + 1]: a centred STFT, reflected
        at every sentence's own end [B]."""
        size = samples.shape[1]
        at = (torch.arange(-N_FFT // 2, size + N_FFT // 2, device=samples.device))[None].abs()
        end = ends[:, None]
        at = torch.where(at >= end, 2 * (end - 1) - at, at).clamp(0, size - 1)
        parts = samples.gather(1, at).unfold(1, N_FFT, HOP) @ self.forward_basis
        real, imaginary = parts[..., :BINS], F.pad(parts[..., BINS:], (1, 1))
        both = torch.cat((torch.hypot(real, imaginary), torch.atan2(imaginary, real)), 2)
        return both.transpose(1, 2)[:, :, None] * valid.mask

    def _synthesise(self, x: Tensor, valid: Valid, size: int) -> Tensor:
        """Log magnitudes and phases [B, N, 22] to samples [B, size]."""
        magnitude, phase = x[..., :BINS].exp(), torch.sin(x[..., BINS:])
        parts = torch.cat((magnitude * phase.cos(), magnitude * phase.sin()), 2)
        own = valid.mask[:, 0, 0, :, None]
        pieces = (parts * own) @ self.inverse_basis
        weight = _overlap(own * self.window_power, size)
        return _overlap(pieces, size) / weight.clamp(min=1e-8)


def _spectra(frames: Tensor, length: int) -> Valid:
    return valid_frames(120 * frames + 1, 60 * length + 1)


def _overlap(pieces: Tensor, size: int) -> Tensor:
    """Add pieces [B, N, 20] that start 5 apart to [B, size]; the first ten samples are dropped."""
    batch, count, _ = pieces.shape
    total = pieces.new_zeros(batch, count + N_FFT // HOP - 1, HOP)
    for part in range(N_FFT // HOP):
        total[:, part : part + count] += pieces[:, :, part * HOP : (part + 1) * HOP]
    return total.flatten(1)[:, N_FFT // 2 : N_FFT // 2 + size]


def _bases() -> dict[str, Tensor]:
    """The windowed transforms as matrices; the sine parts at 0 Hz and 12 kHz are none."""
    samples = torch.arange(N_FFT, dtype=torch.float64)
    bins = torch.arange(BINS, dtype=torch.float64)
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * samples / N_FFT)
    angle = 2 * math.pi * torch.outer(bins, samples) / N_FFT
    double = torch.full((BINS, 1), 2.0, dtype=torch.float64)
    double[0] = double[-1] = 1.0
    forward = torch.cat((window * torch.cos(angle), -window * torch.sin(angle[1:-1])))
    inverse = torch.cat((double * window * torch.cos(angle), -double * window * torch.sin(angle)))
    return {
        "forward_basis": forward.T.float().contiguous(),
        "inverse_basis": (inverse / N_FFT).float().contiguous(),
        "window_power": window.square().float(),
    }
