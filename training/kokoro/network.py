"""Kokoro-82M for batches: ids and styles to durations, pitch, energy and samples at 24 kHz.

    ids, prosody half of the style -> durations, features          `prosody`
    features by frame              -> pitch (Hz) and energy         `curves`
    sound, curves, timbre half     -> samples                       `speak`

`curves` and `speak` are apart, so that one sentence can be said in several timbres that differ in
nothing else. Source of the architecture: StyleTTS 2, arXiv 2306.07691, and iSTFTNet,
arXiv 2203.02395; names of tensors as in the package `kokoro` (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from training.kokoro.blocks import Conv, Pointwise, ResidualBlock, Valid, valid_frames
from training.kokoro.text import HIDDEN, NUM_SYMBOLS, Predictor, Prosody, SoundEncoder
from training.kokoro.vocoder import Generator

SAMPLE_RATE = 24_000
FRAME = 600  # samples of 25 ms, the grid of durations; pitch has two values per frame
STYLE = 256  # values of a style vector: timbre, then prosody


class Curves(NamedTuple):
    """Pitch in Hz and energy, float [B, 2 F], and the number of frames int64 [B]."""

    pitch: Tensor
    energy: Tensor
    frames: Tensor


class Decoder(nn.Module):
    """Features, pitch and energy by frame to samples."""

    def __init__(self, pointwise: Pointwise) -> None:
        super().__init__()
        wide = 1024
        self.encode = ResidualBlock(HIDDEN + 2, wide, pointwise)
        self.decode = nn.ModuleList(
            ResidualBlock(wide + 2 + 64, wide if i < 3 else HIDDEN, pointwise, doubles=i == 3)
            for i in range(4)
        )
        self.F0_conv = Conv(1, 1, 3, stride=2, padding=1)
        self.N_conv = Conv(1, 1, 3, stride=2, padding=1)
        self.asr_res = nn.ModuleList([Conv(HIDDEN, 64, 1)])
        self.generator = Generator(pointwise)

    def forward(self, sound: Tensor, curves: Curves, timbre: Tensor, noise: float) -> Tensor:
        """sound [B, 512, 1, F], timbre [B, 128], to samples [B, 600 F]."""
        length = sound.shape[3]
        once, twice = (
            valid_frames(curves.frames, length),
            valid_frames(2 * curves.frames, 2 * length),
        )
        pitch = self.F0_conv(curves.pitch[:, None, None])
        energy = self.N_conv(curves.energy[:, None, None])
        x = self.encode(torch.cat((sound, pitch, energy), 1), timbre, once, once)
        side = self.asr_res[0](sound)
        for block in self.decode:
            after = once if block.pool is None else twice
            x = block(torch.cat((x, side, pitch, energy), 1), timbre, once, after)
        return self.generator(x, timbre, curves.pitch, curves.frames, noise)


class Kokoro(nn.Module):
    """The teacher; a silent one decides how to speak, and has nothing to speak with."""

    def __init__(self, pointwise: Pointwise | None = None, *, silent: bool = False) -> None:
        super().__init__()
        from transformers import AlbertConfig, AlbertModel

        pointwise = pointwise or Pointwise()
        config = AlbertConfig(
            vocab_size=NUM_SYMBOLS,
            hidden_size=768,
            num_attention_heads=12,
            intermediate_size=2048,
            max_position_embeddings=512,
            num_hidden_layers=12,
        )
        self.bert = AlbertModel(config, add_pooling_layer=False)
        self.bert_encoder = nn.Linear(768, HIDDEN)
        self.text_encoder = None if silent else SoundEncoder()
        self.predictor = Predictor(pointwise)
        self.decoder = None if silent else Decoder(pointwise)

    @classmethod
    def load(
        cls, weights: Mapping[str, Tensor], device: torch.device, pointwise: Pointwise | None = None
    ) -> Kokoro:
        """Load the tensors of `training.kokoro.weights`; all must be present, with their shapes, or
        none of those that a silent teacher lacks."""
        network = cls(pointwise, silent=not any(map(needed_to_speak, weights)))
        wanted = network.state_dict()
        fitting = {
            name: value.unsqueeze(2)
            if name in wanted and wanted[name].dim() > value.dim()
            else value
            for name, value in weights.items()
        }
        network.load_state_dict(fitting)
        network = network.to(device).eval().requires_grad_(requires_grad=False)
        if network.decoder is not None and device.type == "cuda":
            network.decoder.to(memory_format=torch.channels_last)
        return network

    @torch.no_grad()
    def prosody(self, ids: Tensor, lengths: Tensor, style: Tensor) -> Prosody:
        """ids int64 [B, T], padded with 0; lengths int64 [B] on the CPU; style [B, 256]. A silent
        teacher's features for the sound have no values."""
        own = torch.arange(ids.shape[1], device=ids.device) < lengths.to(ids.device)[:, None]
        column = own[..., None].float()
        known = self.bert(ids, attention_mask=own.long()).last_hidden_state
        half = style[:, STYLE // 2 :]
        features = self.predictor.text_encoder(self.bert_encoder(known), half, lengths, column)
        sound = self.text_encoder(ids, lengths, column) if self.text_encoder else features[..., :0]
        return Prosody(self.predictor.durations(features, lengths, column), features, sound)

    @torch.no_grad()
    def curves(self, prosody: Prosody, style: Tensor) -> Curves:
        """Pitch and energy of every frame."""
        frames = prosody.durations.sum(1)
        spread, once = _by_frame(prosody.pitch, prosody.durations)
        shared = self.predictor.shared.run(spread, frames.cpu()).transpose(1, 2)[:, :, None]
        twice = valid_frames(2 * frames, 2 * shared.shape[3])
        half, found = style[:, STYLE // 2 :], []
        for blocks, last in (
            (self.predictor.F0, self.predictor.F0_proj),
            (self.predictor.N, self.predictor.N_proj),
        ):
            x = blocks[0](shared, half, once, once)
            x = blocks[2](blocks[1](x, half, once, twice), half, twice, twice)
            found.append((last(x) * twice.mask)[:, 0, 0])
        return Curves(found[0], found[1], frames)

    @torch.no_grad()
    def speak(self, prosody: Prosody, curves: Curves, style: Tensor, noise: float = 1.0) -> Tensor:
        """Samples float32 [B, 600 F] in the timbre of `style` [B, 256]; zeros behind a sentence.

        `noise` scales the breath in the source; 0 makes the result a function of the arguments.
        """
        assert self.decoder is not None, "a silent teacher only plans"
        spread, _ = _by_frame(prosody.sound, prosody.durations)
        sound = spread.transpose(1, 2)[:, :, None]
        if sound.is_cuda:
            sound = sound.contiguous(memory_format=torch.channels_last)
        return self.decoder(sound, curves, style[:, : STYLE // 2], noise)


def needed_to_speak(name: str) -> bool:
    """Return whether a tensor of this name is needed for the sound only."""
    return name.startswith(("decoder.", "text_encoder."))


def _by_frame(features: Tensor, durations: Tensor) -> tuple[Tensor, Valid]:
    """Repeat features [B, T, C] by durations [B, T]: [B, F, C], zeros in the padding."""
    ends = durations.cumsum(1)
    length = int(ends[:, -1].max())
    valid = valid_frames(ends[:, -1], length)
    frames = torch.arange(length, device=durations.device).expand(len(ends), length).contiguous()
    index = torch.searchsorted(ends, frames, right=True).clamp(max=durations.shape[1] - 1)
    spread = features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))
    return spread * valid.mask[:, 0, 0, :, None], valid
