"""The identity of a codec: its name, sizes and weights, wherever its files are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from decoder import DecoderConfigError, codec_identity, create_decoder
from tests.decoder.small_codecs import write_source_filter


def identity(folder: str | Path, weights: str = "", **options: object) -> str:
    spec = create_decoder(folder, weights, options, test_mode=True).spec
    return codec_identity(folder, weights, spec)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = tmp_path / "codec"
    own.mkdir()
    write_source_filter(own)
    return own


def test_a_copy_is_the_same_codec(folder: Path, tmp_path: Path) -> None:
    found = identity(folder)
    assert len(found) == 64
    shutil.copytree(folder, tmp_path / "copy")
    config = folder / "config.json"
    config.write_text(json.dumps(dict(reversed(json.loads(config.read_text()).items())), indent=4))
    assert identity(folder) == identity(tmp_path / "copy") == found
    weights = str(tmp_path / "copy" / "model.safetensors")
    assert identity("source_filter", weights) == identity(folder, weights) == found
    assert identity(folder, max_batch=2) == found


def test_other_weights_sizes_or_names_are_another_codec(folder: Path) -> None:
    found, path = identity(folder), folder / "model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    save_file(tensors | {name: tensors[name] + 1}, path)
    other = identity(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"ahead": 1}))
    resized = codec_identity(folder, "", create_decoder("ramp").spec)
    names = [codec_identity(name, "", create_decoder("ramp").spec) for name in ("ramp", "snac")]
    assert len({found, other, resized, *names}) == 5


def test_streams_with_fewer_codebooks_have_other_codes() -> None:
    assert identity("mimi", num_codebooks=2) != identity("mimi", num_codebooks=3)


def test_an_unknown_codec_has_no_identity(tmp_path: Path) -> None:
    with pytest.raises(DecoderConfigError, match="unknown audio decoder 'other'"):
        codec_identity("other", "", create_decoder("ramp").spec)
