"""Published codec folders: pickles only if allowed, no unused tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder import DecoderConfigError, create_decoder
from decoder.weights import fold_weight_norm, layer_of, read_tensors
from tests.decoder.small_codecs import audio_of, random_codes, to_safetensors, write_dac, write_snac


@pytest.fixture(scope="module")
def dac_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dac")
    write_dac(folder)
    return folder


def rewritten(source: Path, target: Path, change: Callable[[dict], None]) -> Path:
    """Return a copy of a folder with changed tensors."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


def test_a_pickle_needs_permission_and_the_error_has_the_conversion(tmp_path) -> None:
    write_snac(tmp_path)
    message = r"is a pickle.* --allow-pickle, or convert it once with: python -c"
    with pytest.raises(DecoderConfigError, match=message):
        create_decoder(tmp_path)
    allowed = create_decoder(tmp_path, allow_pickle=True)
    to_safetensors(tmp_path)
    converted = create_decoder(tmp_path)
    codes = random_codes(allowed, 2)
    assert (audio_of(allowed, codes) == audio_of(converted, codes)).all()


class Surprise:
    """An object that runs a function when it is unpickled."""

    def __reduce__(self) -> tuple:
        return print, ("ran",)


def test_a_pickle_never_runs_code(tmp_path, capsys) -> None:
    write_snac(tmp_path)
    torch.save({"decoder.model.0.bias": Surprise()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DecoderConfigError, match="cannot read codec weights"):
        create_decoder(tmp_path, allow_pickle=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_a_broken_file(tmp_path, content) -> None:
    write_snac(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(DecoderConfigError, match="cannot read codec weights"):
        create_decoder(tmp_path, allow_pickle=True)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DecoderConfigError, match="cannot read codec weights"):
        create_decoder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("decoder.conv2.bias"), "lack 'decoder.conv2.bias'"),
        (
            lambda t: t.update({"decoder.conv2.scale": torch.ones(1)}),
            r"unknown tensor 'decoder\.conv2\.scale'",
        ),
        (
            lambda t: t.update({"decoder.snake1.alpha": torch.ones(1, 3, 1)}),
            r"snake1\.alpha' has shape \(1, 3, 1\), but the configuration gives \(1, 2, 1\)",
        ),
    ],
)
def test_every_tensor_is_accounted_for(tmp_path, dac_folder, change, message) -> None:
    with pytest.raises(DecoderConfigError, match=message):
        create_decoder(rewritten(dac_folder, tmp_path, change))


def test_half_precision_is_read_as_single(tmp_path, dac_folder) -> None:
    halve = lambda t: t.update({k: v.half() for k, v in t.items()})  # noqa: E731
    decoder = create_decoder(rewritten(dac_folder, tmp_path, halve))
    assert audio_of(decoder, random_codes(decoder, 2)).dtype == "float32"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("codebook_size", 0, "codebook_size is 0 but must be a positive whole number"),
        ("downsampling_ratios", [], r"downsampling_ratios is \[\] but must be a list"),
        ("downsampling_ratios", [2, 2.5], "must be a list of positive whole numbers"),
        ("sampling_rate", "fast", "sampling_rate is 'fast'"),
    ],
)
def test_sizes_are_checked(tmp_path, key, value, message) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dac", key: value}))
    with pytest.raises(DecoderConfigError, match=message):
        create_decoder(tmp_path, test_mode=True)


@pytest.mark.parametrize("name", ["snac", "dac"])
def test_no_weights_no_codec(name) -> None:
    with pytest.raises(DecoderConfigError, match=f"codec '{name}' needs weights"):
        create_decoder(name)


@pytest.mark.parametrize("transposed", [False, True])
def test_weight_norm_is_folded_as_pytorch_does(transposed) -> None:
    torch.manual_seed(0)
    plain = (torch.nn.ConvTranspose1d if transposed else torch.nn.Conv1d)(3, 4, 5)
    normed = torch.nn.utils.parametrizations.weight_norm(plain)
    with torch.no_grad():
        normed.parametrizations.weight.original0.mul_(1.5)
    new = {f"a.{name}": tensor for name, tensor in normed.state_dict().items()}
    old = {
        "a.bias": new["a.bias"],
        "a.weight_g": new["a.parametrizations.weight.original0"],
        "a.weight_v": new["a.parametrizations.weight.original1"],
    }
    for tensors in (new, old):
        assert {layer_of(name) for name in tensors} == {"a"}
        folded = fold_weight_norm(tensors)
        assert sorted(folded) == ["a.bias", "a.weight"]
        assert torch.allclose(folded["a.weight"], normed.weight)


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "weights.bin", 3])
def test_an_index_names_safetensors_files(tmp_path: Path, file: object) -> None:
    """One that names itself would be read without end."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(DecoderConfigError, match=r"cannot read .*index\.json"):
        read_tensors(index, lambda _: True)
