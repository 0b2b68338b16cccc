"""Encoding of recordings with transformers, which has the encoders of the codecs it publishes.

It is not needed for synthesis: the package is an extra, imported and loaded at the first `encode`
of a process. It reads the decoder's folder, safetensors only, and runs no code from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoder.base import CodecSpec, EncoderUnavailableError
from decoder.clips import whole_frames
from decoder.cuda.devices import own_stream
from decoder.pcm.resampling import resample
from decoder.registry import WEIGHTS_FILE, CodecSource
from decoder.weights import read_tensors, tensor_names


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """A codec's classes in transformers, and the parts that only decoding uses."""

    model: str
    decoder: str
    features: str = ""


_PARTS = {
    "xcodec2": EncoderParts("Xcodec2Model", "acoustic_decoder", "Xcodec2FeatureExtractor"),
    "neucodec": EncoderParts("NeuCodecModel", "acoustic_decoder", "NeuCodecFeatureExtractor"),
    "mimi": EncoderParts("MimiModel", "decoder"),
    "higgs_audio_v2_tokenizer": EncoderParts("HiggsAudioV2TokenizerModel", "acoustic_decoder"),
}
_ENCODERS = ("encoder.", "acoustic_encoder.")
_DECODING = ("decoder", "upsample")
"""Beginnings of Mimi's names that only decoding uses; an encoder alone lacks them."""


def can_encode(source: CodecSource) -> bool:
    """Whether the codec's folder has an encoder that can be loaded."""
    weights, prefix = source.weights, source.prefix
    is_own = bool(prefix) or (weights is not None and weights.name == WEIGHTS_FILE)
    if weights is None or (source.name in _PARTS and not is_own):
        return False
    names = tensor_names(weights, allow_pickle=source.allow_pickle)
    return any(name.startswith(tuple(prefix + part for part in _ENCODERS)) for name in names)


class TransformersEncoder:
    """The encoder of one codec folder, loaded at its first use."""

    def __init__(self, source: CodecSource, spec: CodecSpec, input_rate: int) -> None:
        self._source = source
        self._spec = spec
        self._input_rate = input_rate
        self._on_stream = own_stream(source.device)
        self._model: Any = None
        self._features: Any = None

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """Encode mono float32 [S] at the codec's rate to the flat codes of ceil(S / hop) frames.

        Raises AudioFormatError as `whole_frames` does; EncoderUnavailableError without an encoder
        or the transformers package.
        """
        clip = whole_frames(samples, self._spec)
        num_frames = len(clip) // int(self._spec.samples_per_frame)
        if not self._spec.can_encode:
            raise EncoderUnavailableError(
                f"the folder of codec '{self._spec.name}' holds no encoder"
            )
        if self._input_rate != self._spec.sample_rate:
            clip = resample(clip, self._spec.sample_rate, self._input_rate)
        with self._on_stream():
            if self._model is None:
                self._load()
            with torch.inference_mode():
                codes = self._codes(clip)[0]  # [K, F]
            wanted = codes[: self._spec.num_codebooks, :num_frames]
            return tuple(wanted.T.flatten().tolist())

    def _codes(self, clip: np.ndarray) -> Tensor:
        """Return int64 [1, K, F]."""
        device = self._source.device
        if self._features is None:
            output = self._model.encode(torch.from_numpy(clip).to(device)[None, None])
        else:
            inputs = self._features(clip, sampling_rate=self._input_rate, return_tensors="pt")
            output = self._model.encode(**inputs.to(device))
        codes: Tensor = output.audio_codes
        return codes

    def _load(self) -> None:
        name, folder = self._spec.name, _folder(self._source)
        parts = _PARTS[self._source.name]
        if find_spec("transformers") is None:
            raise EncoderUnavailableError(
                f"encoding recordings with codec '{name}' needs the transformers package: "
                "pip install 'sonant[hub]'"
            )
        transformers = import_module("transformers")
        try:
            model_class = getattr(transformers, parts.model)
            model = self._own_part(transformers, model_class) or model_class.from_pretrained(
                folder, use_safetensors=True, local_files_only=True
            )
            features = getattr(transformers, parts.features) if parts.features else None
            self._features = _load_features(features, folder) if features else None
        except (OSError, ValueError, RuntimeError) as error:
            raise EncoderUnavailableError(
                f"cannot load the encoder of {folder}: {error}"
            ) from error
        setattr(model, parts.decoder, None)  # decoding does not use it; frees its memory
        self._model = model.to(self._source.device).eval()

    def _own_part(self, transformers: Any, model_class: Any) -> Any:
        """Return the model of a codec that is a part of its files; None for a codec's own folder.

        Raises ValueError for a missing tensor of the encoder.
        """
        source, prefix = self._source, self._source.prefix
        if not prefix or source.weights is None:
            return None
        keys = {key: value for key, value in source.config.items() if key != "model_type"}
        tensors = read_tensors(source.weights, lambda name: name.startswith(prefix))
        own = {name.removeprefix(prefix): tensor.float() for name, tensor in tensors.items()}
        with _without_warnings(transformers), torch.random.fork_rng(devices=[]):
            model, report = model_class.from_pretrained(
                None,
                config=transformers.AutoConfig.for_model(source.name, **keys),
                state_dict=own,
                output_loading_info=True,
            )
        missing = [name for name in report["missing_keys"] if not name.startswith(_DECODING)]
        if missing:
            raise ValueError(f"it lacks '{min(missing)}'")
        return model


@contextmanager
def _without_warnings(transformers: Any) -> Iterator[None]:
    """Keep transformers from warning of parts that the files do not have."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _load_features(features: Any, folder: Path) -> Any:
    has_own = (folder / "preprocessor_config.json").is_file()
    return features.from_pretrained(folder, local_files_only=True) if has_own else features()


def _folder(source: CodecSource) -> Path:
    if source.weights is None:
        raise EncoderUnavailableError(
            f"codec '{source.name}' has no folder to read its encoder from"
        )
    return source.weights.parent
