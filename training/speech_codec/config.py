"""The codec's design, and one for tests."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from decoder.codecs.source_filter.config import SpeechCodecConfig
from training.speech_codec.coder import Sizes

BASE = SpeechCodecConfig()
DESIGNS = {
    "source_free": BASE,
    "source_ahead": replace(BASE, ahead=5),
    "toy": SpeechCodecConfig(
        levels=(4, 4, 4), mel_bins=20, mel_n_fft=512, voice_dim=16, voice_ff=32, voice_blocks=1,
        voice_tokens=4, condition_dim=8, decoder_dim=16, decoder_ff=32, decoder_blocks=2,
        kernel=5,
    ),
}  # fmt: skip


def coder_sizes(design: SpeechCodecConfig) -> Sizes:
    """Sizes of the coder whose codes a design decodes."""
    sizes = Sizes(design.levels, design.voice_tokens, design.spectra_per_code)
    if design == DESIGNS["toy"]:
        return sizes._replace(dim=16, ff=32, blocks=1, kernel=design.kernel, reader=16)
    return sizes


def save_config(config: SpeechCodecConfig, path: Path) -> None:
    """Write all sizes as JSON."""
    path.write_text(json.dumps(asdict(config), indent=1) + "\n", encoding="utf-8")


def load_config(path: Path) -> SpeechCodecConfig:
    """Read the sizes that `save_config` wrote."""
    return SpeechCodecConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
