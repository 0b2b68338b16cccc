"""Speech checkpoints of published sizes with random weights, for benchmarks of a server.

    a      Llasa: Llama 1B with 193,800 rows, 50 codes a second, XCodec2
    b      Orpheus: Llama 3B, 82 codes a second, SNAC at 24 kHz
    csm    CSM-1B: Llama 1B, 12.5 frames of 32 codes a second, a depth transformer of 4 layers, Mimi
    qwen   Qwen3-TTS 0.6B: 12.5 frames of 16 codes a second, a predictor of 5 layers, its codec
    tiny   Orpheus with a few thousand weights, for tests
    voice  the built-in voice

Tokenizers have the published ids and few words: a letter is about one token. The codecs have
the published sizes, the weights random, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.shapes import LLASA_1B, ORPHEUS_3B, Shape
from tests.tts.family_checkpoints import (
    write_csm_family,
    write_llasa,
    write_orpheus,
    write_qwen3_tts_family,
)

SNAC_24KHZ: Mapping[str, Any] = {"sampling_rate": 24_000, "vq_strides": [4, 2, 1]}
XCODEC2: Mapping[str, Any] = {"model_type": "xcodec2"}
MIMI: Mapping[str, Any] = {"model_type": "mimi", "num_quantizers": 32}
CSM_1B: Mapping[str, Any] = {
    "num_codebooks": 32,
    "vocab_size": 2051,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "codebook_pad_token_id": 2050,
}
CSM_1B_DEPTH: Mapping[str, Any] = {
    "num_codebooks": 32,
    "backbone_hidden_size": 2048,
    "vocab_size": 2051,
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 33,
}
QWEN3_TTS_06B: Mapping[str, Any] = {
    "vocab_size": 3072,
    "text_hidden_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rope_scaling": {"interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "num_code_groups": 16,
}
QWEN3_TTS_PREDICTOR: Mapping[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_code_groups": 16,
}
REPLICA_SHARE = 0.9  # streams of each of several replicas, against one engine


@dataclass(frozen=True, slots=True)
class Speaker:
    """Flags of a server of one shape, and its bars on one H200 in bfloat16."""

    name: str
    write: Callable[[Path], Path] | None = None  # writes the folder; None: the built-in voice
    max_length: int | None = None  # tokens of one sequence
    streams_bar: int | None = None
    first_audio_bar_ms: float | None = None  # for one stream
    rate_bar_ms: float | None = None  # 95 of 100 first sounds, at 20 calls per second

    def on_gpus(self, count: int) -> Speaker:
        """Return the shape with the bars of so many GPUs."""
        if self.streams_bar is None or count == 1:
            return self
        return replace(self, streams_bar=round(REPLICA_SHARE * count * self.streams_bar))

    def flags(self, folder: Path) -> list[str]:
        """Return flags of `tts.serve`."""
        if self.write is None:
            return []
        flags = ["--run-model-test-mode", "--model.model-path", str(self.write(folder))]
        return flags if self.max_length is None else [*flags, "--max-length", str(self.max_length)]


def _at_full_size(folder: Path, shape: Shape, codec: Mapping[str, Any]) -> Path:
    """Write a small checkpoint with the sizes of a shape, without weights."""
    path = folder / "config.json"
    settled = {"vocab_size", "eos_token_id", "bos_token_id"}  # set by its tokenizer
    sizes = {key: value for key, value in shape.values.items() if key not in settled}
    path.write_text(json.dumps({**json.loads(path.read_text()), **sizes}), encoding="utf-8")
    (folder / "codec" / "config.json").write_text(json.dumps(dict(codec)), encoding="utf-8")
    (folder / "model.safetensors").unlink()
    return folder


def _write_a(folder: Path) -> Path:
    return _at_full_size(write_llasa(folder / "llasa"), LLASA_1B, XCODEC2)


def _write_b(folder: Path) -> Path:
    return _at_full_size(write_orpheus(folder / "orpheus"), ORPHEUS_3B, SNAC_24KHZ)


def _write_csm(folder: Path) -> Path:
    path = write_csm_family(folder / "csm")
    parts = {"depth_decoder_config": CSM_1B_DEPTH, "codec_config": MIMI}
    return _without_weights(path, CSM_1B, parts)


def _write_qwen(folder: Path) -> Path:
    path = write_qwen3_tts_family(folder / "qwen")
    codec = {"model_type": "qwen3_tts_tokenizer_12hz"}
    (path / "speech_tokenizer" / "config.json").write_text(json.dumps(codec), encoding="utf-8")
    talker = json.loads((path / "config.json").read_text())["talker_config"] | QWEN3_TTS_06B
    predictor = talker["code_predictor_config"] | QWEN3_TTS_PREDICTOR
    return _without_weights(
        path, {"talker_config": talker | {"code_predictor_config": predictor}}, {}
    )


def _without_weights(
    folder: Path, sizes: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]
) -> Path:
    """Change config.json, and objects inside of it; remove the weights."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **sizes}
    config |= {name: {**config[name], **values} for name, values in parts.items()}
    path.write_text(json.dumps(config), encoding="utf-8")
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    return folder


def _write_tiny(folder: Path) -> Path:
    return write_orpheus(folder / "tiny")


SPEAKERS = {
    speaker.name: speaker
    for speaker in (
        Speaker("a", _write_a, max_length=1024, streams_bar=900, first_audio_bar_ms=10.0),
        Speaker("b", _write_b, max_length=1280, streams_bar=340, first_audio_bar_ms=18.0),
        Speaker("csm", _write_csm, max_length=1024, streams_bar=250),
        Speaker(
            "qwen",
            _write_qwen,
            max_length=1024,
            streams_bar=400,
            first_audio_bar_ms=20.0,
            rate_bar_ms=50.0,
        ),
        Speaker("tiny", _write_tiny, max_length=1280),
        Speaker("voice"),
    )
}
