"""Small decoders and stateful references for the streaming tests.

`ConvDecoder` depends only on earlier codes and has no masks. The stateful references keep the
results of earlier blocks instead of computing them again; they check that a window rendered without
a state gives the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder import (
    AttentionKind,
    AudioDecoder,
    CodecSpec,
    DecodeRequest,
    DecoderStream,
    DecodeWindow,
    MaskPolicy,
    StreamingOptions,
    render,
)
from decoder.codecs.embedded.decoder import EmbeddedDecoder, codec_spec
from decoder.codecs.embedded.modules import CodecConfig, EmbeddedCodec
from decoder.codecs.mimi.modules import rotary_table, rotate
from decoder.registry import CodecSource

TOLERANCE = 2e-5

SMALL = CodecConfig(
    levels=(4, 4, 4),
    stft_hop=4,
    n_fft=16,
    decoder_dim=16,
    decoder_layers=2,
    decoder_heads=2,
    decoder_ff=32,
    left_window=2,
    right_window=2,
)
CAUSAL = replace(SMALL, right_window=0)


def build_embedded(config: CodecConfig = SMALL, seed: int = 0) -> EmbeddedDecoder:
    """Create the real embedded codec, small, with random weights that make every code audible."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        codec = EmbeddedCodec(config, with_encoder=False).eval()
        for parameter in codec.parameters():
            nn.init.normal_(parameter, std=0.4)
    source = CodecSource("embedded", test_mode=True)
    return EmbeddedDecoder(codec_spec(config, source), codec, source)


class ConvDecoder(AudioDecoder):
    """Embedding, two causal convolutions, one frame of samples per code."""

    KERNEL, DIM, HOP = 3, 8, 10

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * 0.5

        self.spec = CodecSpec(
            name="conv",
            sample_rate=1000,
            samples_per_code=Fraction(self.HOP),
            codebook_size=64,
            receptive_field=2 * (self.KERNEL - 1),
            attention=AttentionKind.NONE,
        )
        self.table = weight(64, self.DIM)
        self.convs = [weight(self.DIM, self.DIM, self.KERNEL) for _ in range(2)]
        self.head = weight(self.DIM, self.HOP)

    def decode(self, windows: Sequence[DecodeWindow]) -> Tensor:
        """Decode as if there were no codes before the window."""
        rows = [self.step(self.fresh_state(), window.codes)[0] for window in windows]
        return torch.cat([row[:, w.skip_samples :] for row, w in zip(rows, windows, strict=True)])

    def fresh_state(self) -> list[Tensor]:
        return [torch.zeros(1, self.DIM, self.KERNEL - 1) for _ in self.convs]

    def step(self, state: list[Tensor], codes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Return samples [1, T * HOP] of new codes, given each layer's last inputs; and the new
        state.
        """
        x = self.table[torch.tensor(codes)].T[None]
        following = []
        for kept, weight in zip(state, self.convs, strict=True):
            joined = torch.cat((kept, x), dim=-1)
            following.append(joined[..., -(self.KERNEL - 1) :])
            x = torch.tanh(F.conv1d(joined, weight))
        return (x.transpose(1, 2) @ self.head).reshape(1, -1), following


class CachedEmbedded:
    """The embedded decoder network with a key/value cache instead of a history of codes.

    Correct if no code attends to a later block: block-causal masks, or a causal codec.
    """

    def __init__(self, decoder: EmbeddedDecoder) -> None:
        self._codec = decoder._codec
        self._config = decoder._codec.config
        self._cache: list[tuple[Tensor, Tensor]] = []
        self._spectra = torch.empty(1, 0, 0)
        self._position = 0

    @torch.inference_mode()
    def step(self, codes: Sequence[int]) -> np.ndarray:
        """Return samples of the next block."""
        config, network = self._config, self._codec.decoder
        frames = config.frames_per_code
        new = torch.arange(self._position, self._position + len(codes))
        positions = (new[:, None] * frames + torch.arange(frames)).flatten()
        x = network.input(self._codec.quantizer.values(torch.tensor([codes])))
        x = x.view(1, len(codes) * frames, -1)
        tables = rotary_table(positions, config.decoder_dim // config.decoder_heads)
        mask = self._mask(new)
        for layer, block in enumerate(network.body.blocks):
            x = self._block(layer, block, x, mask, tables)
        spectra = network.spectra(network.body.norm(x))
        known = self._spectra if self._position else spectra[:, :0]
        self._spectra = torch.cat((known, spectra), dim=1)
        self._position += len(codes)
        return network.synthesize(self._spectra)[0, -len(codes) * config.hop :].numpy()

    def _mask(self, new: Tensor) -> Tensor:
        distance = new[:, None] - torch.arange(int(new[-1]) + 1)[None]
        near = (distance <= self._config.left_window) & (distance >= -self._config.right_window)
        frames = self._config.frames_per_code
        return near.repeat_interleave(frames, 0).repeat_interleave(frames, 1)

    def _block(
        self, layer: int, block: Any, x: Tensor, mask: Tensor, tables: tuple[Tensor, Tensor]
    ) -> Tensor:
        qkv = block.qkv(block.attention_norm(x)).view(1, x.shape[1], 3, block.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotate(q, *tables), rotate(k, *tables)
        if self._position:
            k, v = (torch.cat(pair, 2) for pair in zip(self._cache[layer], (k, v), strict=True))
            self._cache[layer] = (k, v)
        else:
            self._cache.append((k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + block.attention_out(mixed.transpose(1, 2).reshape(x.shape))
        return x + block.ff_out(F.gelu(block.ff_in(block.ff_norm(x))))


class Block(NamedTuple):
    """Codes of one block, and the later codes of its look-ahead."""

    codes: tuple[int, ...]
    number: int
    future: tuple[int, ...] = ()


def cut(
    codes: Sequence[int],
    sizes: tuple[int, ...] | None,
    look_ahead: int = 0,
    first_look_ahead: int | None = None,
) -> list[Block]:
    """Return the blocks of a finished stream."""
    blocks: list[Block] = []
    start = 0
    while start < len(codes):
        size = len(codes) if sizes is None else sizes[min(len(blocks), len(sizes) - 1)]
        end = min(start + size, len(codes))
        options = StreamingOptions(sizes, look_ahead=look_ahead, first_look_ahead=first_look_ahead)
        waits = options.look_ahead_at(start, size)
        future = tuple(codes[end : end + waits])
        blocks.append(Block(tuple(codes[start:end]), len(blocks), future))
        start = end
    return blocks


def windows_of(
    spec: CodecSpec, options: StreamingOptions, codes: Sequence[int], **start: Any
) -> list[DecodeWindow]:
    """Return every window of one stream; `start` is prompt_codes, carry, token_offset."""
    stream = DecoderStream(spec, options, **start)
    return [*stream.push(codes), *stream.finish()]


def stream_audio(
    decoder: AudioDecoder, options: StreamingOptions, codes: Sequence[int], **start: Any
) -> list[np.ndarray]:
    """Return emitted samples, block by block."""
    windows = windows_of(decoder.spec, options, codes, **start)
    return [render(decoder, [DecodeRequest(window)])[0] for window in windows]


def one_shot_audio(
    decoder: AudioDecoder,
    codes: Sequence[int],
    *,
    sizes: tuple[int, ...] | None = None,
    prompt: Sequence[int] = (),
    masks: MaskPolicy | None = None,
) -> np.ndarray:
    """Render prompt ++ codes in one pass, with the block ids of a stream with `sizes`."""
    blocks = [block.number for block in cut(codes, sizes) for _ in block.codes]
    hop = int(decoder.spec.samples_per_code)
    window = DecodeWindow(
        codes=(*prompt, *codes),
        positions=tuple(range(-len(prompt), len(codes))),
        block_ids=(-2,) * len(prompt) + tuple(blocks),
        prompt_len=len(prompt),
        history_len=0,
        masks=masks or MaskPolicy(),
        skip_samples=len(prompt) * hop,
        first_sample=0,
        num_samples=len(codes) * hop,
    )
    return render(decoder, [DecodeRequest(window)])[0]
