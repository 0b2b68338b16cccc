"""The tokenizer of Higgs Audio v2: equality with transformers, context, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder import DecoderConfigError, create_decoder
from decoder.codecs.higgs_audio_v2 import NAME
from tests.closeness import error
from tests.decoder.small_codecs import (
    audio_of,
    changed_frames,
    random_codes,
    write_higgs_audio_v2,
)

MAX_ERROR = 1e-5  # of the loudest sample
FRAMES = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("higgs")
    return folder, write_higgs_audio_v2(folder)


@torch.inference_mode()
def reference_audio(reference: Any, codes: list[int]) -> np.ndarray:
    rows = torch.tensor(codes).view(1, FRAMES, 3).transpose(1, 2)
    samples: np.ndarray = reference.decode(rows).audio_values[0, 0].numpy()
    return samples


def test_audio_equals_the_reference(checkpoint: tuple[Path, Any]) -> None:
    """One rate is odd; samples may exceed full scale."""
    folder, reference = checkpoint
    decoder = create_decoder(folder)
    codes = random_codes(decoder, FRAMES)
    wanted = reference_audio(reference, codes)
    got = audio_of(decoder, codes)
    assert len(got) == len(wanted) == FRAMES * 960
    assert error(got, wanted) < MAX_ERROR
    assert np.abs(wanted).max() > 1.0


def test_the_facts_follow_the_configuration(checkpoint: tuple[Path, Any]) -> None:
    spec = create_decoder(checkpoint[0]).spec
    assert (spec.sample_rate, spec.samples_per_frame, spec.layout) == (24_000, 960, (0, 1, 2))
    assert (spec.codes_per_second, spec.codebook_size) == (75, 64)


def test_streamed_equals_whole_at_the_recommended_context(checkpoint: tuple[Path, Any]) -> None:
    decoder = create_decoder(checkpoint[0])
    codes = random_codes(decoder, FRAMES)
    whole = audio_of(decoder, codes)
    assert error(audio_of(decoder, codes, decoder.spec.recommended), whole) < MAX_ERROR
    before, after = changed_frames(decoder, 30, 15)
    assert before * 3 == decoder.spec.right_field
    assert after * 3 == decoder.spec.receptive_field


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_bandwidths": [0.1]}, r"target_bandwidths \[0.1\] give no codebook of 150 bit/s"),
        ({"target_bandwidths": []}, r"target_bandwidths \[\] give no codebook"),
        ({"acoustic_model_config": 3}, "acoustic_model_config must be an object"),
        (
            {"acoustic_model_config": {"upsampling_ratios": [4, 2]}},
            "upsampling_ratios give 8 samples for a frame of 320",
        ),
        ({"codebook_size": 0}, "codebook_size is 0 but must be"),
        ({"target_bandwidths": [0.6]}, r"lack 'quantizer.quantizers.3.codebook.weight'"),
    ],
)
def test_a_wrong_configuration_is_an_error(
    checkpoint: tuple[Path, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    values = json.loads((checkpoint[0] / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").symlink_to(checkpoint[0] / "model.safetensors")
    with pytest.raises(DecoderConfigError, match=message):
        create_decoder(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc2.bias", None, "codec weights lack 'fc2.weight' or 'fc2.bias'"),
        ("fc2.weight", torch.zeros(12, 5), r"project_out.weight' has shape \(28, 4\), but"),
        ("quantizer.quantizers.1.project_out.weight", None, "lack 'quantizer.quantizers.1.proj"),
    ],
)
def test_missing_weights_are_an_error(
    checkpoint: tuple[Path, Any], tmp_path: Path, name: str, tensor: Any, message: str
) -> None:
    tensors = load_file(checkpoint[0] / "model.safetensors")
    del tensors[name]
    save_file(
        tensors if tensor is None else tensors | {name: tensor}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text((checkpoint[0] / "config.json").read_text())
    with pytest.raises(DecoderConfigError, match=message):
        create_decoder(tmp_path)


def test_a_codec_without_weights_is_an_error() -> None:
    with pytest.raises(DecoderConfigError, match=f"codec '{NAME}' needs weights"):
        create_decoder(NAME)
