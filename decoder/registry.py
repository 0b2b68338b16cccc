"""Registry of codecs: name to class, imported on demand; folder to codec by its config.json.

Our own folders have `type`, Hugging Face's `model_type`; SNAC's published config.json has neither
and is recognised by its `vq_strides`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from decoder.base import (
    AudioDecoder,
    DecoderConfigError,
    DecoderOptions,
    SpeakerEncoder,
    StreamingOptions,
)
from decoder.cuda.devices import on_device
from decoder.options import parse_options

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PICKLE_FILE = "pytorch_model.bin"
INDEX_FILE = "model.safetensors.index.json"
NESTED_CONFIG, NESTED_PREFIX = "codec_config", "codec_model."
"""Key and prefix of a codec in a language model's config.json and weights, as in CSM."""
GPU_MAX_BATCH = 32  # windows of a decode call, unless `max_batch` is given
STREAMS = 512  # streams at once whose states have memory in advance, unless a number is given

_DECODERS = {
    "dac": "decoder.codecs.dac:DacDecoder",
    "embedded": "decoder.codecs.embedded.decoder:EmbeddedDecoder",
    "higgs_audio_v2_tokenizer": "decoder.codecs.higgs_audio_v2:HiggsAudioV2Decoder",
    "mimi": "decoder.codecs.mimi.decoder:MimiDecoder",
    "nanocodec": "decoder.codecs.nanocodec.decoder:NanoCodecDecoder",
    "neucodec": "decoder.codecs.xcodec2.decoder:Xcodec2Decoder",
    "qwen3_tts_tokenizer_12hz": "decoder.codecs.qwen3_tts.decoder:Qwen3TTSDecoder",
    "ramp": "decoder.codecs.ramp:RampDecoder",
    "snac": "decoder.codecs.snac:SnacDecoder",
    "source_filter": "decoder.codecs.source_filter.decoder:SourceFilterDecoder",
    "xcodec2": "decoder.codecs.xcodec2.decoder:Xcodec2Decoder",
}


_SPEAKER_ENCODER = "decoder.codecs.qwen3_tts.speaker_encoder:Qwen3TTSSpeakerEncoder"


@dataclass(frozen=True, slots=True)
class DecoderArchitecture:
    """A codec of a plug-in: its name, and "module:Class", imported when one is created."""

    name: str
    decoder: str

    def __post_init__(self) -> None:
        module, found, class_name = self.decoder.partition(":")
        if not (self.name and module and found and class_name):
            raise DecoderConfigError(
                f"audio decoder '{self.name}': decoder='{self.decoder}' is no module:Class"
            )


def register_decoder(architecture: DecoderArchitecture) -> None:
    """Add a codec to this process; one of the same name is replaced."""
    _DECODERS[architecture.name] = architecture.decoder


@dataclass(frozen=True, slots=True)
class CodecSource:
    """Files and options of a codec: the argument of every codec class's `create`.

    `config` is the folder's config.json, empty without a folder. `weights` None means that there is
    no weights file, which is only valid for a codec without weights or in `test_mode`; it may be
    the index of several files. In a language model's weights the codec's names have a `prefix`.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: Path | None = None
    prefix: str = ""
    options: DecoderOptions = field(default_factory=DecoderOptions)
    device: str = "cpu"
    test_mode: bool = False
    allow_pickle: bool = False


def supported_decoders() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_DECODERS))


def create_decoder(
    folder_or_name: str | Path,
    weights: str = "",
    options: Mapping[str, object] | None = None,
    device: str = "cpu",
    *,
    test_mode: bool = False,
    allow_pickle: bool = False,
) -> AudioDecoder:
    """Create a codec from its folder (config.json, model.safetensors) or a registered name.

    `weights` is a codec folder or a weights file next to its config.json and takes precedence over
    the folder's own; `options` is the audio_decoder_config mapping. `test_mode` lets a codec start
    without weights, with seeded random ones; `allow_pickle` reads weights that are published as a
    pickle, without running code from it. Raises DecoderConfigError naming an unknown name, file or
    option.
    """
    files = find_files(folder_or_name, weights)
    decoder_class = _load_class(files.name)
    checked = parse_options(options or {}, files.name, decoder_class.supported_options)
    if _is_gpu(device) and "max_batch" not in (options or {}):
        checked = replace(checked, max_batch=GPU_MAX_BATCH)
    source = CodecSource(
        name=files.name,
        config=files.config,
        weights=files.weights,
        prefix=files.prefix,
        options=checked,
        device=device,
        test_mode=test_mode,
        allow_pickle=allow_pickle,
    )
    with on_device(device):
        decoder: AudioDecoder = decoder_class.create(source)
    return decoder


def create_speaker_encoder(folder: Path, device: str = "cpu") -> SpeakerEncoder:
    """Create the speaker encoder in a language model's folder: that of Qwen3-TTS Base.

    Raises DecoderConfigError naming a tensor that is missing, or a key that is invalid.
    """
    module, _, class_name = _SPEAKER_ENCODER.partition(":")
    with on_device(device):
        encoder: SpeakerEncoder = getattr(import_module(module), class_name).load(folder, device)
    return encoder


class CodecFiles(NamedTuple):
    """Name, config.json and weights of a codec, as in `CodecSource`."""

    name: str
    config: Mapping[str, Any]
    weights: Path | None
    prefix: str = ""


def find_files(folder_or_name: str | Path, weights: str = "") -> CodecFiles:
    """Return what `create_decoder` reads. Raises its errors for unknown names and files."""
    folder = _find_folder(folder_or_name)
    if folder is None:
        name = str(folder_or_name)
        _check_name(name)
        path = _find_weights(weights, None)
        return CodecFiles(name, _adjacent_config(path), path)
    config, prefix = read_json(folder / CONFIG_FILE), ""
    own = _find_weights(weights, folder)
    if isinstance(config.get(NESTED_CONFIG), dict):  # a language model that contains its codec
        prefix, own = NESTED_PREFIX, own if weights else shared_weights(folder, config)
        config = config[NESTED_CONFIG]
    name = _name_in(config, folder / CONFIG_FILE)
    _check_name(name)
    return CodecFiles(name, config, own, prefix)


def _is_gpu(device: str) -> bool:
    return device.startswith("cuda")


def with_graphs(
    decoder: AudioDecoder, options: StreamingOptions, num_streams: int | None = None
) -> AudioDecoder:
    """Capture a decoder's usual calls for streams of `options` as graphs on a GPU.

    Memory for the states of `num_streams` streams at once (None: `STREAMS`) is allocated with them,
    up to an eighth of the free memory. Elsewhere returns the decoder itself. Takes seconds, during
    which the device must have no other work.
    """
    if not _is_gpu(decoder.device):
        return decoder
    from decoder.cuda.graphs import CapturedDecoder, CudaRecorder, schedule_windows
    from decoder.cuda.padded_graphs import PaddedGraphs
    from decoder.cuda.state_graphs import StateGraphs, num_states
    from decoder.kept_states import StatefulNetwork
    from decoder.window_inputs import PaddedNetwork, WindowNetwork

    has_states = decoder.spec.keeps_state
    if not isinstance(decoder, StatefulNetwork if has_states else WindowNetwork):
        return decoder
    with on_device(decoder.device):
        record = CudaRecorder(decoder.device)
        if has_states and isinstance(decoder, StatefulNetwork):
            states = StateGraphs(decoder, record, num_states(decoder, num_streams or STREAMS))
            states.capture_schedule(options)
            return states
        if isinstance(decoder, PaddedNetwork):
            padded = PaddedGraphs(decoder, record)
            padded.capture_schedule(options)
            return padded
        result = CapturedDecoder(decoder, record)
        result.capture(schedule_windows(decoder, options))
        return result


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; DecoderConfigError names a file that cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DecoderConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DecoderConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DecoderConfigError(f"{path} does not hold a JSON object")
    return value


def _adjacent_config(weights: Path | None) -> dict[str, Any]:
    """Return the config.json next to a weights file; empty for a named codec without one."""
    path = weights.parent / CONFIG_FILE if weights else None
    return read_json(path) if path is not None and path.is_file() else {}


def _name_in(config: Mapping[str, Any], path: Path) -> str:
    for key in ("type", "model_type"):
        if key in config:
            return str(config[key])
    if "vq_strides" in config:
        return "snac"
    raise DecoderConfigError(f"{path} has no 'type': the codec's name")


def _check_name(name: str) -> None:
    if name not in _DECODERS:
        raise DecoderConfigError(
            f"unknown audio decoder '{name}'; supported: {', '.join(supported_decoders())}"
        )


def _load_class(name: str) -> Any:
    module_name, class_name = _DECODERS[name].split(":")
    return getattr(import_module(module_name), class_name)


def _find_folder(folder_or_name: str | Path) -> Path | None:
    """Return the codec folder, or None for a name. A registered name takes precedence over a
    folder.
    """
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
        found = _weights_in(path) if path.is_dir() else path
        if found is None or not found.is_file():
            raise DecoderConfigError(f"no decoder weights at {path}")
        return found
    return _weights_in(folder) if folder is not None else None


def shared_weights(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """Return the file, or the index of the files, of a language model's weights."""
    named = Path(str(config.get("transformers_weights") or "")).name
    files = (folder / name for name in (named, WEIGHTS_FILE, INDEX_FILE) if name)
    return next((path for path in files if path.is_file()), None)


def _weights_in(folder: Path) -> Path | None:
    """Return the folder's weights file; the pickle only if there are no safetensors."""
    files = (folder / name for name in (WEIGHTS_FILE, PICKLE_FILE))
    return next((path for path in files if path.is_file()), None)
