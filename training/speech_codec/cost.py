"""Multiply-adds per second of audio of the decoder that ships and of the designs.

    python -m training.speech_codec.cost

Of linear layers, convolutions and attention; the STFTs are left out (below 2 % each).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from decoder.codecs.embedded.modules import CodecConfig
from decoder.codecs.embedded.modules import CodecDecoder as ShippedDecoder
from decoder.codecs.source_filter.config import SpeechCodecConfig
from decoder.codecs.source_filter.modules import SpeechCodec
from training.speech_codec.config import DESIGNS

SHIPPED = Path(__file__).parents[2] / "tts" / "embedded" / "codec" / "config.json"


def shipped(config: CodecConfig) -> float:
    """Return the shipped decoder's multiply-adds per second, without what windows compute again."""
    decoder = ShippedDecoder(config)
    frames = config.sample_rate / config.hop * config.frames_per_code
    layers = (m for m in decoder.modules() if isinstance(m, nn.Linear))
    linear: float = sum(layer.weight.numel() for layer in layers)
    linear -= decoder.input.weight.numel() * (1 - 1 / config.frames_per_code)
    seen = (config.left_window + 1 + config.right_window) * config.frames_per_code
    attention = 2 * config.decoder_layers * config.decoder_dim * seen
    return frames * (linear + attention)


def designed(config: SpeechCodecConfig) -> float:
    """Return a decoder's multiply-adds per second, without those that depend on the voice alone."""
    decoder = SpeechCodec(config).decoder
    frames = config.sample_rate / config.frame
    per_frame = sum(
        block.get_parameter(f"{layer}.weight").numel()
        for block in decoder.blocks
        for layer in ("mix", "ff_in", "ff_out")
    )
    per_frame += sum(
        head.weight.numel() for head in (decoder.spectra, decoder.pitch, decoder.filters)
    )
    return frames * (per_frame + decoder.input.weight.numel() / config.frames_per_code)


def parameters(config: SpeechCodecConfig) -> Iterator[str]:
    """Iterate over each part's parameters in millions."""
    codec = SpeechCodec(config)
    for name in ("voice_encoder", "decoder"):
        count = sum(p.numel() for p in getattr(codec, name).parameters())
        yield f"{name} {count / 1e6:.1f} M"


def main() -> None:
    torch.manual_seed(0)
    today = CodecConfig.from_dict(json.loads(SHIPPED.read_text(encoding="utf-8")))
    base = shipped(today)
    again = 1 + today.left_window * (today.decoder_layers - 1) / 2
    in_blocks = base * (1 + again / 10)
    print(f"shipped: {base / 1e6:.0f} M/s; {in_blocks / 1e6:.0f} M/s in blocks of 10 codes, whose "
          f"windows compute codes again")  # fmt: skip
    for name in (name for name in DESIGNS if name != "toy"):
        cost = designed(DESIGNS[name])
        print(
            f"{name}: {cost / 1e6:.0f} M/s ({cost / base:.2f} of the shipped), in blocks of any "
            f"size; {', '.join(parameters(DESIGNS[name]))}"
        )


if __name__ == "__main__":
    main()
