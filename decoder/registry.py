"""Codec name → class, imported on demand; folder → codec by the `type` in its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from decoder.base import AudioDecoder, DecoderConfigError, DecoderOptions
from decoder.options import parse_options

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_DECODERS = {
    "embedded": "decoder.embedded:EmbeddedDecoder",
    "ramp": "decoder.ramp:RampDecoder",
}


@dataclass(frozen=True, slots=True)
class CodecSource:
    """Where a codec comes from and how it runs: what every codec class's `create` is given.

    `config` is the folder's config.json, empty without a folder. `weights` None means that there
    is no weights file, which only a codec without weights or `test_mode` accepts.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: Path | None = None
    options: DecoderOptions = field(default_factory=DecoderOptions)
    device: str = "cpu"
    test_mode: bool = False


def supported_decoders() -> tuple[str, ...]:
    """Registered names, sorted."""
    return tuple(sorted(_DECODERS))


def create_decoder(
    folder_or_name: str | Path,
    weights: str = "",
    options: Mapping[str, object] | None = None,
    device: str = "cpu",
    *,
    test_mode: bool = False,
) -> AudioDecoder:
    """Build a codec from its folder (config.json, model.safetensors) or a registered name.

    `weights` is a codec folder or a weights file beside its config.json and goes before the
    folder's own; `options` is the audio_decoder_config mapping. `test_mode` lets a codec start
    without weights, on seeded random ones. Raises DecoderConfigError naming what is wrong: an
    unknown name, file or option.
    """
    folder = _find_folder(folder_or_name)
    if folder is None:
        name = str(folder_or_name)
        decoder_class = _load_class(name)
        weights_path = _find_weights(weights, None)
        config = read_json(weights_path.parent / CONFIG_FILE) if weights_path else {}
    else:
        config = read_json(folder / CONFIG_FILE)
        if "type" not in config:
            raise DecoderConfigError(f"{folder / CONFIG_FILE} has no 'type': the codec's name")
        name = str(config["type"])
        decoder_class = _load_class(name)
        weights_path = _find_weights(weights, folder)
    decoder: AudioDecoder = decoder_class.create(
        CodecSource(
            name=name,
            config=config,
            weights=weights_path,
            options=parse_options(options or {}, name, decoder_class.supported_options),
            device=device,
            test_mode=test_mode,
        )
    )
    return decoder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; DecoderConfigError names the file when it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DecoderConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise DecoderConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DecoderConfigError(f"{path} does not hold a JSON object")
    return value


def _load_class(name: str) -> Any:
    if name not in _DECODERS:
        raise DecoderConfigError(
            f"unknown audio decoder '{name}'; supported: {', '.join(supported_decoders())}"
        )
    module_name, class_name = _DECODERS[name].split(":")
    return getattr(import_module(module_name), class_name)


def _find_folder(folder_or_name: str | Path) -> Path | None:
    """The codec folder, or None for a name. A registered name wins over a folder beside us."""
    if str(folder_or_name) in ("", *_DECODERS):
        return None
    path = Path(folder_or_name)
    if path.is_dir():
        return path
    if isinstance(folder_or_name, Path) or len(path.parts) > 1:
        raise DecoderConfigError(f"no codec folder at {path}")
    return None


def _find_weights(weights: str, folder: Path | None) -> Path | None:
    if weights:
        path = Path(weights)
        path = path / WEIGHTS_FILE if path.is_dir() else path
        if not path.is_file():
            raise DecoderConfigError(f"no decoder weights at {path}")
        return path
    own = folder / WEIGHTS_FILE if folder is not None else None
    return own if own is not None and own.is_file() else None
