"""`AudioGenerationConfig`: the core's configuration and the audio side's, and its sources.

Sources in their order: flags, file, environment (`SONANT_MAX_LENGTH`, `SONANT_MODEL__MODEL_PATH`),
the program's own values, defaults of the fields.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, ValidationError, field_validator

from decoder import (
    DecoderArchitecture,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
    register_decoder,
    supported_decoders,
)
from llm import ConfigError, PipelineConfig, StrictModel
from tts.checkpoint.hub import HubOptions
from tts.config.environment import process_environment
from tts.config.packages import check_packages
from tts.config.server import ServerConfig
from tts.config.sources import flag_values, nested_values, walk_fields

__all__ = [
    "AudioGenerationConfig",
    "PrependPromptSpeechTokens",
    "PrometheusMetricsMode",
    "ServerConfig",
    "config_from_args",
    "describe_error",
    "hub_options",
    "load_config",
    "streaming_options",
]

ENVIRONMENT_PREFIX = "SONANT_"

AUDIO_FLAGS = (
    "audio_decoder",
    "audio_decoder_weights",
    "chunk_size",
    "buffer",
    "block_causal",
    "prepend_prompt_speech_tokens",
    "prepend_prompt_speech_tokens_causal",
    "run_model_test_mode",
    "prometheus_metrics_mode",
)
BOOLEAN_FLAGS = ("block_causal", "prepend_prompt_speech_tokens_causal", "run_model_test_mode")

AUTO_DECODER = "auto"
"""Value of `audio_decoder` for the checkpoint's own codec."""

NumCodes = Annotated[int, Field(gt=0, strict=True)]


class PrometheusMetricsMode(StrEnum):
    """The process that exposes the metrics."""

    INSTRUMENT_ONLY = "instrument_only"  # the embedding program, through the client library
    LAUNCH_SERVER = "launch_server"  # this process, over HTTP
    LAUNCH_MULTIPROC_SERVER = "launch_multiproc_server"  # the same for several processes


class AudioGenerationConfig(PipelineConfig):
    """The core's configuration, the codec, and the size and context of audio blocks.

    The audio fields may be given positionally, in their order.
    """

    SECTION: ClassVar[str] = "audio_generation_config"
    TASK: ClassVar[str] = "audio generation"

    audio_decoder: str = Field(
        min_length=1,
        description="codec by name or folder (default: the checkpoint's own)",
    )
    audio_decoder_weights: str = Field(
        default="", description="weights file of the codec (default: its own)"
    )
    chunk_size: list[NumCodes] | None = Field(
        default=None,
        min_length=1,
        description="speech tokens per audio block; the last size repeats (default: the codec's "
        "choice)",
    )
    buffer: int = Field(
        default=0,
        ge=0,
        description="earlier speech tokens decoded again with each block (default: the codec's "
        "choice)",
    )
    block_causal: bool = Field(
        default=False,
        description="earlier speech tokens do not attend to the current block "
        "(default: the codec's choice)",
    )
    prepend_prompt_speech_tokens: PrependPromptSpeechTokens = Field(
        default=PrependPromptSpeechTokens.NEVER,
        description="decode the voice prompt's speech tokens never, with the first block (once) or "
        "with every block (rolling) (default: the codec's choice)",
    )
    prepend_prompt_speech_tokens_causal: bool = Field(
        default=False,
        description="voice prompt tokens do not attend to the current block (default: the codec's "
        "choice)",
    )
    run_model_test_mode: bool = Field(
        default=False, description="run without weight files, on seeded random weights"
    )
    prometheus_metrics_mode: PrometheusMetricsMode = Field(
        default=PrometheusMetricsMode.INSTRUMENT_ONLY,
        description="process that exposes metrics: the embedding program (instrument_only), this "
        "process (launch_server) or one for several front ends "
        "(launch_multiproc_server)",
    )
    audio_decoder_config: dict[str, Any] = Field(
        default_factory=dict, description="options of the codec"
    )
    pace_streams: bool = Field(
        default=False,
        description="share a GPU among many streams by the deadlines of their listeners",
    )
    watermark: bool = Field(
        default=False, description="mark all audio as generated (extra watermark)"
    )
    lexicon: list[str] = Field(
        default_factory=list, description="file of pronunciations; give the flag again for more"
    )
    offline: bool = Field(default=False, description="download nothing; use earlier downloads")
    family: str = Field(
        default="", description="speech family of the checkpoint (default: by its files)"
    )

    def __init__(self, *audio_values: Any, **values: Any) -> None:
        if len(audio_values) > len(AUDIO_FLAGS):
            raise TypeError(f"at most {len(AUDIO_FLAGS)} positional values, the audio fields")
        positional = dict(zip(AUDIO_FLAGS, audio_values, strict=False))
        twice = positional.keys() & values.keys()
        if twice:
            raise TypeError(f"given by position and by keyword: {', '.join(sorted(twice))}")
        super().__init__(**positional, **values)

    @field_validator("chunk_size", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return [value]
        if isinstance(value, str):
            return _comma_ints(value)
        if isinstance(value, list):
            return [_comma_ints(v)[0] if isinstance(v, str) else v for v in value]
        return value

    @field_validator("lexicon", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        given = [value] if isinstance(value, str | Path) else value
        return list(map(str, given)) if isinstance(given, list | tuple) else given

    @classmethod
    def from_flags(
        cls, audio_flags: Mapping[str, str], **config_flags: Any
    ) -> AudioGenerationConfig:
        """Build from the texts of the audio flags, and any other fields as keywords.

        Raises `ValueError` with the flag and its text; unknown flags are listed.
        """
        leftover = sorted(set(audio_flags) - set(AUDIO_FLAGS))
        if leftover:
            raise ConfigError(f"unknown audio flags: {', '.join(leftover)}")
        if not audio_flags.get("audio_decoder"):
            raise ConfigError("audio_decoder is required: a decoder name or a codec's folder")
        values = {name: _flag_value(name, text) for name, text in audio_flags.items()}
        return cls(**values, **config_flags)

    @property
    def is_test_mode(self) -> bool:
        """`run_model_test_mode`, under the name that the core uses."""
        return self.run_model_test_mode

    @classmethod
    def take_plugin(cls, entry: object) -> bool:
        """Register an audio decoder, or an entry that the core accepts."""
        if isinstance(entry, DecoderArchitecture):
            register_decoder(entry)
            return True
        return super().take_plugin(entry)

    def resolve_own(self) -> None:
        """Check that the decoder, its weights file, lexicons and the watermark's packages exist."""
        known = (AUTO_DECODER, *supported_decoders())
        if self.audio_decoder not in known and not Path(self.audio_decoder).is_dir():
            raise ConfigError(
                f"audio_decoder={self.audio_decoder} is neither a codec's folder nor one of: "
                + ", ".join(known)
            )
        if self.audio_decoder_weights and not Path(self.audio_decoder_weights).is_file():
            raise ConfigError(f"audio_decoder_weights={self.audio_decoder_weights} is not a file")
        for lexicon in self.lexicon:
            if not Path(lexicon).is_file():
                raise ConfigError(f"lexicon={lexicon} is not a file")
        if self.watermark:
            check_packages("watermark", "watermark", ("perth", "librosa"))


CONFIG_CLASSES: tuple[type[StrictModel], ...] = (AudioGenerationConfig, ServerConfig)
ConfigT = TypeVar("ConfigT", bound=StrictModel)
Completion = Callable[[dict[str, Any]], dict[str, Any]]


def streaming_options(
    config: AudioGenerationConfig, recommended: StreamingOptions | None = None
) -> StreamingOptions:
    """Return the default size and context of audio blocks.

    Fields that are not set come from `recommended`, the codec's own choice, if it is given.
    """
    own = StreamingOptions(
        chunk_sizes=None if config.chunk_size is None else tuple(config.chunk_size),
        buffer=config.buffer,
        masks=MaskPolicy(config.block_causal, config.prepend_prompt_speech_tokens_causal),
        prepend=config.prepend_prompt_speech_tokens,
    )
    if recommended is None:
        return own

    def chosen(field: str) -> StreamingOptions:
        return own if field in config.model_fields_set else recommended

    return replace(
        recommended,
        chunk_sizes=chosen("chunk_size").chunk_sizes,
        buffer=chosen("buffer").buffer,
        masks=MaskPolicy(
            chosen("block_causal").masks.block_causal,
            chosen("prepend_prompt_speech_tokens_causal").masks.prepend_prompt_speech_tokens_causal,
        ),
        prepend=chosen("prepend_prompt_speech_tokens").prepend,
    )


def hub_options(
    config: AudioGenerationConfig, environ: Mapping[str, str] | None = None
) -> HubOptions:
    """Return how to reach the hub: by the configuration and the hub's variables (HF_TOKEN, …)."""
    options = HubOptions(config.model.huggingface_revision, config.offline, config.allow_pickle)
    return options.with_environment(process_environment() if environ is None else environ)


def load_config(
    model_class: type[ConfigT],
    flags: Mapping[str, Any],
    *,
    config_file: str | None = None,
    environ: Mapping[str, str] | None = None,
    base: Mapping[str, Any] | Completion | None = None,
) -> ConfigT:
    """Build a configuration from its layers: `flags` > file > `environ` > `base` > defaults.

    `base` may be a function from all given values to the values to use. Raises pydantic's
    `ValidationError` (a field), `ConfigError` (the whole, the file, an unknown variable) or
    `FileNotFoundError`.
    """
    from_environ = environment_values(
        model_class, process_environment() if environ is None else environ
    )
    path = flags.get("config_file") or config_file or from_environ.get("config_file")
    section = flags.get("section_name") or from_environ.get("section_name")
    from_file = _file_values(model_class, path, section) if path else {}
    if callable(base):
        values = base(StrictModel.merged(from_environ, from_file, flags))
    else:
        values = StrictModel.merged(base or {}, from_environ, from_file, flags)
    try:
        return model_class(**values)
    except UnicodeEncodeError as error:  # a lone surrogate, from JSON or a variable
        raise ConfigError(f"this is not Unicode text: {error.object!r}") from error


def config_from_args(
    model_class: type[ConfigT],
    args: argparse.Namespace,
    *,
    environ: Mapping[str, str] | None = None,
    base: Mapping[str, Any] | Completion | None = None,
) -> ConfigT:
    """Build a configuration from arguments parsed by a parser with `add_config_flags`."""
    return load_config(
        model_class,
        flag_values(args, model_class),
        config_file=getattr(args, "config_file", None),
        environ=environ,
        base=base,
    )


def environment_values(
    model_class: type[StrictModel], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of the `SONANT_…` variables of a class, nested by section.

    Raises `ConfigError` for a variable that is not a field of any configuration class.
    """
    known = {_variable(name) for cls in CONFIG_CLASSES for name, _ in walk_fields(cls)}
    for variable in environ:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known:
            raise ConfigError(StrictModel.unknown_key(variable, known))
    texts = {name: environ.get(_variable(name)) for name, _ in walk_fields(model_class)}
    given = {name: text for name, text in texts.items() if text is not None}
    return nested_values(model_class, given)


def describe_error(error: ValidationError) -> str:
    """Return a validation error in one line: each field and its problem."""
    return "; ".join(_describe_item(item["loc"], item["msg"]) for item in error.errors())


def _describe_item(location: tuple[int | str, ...], message: str) -> str:
    name = ".".join(str(part) for part in location)
    message = message.removeprefix("Value error, ")
    return f"{name}: {message}" if name else message


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.replace(".", "__").upper()


def _file_values(model_class: type[StrictModel], path: str, section: str | None) -> dict[str, Any]:
    """Read a file; `section_name` is the pipeline's section, the server's own may be absent."""
    if issubclass(model_class, PipelineConfig):
        return model_class.values_from_file(path, section)
    try:
        return model_class.values_from_file(path, model_class.SECTION)
    except ConfigError:
        return {}


def _comma_ints(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"'{text}' is not a list of whole numbers such as 8,16") from None


def _flag_value(name: str, text: str) -> Any:
    if name in BOOLEAN_FLAGS:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{name}={text} must be true or false")
        return text.lower() == "true"
    if name == "buffer":
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{name}={text} must be a whole number") from None
    return text
