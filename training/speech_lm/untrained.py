"""Write untrained weights of full size where training leaves its own, to measure speed with.

    python -m training.speech_lm.untrained --out runs/untrained --layers 8
    python -m training.speech_lm.export --lm runs/untrained/lm.safetensors \
        --codec runs/untrained/source_free.safetensors --config runs/untrained/source_free.json \
        --voice-encoder runs/untrained/voices.safetensors --package runs/untrained/package \
        --out runs/untrained/voice
    python -m benchmarks.speed --model runs/untrained/voice --repeat 3

The symbols are those that English uses, without the teacher's others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from decoder.codecs.source_filter.modules import SpeechCodec
from training.kokoro.packages import SYMBOLS
from training.llama import LanguageModel, ModelConfig, checkpoint
from training.speech_codec.checkpoint import DECODER, VOICE_ENCODER, halved, write
from training.speech_codec.config import DESIGNS, save_config
from training.speech_lm.documents import BUCKETS
from training.speech_lm.names import NAMES
from training.speech_lm.vocabulary import USED


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--design", choices=sorted(DESIGNS), default="source_free")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    args = parser.parse_args(argv)
    out, design = args.out, DESIGNS[args.design]
    (out / "package" / SYMBOLS).parent.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = ModelConfig.sized(design.codebook_size, args.layers, args.dim, BUCKETS[-1])
        model, codec = LanguageModel(sizes, design.levels), SpeechCodec(design)
    write(halved(checkpoint(model)), out / "lm.safetensors")
    (out / "lm.json").write_text(json.dumps(asdict(sizes)) + "\n")
    rows = np.random.default_rng(0).integers(design.codebook_size, size=(9, design.voice_tokens))
    voices = dict(zip(NAMES, rows.tolist(), strict=False))
    (out / "voices.json").write_text(json.dumps(voices) + "\n")
    parts = ((DECODER, codec.decoder, args.design), (VOICE_ENCODER, codec.voice_encoder, "voices"))
    for prefix, part, file in parts:
        state = {f"{prefix}{name}": value for name, value in part.state_dict().items()}
        write(halved(state), out / f"{file}.safetensors")
    save_config(design, out / f"{args.design}.json")
    known = {symbol: 1 + place for place, symbol in enumerate(sorted(USED))}
    (out / "package" / SYMBOLS).write_text(json.dumps({"model": {"vocab": known}}))


if __name__ == "__main__":
    main()
