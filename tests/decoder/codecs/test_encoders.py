"""Encoding of recordings: equality with the published packages, whole frames, errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder import (
    AudioDecoder,
    AudioFormatError,
    EncoderUnavailableError,
    create_decoder,
)
from decoder.pcm.resampling import resample
from tests.decoder.small_codecs import (
    to_safetensors,
    write_dac,
    write_higgs_audio_v2,
    write_mimi,
    write_neucodec,
    write_qwen3_tts_codec,
    write_snac,
    write_xcodec2,
)

WRITERS = {
    "dac": write_dac,
    "higgs_audio_v2_tokenizer": write_higgs_audio_v2,
    "mimi": write_mimi,
    "neucodec": write_neucodec,
    "qwen3_tts_tokenizer_12hz": write_qwen3_tts_codec,
    "snac": write_snac,
    "xcodec2": write_xcodec2,
}
OWN = {"dac", "snac"}  # encoders that need no other package


class Codec(NamedTuple):
    name: str
    folder: Path
    reference: Any
    decoder: AudioDecoder


@pytest.fixture(scope="module", params=sorted(WRITERS))
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder = tmp_path_factory.mktemp(request.param)
    reference = WRITERS[request.param](folder)
    if request.param == "snac":
        to_safetensors(folder)
    return Codec(request.param, folder, reference, create_decoder(folder))


def clip_of(codec: Codec, frames: float) -> np.ndarray:
    """Return a noisy chirp at the codec's rate."""
    count = round(frames * codec.decoder.spec.samples_per_frame)
    t = np.arange(count) / codec.decoder.spec.sample_rate
    noise = np.random.default_rng(0).normal(size=count)
    return (0.3 * np.sin(2 * np.pi * (200 + 300 * t) * t) + 0.05 * noise).astype(np.float32)


@torch.inference_mode()
def reference_codes(codec: Codec, clip: np.ndarray) -> torch.Tensor:
    """Return [codes_per_frame, F] as described in the package's documentation."""
    if codec.name == "snac":
        coarse, middle, fine = codec.reference.encode(torch.from_numpy(clip)[None, None])
        order = (coarse, middle[:, ::2], fine[:, ::4], fine[:, 1::4])
        return torch.cat((*order, middle[:, 1::2], fine[:, 2::4], fine[:, 3::4]))
    if codec.name not in ("neucodec", "xcodec2"):
        return codec.reference.encode(torch.from_numpy(clip)[None, None]).audio_codes[0]
    import transformers

    name = {"xcodec2": "Xcodec2", "neucodec": "NeuCodec"}[codec.name]
    features = getattr(transformers, f"{name}FeatureExtractor")()
    if codec.name == "neucodec":
        clip = resample(clip, 24_000, 16_000)
    inputs = features(clip, sampling_rate=16_000, return_tensors="pt")
    return codec.reference.encode(**inputs).audio_codes[0]


def test_codes_equal_the_reference(codec) -> None:
    spec = codec.decoder.spec
    assert spec.can_encode
    clip = clip_of(codec, 40)
    codes = codec.decoder.encode(clip)
    assert len(codes) == 40 * spec.codes_per_frame
    rows = torch.tensor(codes).view(40, -1).T
    assert torch.equal(rows, reference_codes(codec, clip)[:, :40])
    assert len(set(codes)) > 1


@pytest.mark.parametrize("frames", [12.5, 13.01])
def test_a_part_of_a_frame_is_a_frame(codec, frames) -> None:
    codes = codec.decoder.encode(clip_of(codec, frames))
    assert len(codes) == int(np.ceil(frames)) * codec.decoder.spec.codes_per_frame
    assert all(0 <= code < codec.decoder.spec.codebook_size for code in codes)


def test_encoded_recordings_can_be_decoded(codec) -> None:
    from tests.decoder.small_codecs import audio_of

    codes = codec.decoder.encode(clip_of(codec, 20))
    assert len(audio_of(codec.decoder, list(codes))) == 20 * codec.decoder.spec.samples_per_frame


def test_chosen_codebooks_are_the_first_ones(codec) -> None:
    if codec.name not in ("dac", "mimi"):
        pytest.skip("one codebook")
    two = create_decoder(codec.folder, options={"num_codebooks": 2})
    clip = clip_of(codec, 10)
    every = np.array(codec.decoder.encode(clip)).reshape(10, -1)
    assert np.array_equal(np.array(two.encode(clip)).reshape(10, 2), every[:, :2])


@pytest.mark.parametrize("clip", [np.zeros(0), np.zeros((2, 9)), np.array([0.0, np.nan])])
def test_clips_that_are_none(codec, clip) -> None:
    with pytest.raises(AudioFormatError):
        codec.decoder.encode(clip)


def test_a_folder_without_an_encoder_is_an_error(codec, tmp_path) -> None:
    tensors = load_file(codec.folder / "model.safetensors")
    dropped = ("encoder", "acoustic_encoder", "semantic", "downsample", "fc_encoder")
    kept = {name: t for name, t in tensors.items() if not name.startswith(dropped)}
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((codec.folder / "config.json").read_text())
    decoder = create_decoder(tmp_path)
    assert not decoder.spec.can_encode
    with pytest.raises(EncoderUnavailableError, match=f"codec '{codec.name}' holds no encoder"):
        decoder.encode(np.zeros(100))


def test_a_pickle_is_encoded_from_too(tmp_path) -> None:
    write_snac(tmp_path)
    decoder = create_decoder(tmp_path, allow_pickle=True)
    assert decoder.spec.can_encode
    assert len(decoder.encode(np.zeros(3000))) == 14


def test_a_codec_without_files_has_no_encoder() -> None:
    decoder = create_decoder("snac", test_mode=True)
    assert not decoder.spec.can_encode
    with pytest.raises(EncoderUnavailableError, match="codec 'snac' holds no encoder"):
        decoder.encode(np.zeros(100))


@pytest.mark.parametrize(
    "changes", [{"depthwise": False}, {"encoder_rates": [2, 5, 4], "decoder_rates": [4, 5, 2]}]
)
def test_variants_of_the_own_encoder_equal_the_reference(tmp_path, changes) -> None:
    reference = write_snac(tmp_path, **changes)
    decoder = create_decoder(tmp_path, allow_pickle=True)
    codec = Codec("snac", tmp_path, reference, decoder)
    clip = clip_of(codec, 9)
    rows = torch.tensor(decoder.encode(clip)).view(9, 7).T
    assert torch.equal(rows, reference_codes(codec, clip))


def test_encoding_names_the_missing_package(codec, monkeypatch) -> None:
    monkeypatch.setattr("decoder.encoders.find_spec", lambda name: None)
    decoder = create_decoder(codec.folder)
    if codec.name in OWN:
        assert decoder.encode(clip_of(codec, 5))
        return
    with pytest.raises(
        EncoderUnavailableError, match=r"needs the transformers package: pip install"
    ):
        decoder.encode(clip_of(codec, 5))


def test_only_an_encoder_imports_transformers(tmp_path) -> None:
    """Decode from a folder in a separate process."""
    write_mimi(tmp_path)
    code = f"""
import sys
from decoder import create_decoder
from tests.decoder.small_codecs import audio_of
audio_of(create_decoder({str(tmp_path)!r}), [0] * 8)
print("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
