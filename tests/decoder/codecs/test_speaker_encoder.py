"""The speaker encoder of Qwen3-TTS Base: vectors of other code, and files that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from decoder import AudioFormatError, DecoderConfigError, create_speaker_encoder
from tests.decoder.speaker_encoders import CONFIG, reference_vector, speaker_tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    values = {"model_type": "qwen3_tts", "speaker_encoder_config": config}
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def clip(seconds: float, seed: int = 0) -> np.ndarray:
    """Return a tone with noise, louder and louder."""
    time_s = np.arange(int(24_000 * seconds)) / 24_000
    noise = np.random.default_rng(seed).normal(0, 0.02, len(time_s))
    return (np.sin(900 * time_s * (1 + seed)) * 0.3 * time_s + noise).astype(np.float32)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"enc_dim": 7, "enc_res2net_scale": 2, "enc_kernel_sizes": [5, 5, 3, 3, 3]},
        {"enc_channels": [24, 24, 24, 48], "enc_kernel_sizes": [3, 3, 5, 1]}
        | {"enc_dilations": [2, 1, 3, 1]},
    ],
)
def test_a_vector_is_that_of_other_code(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = CONFIG | keys
    tensors = speaker_tensors(config)
    encoder = create_speaker_encoder(write(tmp_path, config, tensors))
    assert (encoder.vector_size, encoder.sample_rate) == (config["enc_dim"], 24_000)
    found = []
    for seconds, seed in ((1.0, 0), (2.37, 1), (0.2, 2)):
        samples = clip(seconds, seed)
        vector = np.frombuffer(encoder.encode(samples), "<f4")
        expected = reference_vector(tensors, samples, config)
        np.testing.assert_allclose(vector, expected, atol=2e-4 * np.abs(expected).max())
        found.append(vector)
    assert np.abs(found[0] - found[1]).max() > 0.01 * np.abs(found[0]).max()


def test_other_tensors_of_the_files_are_not_read(tmp_path: Path) -> None:
    tensors = speaker_tensors()
    expected = create_speaker_encoder(write(tmp_path, CONFIG, tensors)).encode(clip(1.0))
    halves = {name: value.bfloat16() for name, value in tensors.items()}
    others = halves | {"talker.codec_head.weight": halves["speaker_encoder.fc.bias"].clone()}
    found = create_speaker_encoder(write(tmp_path, CONFIG, others)).encode(clip(1.0))
    assert found != expected
    wide, exact = (np.frombuffer(one, "<f4") for one in (found, expected))
    np.testing.assert_allclose(wide, exact, atol=0.1 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(1000, np.float32), "too short to recognise its speaker"),
        (np.zeros(0, np.float32), "one row of samples"),
        (np.full(24_000, np.nan, np.float32), "not finite"),
    ],
)
def test_a_clip_that_cannot_be_used_is_an_error(
    tmp_path: Path, samples: np.ndarray, message: str
) -> None:
    encoder = create_speaker_encoder(write(tmp_path, CONFIG, speaker_tensors()))
    with pytest.raises(AudioFormatError, match=message):
        encoder.encode(samples)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"enc_dim": 0}, r"speaker_encoder_config.enc_dim=0 cannot be used"),
        ({"enc_dim": 49}, r"'speaker_encoder.fc.weight' has shape \(48, 96, 1\), but .* \(49, 96"),
        ({"enc_channels": "x"}, "enc_channels='x' cannot be used"),
        ({"enc_channels": [16, 16, 16, 16, 32]}, "the last of enc_channels cannot be used"),
        ({"enc_dilations": [1, 2]}, "enc_kernel_sizes and enc_dilations cannot be used"),
        ({"enc_res2net_scale": 5}, "enc_res2net_scale cannot be used"),
        ({"sample_rate": 16_000}, "sample_rate=16000 cannot be used"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_an_error(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path, CONFIG | keys, speaker_tensors())
    with pytest.raises(DecoderConfigError, match=message):
        create_speaker_encoder(folder)


def test_a_configuration_of_another_type_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIG, speaker_tensors())
    (folder / "config.json").write_text('{"speaker_encoder_config": [1]}')
    with pytest.raises(DecoderConfigError, match="speaker_encoder_config must be an object"):
        create_speaker_encoder(folder)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    tensors = speaker_tensors()
    lost = tensors.pop("speaker_encoder.asp.conv.bias")
    with pytest.raises(DecoderConfigError, match=r"lacks 'speaker_encoder.asp.conv.bias'"):
        create_speaker_encoder(write(tmp_path, CONFIG, tensors))
    tensors |= {"speaker_encoder.asp.conv.bias": lost, "speaker_encoder.more": lost.clone()}
    with pytest.raises(DecoderConfigError, match=r"unknown tensor 'speaker_encoder.more'"):
        create_speaker_encoder(write(tmp_path, CONFIG, tensors))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DecoderConfigError, match="has no weights"):
        create_speaker_encoder(tmp_path)
