"""Small random checkpoints of published codecs, created with the packages that published them.

Each function writes a folder in the published layout and returns the reference model.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from decoder import (
    AudioDecoder,
    DecodeRequest,
    StreamingOptions,
    StreamState,
    create_decoder,
    render,
)
from decoder.codecs.source_filter.config import SpeechCodecConfig
from decoder.codecs.source_filter.modules import SpeechCodec
from decoder.window_inputs import PaddedNetwork
from tests.decoder.toys import windows_of

WHOLE = StreamingOptions()

SNAC: dict[str, Any] = {
    "sampling_rate": 24_000,
    "encoder_dim": 2,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 32,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": 64,
    "codebook_dim": 4,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}


SMALL_EMBEDDED: dict[str, Any] = {
    "type": "embedded",
    "sample_rate": 16_000,
    "levels": [4, 4, 4],
    "stft_hop": 160,
    "n_fft": 640,
    "decoder_dim": 16,
    "decoder_layers": 2,
    "decoder_heads": 2,
    "decoder_ff": 32,
    "left_window": 2,
    "right_window": 2,
    "streaming": {"chunk_sizes": [5, 10, 20], "buffer": 14, "block_causal": True},
}


SMALL_SOURCE_FILTER = SpeechCodecConfig(
    levels=(4, 4, 4),
    mel_bins=20,
    mel_n_fft=512,
    voice_dim=16,
    voice_ff=32,
    voice_blocks=1,
    voice_tokens=4,
    condition_dim=8,
    decoder_dim=16,
    decoder_ff=32,
    decoder_blocks=2,
)


def write_source_filter(folder: Path) -> SpeechCodec:
    """Write a source-filter codec as the service reads it; random weights, every part audible."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        codec = SpeechCodec(SMALL_SOURCE_FILTER)
        for block in codec.decoder.blocks:
            torch.nn.init.constant_(block.get_parameter("scale"), 1.0)
        torch.nn.init.normal_(codec.decoder.pitch.weight, std=0.1)
        codec.voice(torch.randn(8, 24_000) * torch.rand(8, 24_000) * 0.1)  # its mean values
    config = asdict(SMALL_SOURCE_FILTER) | {"hop": SMALL_SOURCE_FILTER.hop}
    (folder / "config.json").write_text(json.dumps({"type": "source_filter"} | config))
    save_file(codec.eval().state_dict(), folder / "model.safetensors")
    return codec


def write_snac(folder: Path, **changes: Any) -> Any:
    """Write SNAC as published: config.json without a type, pytorch_model.bin."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it uses torch.jit.script
        import snac

    config = SNAC | changes
    torch.manual_seed(0)
    reference = snac.SNAC(**config).eval()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(reference.state_dict(), folder / "pytorch_model.bin")
    return reference


def write_dac(folder: Path, **changes: Any) -> Any:
    """Write DAC in Hugging Face's layout; strides as in the 24 kHz checkpoint, one of them odd."""
    from transformers import DacConfig, DacModel

    sizes: dict[str, Any] = {
        "encoder_hidden_size": 2,
        "downsampling_ratios": [2, 4, 5, 8],
        "decoder_hidden_size": 32,
        "n_codebooks": 4,
        "codebook_size": 64,
        "codebook_dim": 4,
        "sampling_rate": 24_000,
    }
    return _save(DacModel, DacConfig(**(sizes | changes)), folder)


def write_mimi(folder: Path, **changes: Any) -> Any:
    """Write Mimi in Hugging Face's layout, with a short attention window."""
    from transformers import MimiConfig, MimiModel

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_filters": 4,
        "upsampling_ratios": [5, 4, 2],
        "codebook_size": 16,
        "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8,
        "num_quantizers": 4,
        "upsample_groups": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "sliding_window": 6,
    }
    return _save(MimiModel, MimiConfig(**(sizes | changes)), folder, spread=0.3)


def write_qwen3_tts_codec(folder: Path, **changes: Any) -> Any:
    """Write the codec of Qwen3-TTS; `changes` are those of its decoder's configuration."""
    from tests.decoder.qwen3_tts_reference import write_reference

    return write_reference(folder, **changes)


SMALL_XCODEC2: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "encoder_hidden_size": 2,
    "quantization_dim": 80,
    "quantization_levels": [4, 4, 4],
    "semantic_model_config": {
        "model_type": "wav2vec2-bert",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "feature_projection_input_dim": 160,
        "position_embeddings_type": "relative_key",
        "conv_depthwise_kernel_size": 3,
    },
}


def write_xcodec2(folder: Path, **changes: Any) -> Any:
    """Write XCodec2 in Hugging Face's layout, with its feature extractor."""
    from transformers import Xcodec2Config, Xcodec2FeatureExtractor, Xcodec2Model

    Xcodec2FeatureExtractor().save_pretrained(folder)
    return _save(Xcodec2Model, Xcodec2Config(**(SMALL_XCODEC2 | changes)), folder, spread=0.3)


def write_neucodec(folder: Path, **changes: Any) -> Any:
    """Write NeuCodec in Hugging Face's layout, with its feature extractor."""
    from transformers import NeuCodecConfig, NeuCodecFeatureExtractor, NeuCodecModel

    NeuCodecFeatureExtractor().save_pretrained(folder)
    return _save(NeuCodecModel, NeuCodecConfig(**(SMALL_XCODEC2 | changes)), folder, spread=0.3)


def write_higgs_audio_v2(folder: Path, **changes: Any) -> Any:
    """Write the tokenizer of Higgs Audio v2: 25 frames a second, an odd rate, 3 codebooks."""
    from transformers import HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel

    sizes: dict[str, Any] = {
        "target_bandwidths": [0.3, 0.45],
        "codebook_size": 64,
        "codebook_dim": 4,
        "acoustic_model_config": {
            "model_type": "dac",
            "encoder_hidden_size": 2,
            "downsampling_ratios": [8, 5, 4, 2, 3],
            "decoder_hidden_size": 64,
            "upsampling_ratios": [8, 5, 4, 2, 3],
            "hidden_size": 12,
        },
        "semantic_model_config": {
            "model_type": "hubert",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "conv_dim": [4] * 7,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
        },
    }
    torch.manual_seed(0)
    reference = HiggsAudioV2TokenizerModel(HiggsAudioV2TokenizerConfig(**sizes | changes)).eval()
    for name, parameter in reference.named_parameters():
        if not name.endswith("alpha"):
            fan_in = math.prod(parameter.shape[1:])
            torch.nn.init.normal_(parameter, std=0.5 * fan_in**-0.5 if parameter.dim() > 1 else 0.1)
    for name, buffer in reference.named_buffers():
        if name.endswith("codebook.embed"):
            torch.nn.init.normal_(buffer)
    reference.acoustic_decoder.conv2.weight.data *= 40  # samples above full scale
    reference.save_pretrained(folder)
    return reference


NANOCODEC: dict[str, Any] = {
    "decoder_config": {"up_sample_rates": [5, 4, 3], "input_dim": 12, "base_channels": 32},
    "quantizer_config": {"num_groups": 4, "num_levels_per_group": [4, 3, 5]},
}


def write_nanocodec(folder: Path, **changes: Any) -> Any:
    """Write NanoCodec's decoder with the names of NVIDIA's checkpoint, as nanocodec-torch reads
    it.
    """
    from nanocodec_torch.models.audio_codec import AudioCodecModel
    from nanocodec_torch.utils.weight_loader_v2 import load_decoder_weights

    config = NANOCODEC | changes
    reference = AudioCodecModel(**config).eval()
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, parameter in reference.audio_decoder.named_parameters():
        layer, _, kind = f"audio_decoder.{name}".rpartition(".")
        shape = list(parameter.shape)
        if kind == "alpha":
            own = torch.rand(shape, generator=generator) + 0.5
            tensors[f"{layer}.activation.snake_act.alpha"] = own
            continue
        if "up_sample_conv_layers" in layer:
            layer += ".conv"
            shape = [shape[0], 1, shape[1]] if kind == "weight" else shape
        own = torch.randn(shape, generator=generator) * 0.6 * math.prod(shape[1:]) ** -0.5
        if kind == "bias":
            tensors[f"{layer}.bias"] = own * 0.1
            continue
        norms = own.flatten(1).norm(dim=1).view(-1, 1, 1)
        tensors[f"{layer}.parametrizations.weight.original0"] = norms
        tensors[f"{layer}.parametrizations.weight.original1"] = own * 2
    load_decoder_weights(reference, {name: t.numpy() for name, t in tensors.items()})
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"type": "nanocodec"} | config))
    save_file(tensors, folder / "model.safetensors")
    return reference


def _save(model_class: Any, config: Any, folder: Path, spread: float | None = None) -> Any:
    """Save with weights of a `spread` that makes every part audible, or with the package's own."""
    torch.manual_seed(0)
    reference = model_class(config).eval()
    if spread is not None:
        for parameter in reference.parameters():
            torch.nn.init.normal_(parameter, std=spread)
        for name, buffer in reference.named_buffers():
            if name.endswith("embed_sum"):
                torch.nn.init.normal_(buffer)
    reference.save_pretrained(folder)
    return reference


def to_safetensors(folder: Path) -> None:
    """Convert as described in the error message about pickles."""
    file = folder / "pytorch_model.bin"
    save_file(torch.load(file, weights_only=True), folder / "model.safetensors")
    file.unlink()


def random_codes(decoder: AudioDecoder, frames: int, seed: int = 0) -> list[int]:
    """Return codes of so many frames."""
    count = frames * decoder.spec.codes_per_frame
    size = decoder.spec.codebook_size
    return np.random.default_rng(seed).integers(0, size, count).tolist()


def audio_of(
    decoder: AudioDecoder, codes: Sequence[int], options: StreamingOptions = WHOLE, **start: object
) -> np.ndarray:
    """Return a stream's samples, rendered block by block; by default in one block."""
    windows, state = windows_of(decoder.spec, options, codes, **start), StreamState()
    ready = [DecodeRequest(window, state) for window in windows]
    return np.concatenate([render(decoder, [window])[0] for window in ready])


def changed_frames(decoder: AudioDecoder, frames: int, at: int) -> tuple[int, int]:
    """Return how many frames before and after frame `at` change when only its codes change.

    Every difference counts, so that weights must be large enough to have an effect.
    """
    codes = random_codes(decoder, frames)
    size, per_frame = decoder.spec.codebook_size, decoder.spec.codes_per_frame
    other = list(codes)
    for t in range(at * per_frame, (at + 1) * per_frame):
        other[t] = (codes[t] + size // 2) % size
    differs = np.flatnonzero(audio_of(decoder, codes) != audio_of(decoder, other))
    first, last = (int(t // decoder.spec.samples_per_frame) for t in (differs[0], differs[-1]))
    return at - first, last - at


WRITERS: dict[str, Callable[[Path], Any]] = {
    "dac": write_dac,
    "higgs_audio_v2_tokenizer": write_higgs_audio_v2,
    "mimi": write_mimi,
    "nanocodec": write_nanocodec,
    "neucodec": write_neucodec,
    "qwen3_tts_tokenizer_12hz": write_qwen3_tts_codec,
    "snac": write_snac,
    "xcodec2": write_xcodec2,
}
"""Every published codec, small and with random weights."""

PADDING = ("dac", "embedded", "higgs_audio_v2_tokenizer", "neucodec", "snac", "xcodec2")
"""Codecs that render windows of different lengths in one call."""


def write_padding(name: str, folder: Path, device: str = "cpu", **options: object) -> PaddedNetwork:
    """Create one of them, small, from its folder."""
    if name == "embedded":
        (folder / "config.json").write_text(json.dumps(SMALL_EMBEDDED))
        source = create_decoder(folder, test_mode=True, options=options, device=device)
    else:
        WRITERS[name](folder)
        source = create_decoder(folder, options=options, device=device, allow_pickle=True)
    assert isinstance(source, PaddedNetwork)
    return source
