"""`Qwen3TTSSpeakerEncoder`: a vector of the speaker of a recording, for Qwen3-TTS Base.

    samples ─ log-mel spectrogram [mels, T] ─ ECAPA-TDNN (Desplanques et al. 2020) ─> [vector_size]

    blocks.0       convolution of the spectrogram
    blocks.1 …     convolution, Res2Net, convolution, squeeze-excitation; added to the input
    mfa            the outputs of blocks.1 … joined
    asp, fc        mean and deviation over time, weighted by attention; the vector

It is a part of the language model's files, with the sizes in `speaker_encoder_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decoder.base import AudioFormatError, DecoderConfigError, SpeakerEncoder
from decoder.clips import checked_clip
from decoder.cuda.devices import own_stream
from decoder.registry import CONFIG_FILE, read_json, shared_weights
from decoder.weights import read_tensors

CONFIG_KEY, PREFIX = "speaker_encoder_config", "speaker_encoder."
SAMPLE_RATE = 24_000
WINDOW, HOP = 1024, 256  # samples of a frame of the spectrogram
TOP_HZ = 12_000.0
SILENCE = 1e-5  # smallest energy of a mel
MIN_VARIANCE = 1e-12


@dataclass(frozen=True, slots=True)
class SpeakerEncoderConfig:
    """Sizes of the network; the names and the defaults are those of the published files."""

    mel_dim: int = 128
    enc_dim: int = 1024  # of the vector
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128
    sample_rate: int = SAMPLE_RATE

    @classmethod
    def read(cls, path: Path, values: Mapping[str, Any]) -> SpeakerEncoderConfig:
        """Read the keys. Raises DecoderConfigError naming one that is invalid."""
        given: dict[str, Any] = {}
        for key, default in _DEFAULTS.items():
            value = values.get(key, default)
            sizes = value if isinstance(default, tuple) else [value]
            is_whole = isinstance(sizes, list | tuple) and all(
                type(size) is int and size > 0 for size in sizes
            )
            if not is_whole:
                raise DecoderConfigError(f"{path}: {CONFIG_KEY}.{key}={value!r} cannot be used")
            given[key] = tuple(sizes) if isinstance(default, tuple) else value
        config = cls(**given)
        config._check(path)
        return config

    def _check(self, path: Path) -> None:
        count, channels = len(self.enc_channels), self.enc_channels[:-1]
        lengths = {count, len(self.enc_kernel_sizes), len(self.enc_dilations)}
        joined = sum(channels[1:])
        checks = (
            (lengths == {count} and count > 2, "enc_channels, enc_kernel_sizes and enc_dilations"),
            (self.enc_channels[-1:] == (joined,), "the last of enc_channels"),
            (len(set(channels)) == 1, "enc_channels"),
            (all(size % self.enc_res2net_scale == 0 for size in channels), "enc_res2net_scale"),
            (self.sample_rate == SAMPLE_RATE, f"sample_rate={self.sample_rate}"),
        )
        for holds, name in checks:
            if not holds:
                raise DecoderConfigError(f"{path}: {CONFIG_KEY}: {name} cannot be used")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors."""
        channels, kernels = self.enc_channels, self.enc_kernel_sizes
        last, part = channels[-1], channels[0] // self.enc_res2net_scale
        layers = {"blocks.0.conv": (channels[0], self.mel_dim, kernels[0])}
        for block in range(1, len(channels) - 1):
            name, size = f"blocks.{block}.", channels[block]
            layers |= {f"{name}tdnn{n}.conv": (size, size, 1) for n in (1, 2)}
            layers |= {
                f"{name}res2net_block.blocks.{n}.conv": (part, part, kernels[block])
                for n in range(self.enc_res2net_scale - 1)
            }
            layers[f"{name}se_block.conv1"] = (self.enc_se_channels, size, 1)
            layers[f"{name}se_block.conv2"] = (size, self.enc_se_channels, 1)
        layers["mfa.conv"] = (last, last, kernels[-1])
        layers["asp.tdnn.conv"] = (self.enc_attention_channels, 3 * last, 1)
        layers["asp.conv"] = (last, self.enc_attention_channels, 1)
        layers["fc"] = (self.enc_dim, 2 * last, 1)
        weights = {f"{name}.weight": shape for name, shape in layers.items()}
        return weights | {f"{name}.bias": shape[:1] for name, shape in layers.items()}


_DEFAULTS = {
    name: field.default for name, field in SpeakerEncoderConfig.__dataclass_fields__.items()
}


class Qwen3TTSSpeakerEncoder(SpeakerEncoder):
    """The encoder of one language model; it computes in float32."""

    def __init__(
        self, config: SpeakerEncoderConfig, weights: Mapping[str, Tensor], device: str = "cpu"
    ) -> None:
        """`weights` have the shapes of `config.shapes()`."""
        from torchaudio.functional import melscale_fbanks  # slow import

        self.vector_size, self.sample_rate = config.enc_dim, config.sample_rate
        self._config, self._device = config, device
        self._weights = {name: tensor.float().to(device) for name, tensor in weights.items()}
        filters = melscale_fbanks(
            WINDOW // 2 + 1, 0.0, TOP_HZ, config.mel_dim, SAMPLE_RATE, "slaney", "slaney"
        )
        self._filters = filters.T.to(device)
        self._window = torch.hann_window(WINDOW, device=device)
        self._on_stream = own_stream(device)

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Qwen3TTSSpeakerEncoder:
        """Read the network from a language model's folder.

        Raises DecoderConfigError, which names the tensor or the key, for files without it.
        """
        path = folder / CONFIG_FILE
        values = read_json(path)
        sizes = values.get(CONFIG_KEY)
        if not isinstance(sizes, dict):
            raise DecoderConfigError(f"{path}: {CONFIG_KEY} must be an object")
        config = SpeakerEncoderConfig.read(path, sizes)
        file = shared_weights(folder, values)
        if file is None:
            raise DecoderConfigError(f"{folder} has no weights")
        found = read_tensors(file, lambda name: name.startswith(PREFIX))
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}
        for name, shape in config.shapes().items():
            if name not in tensors:
                raise DecoderConfigError(f"{file} lacks '{PREFIX}{name}'")
            if tensors[name].shape != shape:
                raise DecoderConfigError(
                    f"{file}: '{PREFIX}{name}' has shape {tuple(tensors[name].shape)}, but the "
                    f"configuration gives {shape}"
                )
        if surplus := tensors.keys() - config.shapes().keys():
            raise DecoderConfigError(f"{file}: unknown tensor '{PREFIX}{min(surplus)}'")
        return cls(config, tensors, device)

    def encode(self, samples: np.ndarray) -> bytes:
        """See `SpeakerEncoder`."""
        clip = checked_clip(samples)
        most = zip(self._config.enc_kernel_sizes, self._config.enc_dilations, strict=True)
        fewest = max((kernel - 1) * dilation // 2 for kernel, dilation in most) + 1
        if len(clip) < max(fewest * HOP, WINDOW):
            raise AudioFormatError("the clip is too short to recognise its speaker")
        with self._on_stream(), torch.inference_mode():
            vector = self._vector(self._spectrogram(torch.from_numpy(clip).to(self._device)))
            return vector.cpu().numpy().astype("<f4").tobytes()

    def _spectrogram(self, clip: Tensor) -> Tensor:
        """Return the logarithms of mel energies [1, mels, T] of samples [S]."""
        side = (WINDOW - HOP) // 2
        padded = F.pad(clip[None], (side, side), mode="reflect")
        spectrum = torch.stft(
            padded, WINDOW, HOP, window=self._window, center=False, return_complex=True
        )
        magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
        return (self._filters @ magnitude).clamp(min=SILENCE).log()

    def _vector(self, x: Tensor) -> Tensor:
        config = self._config
        x = self._convolved("blocks.0.conv", x, config.enc_dilations[0]).relu()
        outputs = []
        for block in range(1, len(config.enc_channels) - 1):
            x = x + self._block(f"blocks.{block}.", x, config.enc_dilations[block])
            outputs.append(x)
        x = self._convolved("mfa.conv", torch.cat(outputs, 1), config.enc_dilations[-1]).relu()
        return self._convolved("fc", self._pooled(x)).flatten()

    def _block(self, name: str, x: Tensor, dilation: int) -> Tensor:
        """Return what a block adds to its input [1, C, T]."""
        x = self._convolved(f"{name}tdnn1.conv", x).relu()
        first, *rest = x.chunk(self._config.enc_res2net_scale, dim=1)
        parts = [first]
        for number, part in enumerate(rest):
            heard = part + parts[-1] if number else part
            layer = f"{name}res2net_block.blocks.{number}.conv"
            parts.append(self._convolved(layer, heard, dilation).relu())
        x = self._convolved(f"{name}tdnn2.conv", torch.cat(parts, 1)).relu()
        squeezed = self._convolved(f"{name}se_block.conv1", x.mean(2, keepdim=True)).relu()
        return x * self._convolved(f"{name}se_block.conv2", squeezed).sigmoid()

    def _pooled(self, x: Tensor) -> Tensor:
        """Return mean and deviation [1, 2 C, 1] of [1, C, T] over time, weighted by attention."""
        even = torch.full_like(x[:, :1], 1 / x.shape[2])
        context = [part.expand_as(x) for part in _moments(x, even)]
        hidden = self._convolved("asp.tdnn.conv", torch.cat([x, *context], 1)).relu().tanh()
        weights = self._convolved("asp.conv", hidden).softmax(2)
        return torch.cat(_moments(x, weights), 1)

    def _convolved(self, name: str, x: Tensor, dilation: int = 1) -> Tensor:
        """Convolve [1, C, T] with a layer; the ends are reflected, so that T stays."""
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        reach = (weight.shape[2] - 1) * dilation
        if reach:
            x = F.pad(x, (reach // 2, reach - reach // 2), mode="reflect")
        return F.conv1d(x, weight, bias, dilation=dilation)


def _moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation [1, C, 1] of [1, C, T]; weights add up to 1 over T."""
    mean = (weights * x).sum(2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(2, keepdim=True)
    return mean, variance.clamp(min=MIN_VARIANCE).sqrt()
