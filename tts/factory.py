"""Composition root: the only module that names concrete models, codecs and backends.

    checkpoint folder ─▶ create_engine ──┐
    codec folder ─────▶ create_decoder ──┴─▶ LocalEngineClient ═▶ Synthesizer
                                                               ╚▶ text requests
                       create_engine_client   ═ may be a hop     connect_service

Everything heavy is imported inside the functions, so that a command which only parses its
arguments does not pay for torch.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoder import AudioEncoding
from llm import CheckpointError, SamplingParams
from tts.checkpoint import (
    SpeechDescription,
    load_description,
    load_eos_ids,
    load_sampling_defaults,
    read_json,
)
from tts.engine_client import EngineFacts

if TYPE_CHECKING:
    from decoder import AudioDecoder, CodecSpec, PromptAudioLimits
    from tts.config import AudioGenerationConfig, ServerConfig
    from tts.engine_client import EngineClient
    from tts.prompt import PromptBuilder
    from tts.speech_engine import LocalEngineClient
    from tts.synthesizer import SynthesisSettings, Synthesizer

logger = logging.getLogger(__name__)

MAX_CPU_THREADS = 4
READER_PATIENCE = 6
"""A block goes out as many messages. Each of them is timed where it is written; a whole block may
take this many times as long before its stream is given up."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """What a text request needs to know about the model. Lengths in tokens."""

    sampling: SamplingParams  # how a token is chosen unless the request says otherwise
    stop_token_ids: tuple[int, ...]
    max_seq_len: int
    takes_schemas: bool = False  # structured output is on


@dataclass(frozen=True, slots=True)
class Service:
    """One served model: everything a front end needs. `synthesizer` None: it only writes text."""

    model: str
    family: str  # of the speech model; empty for a text model
    client: EngineClient
    prompts: PromptBuilder
    text: TextModel
    synthesizer: Synthesizer | None

    @property
    def codec(self) -> CodecSpec | None:
        """The audio decoder's facts; None for a text-only model."""
        return self.client.codec


def embedded_folder() -> Path:
    """The checkpoint that is shipped with the package."""
    return Path(str(resources.files("tts"))) / "embedded"


def default_values(model_path: str | Path = "") -> dict[str, Any]:
    """Configuration values for a checkpoint folder (default: the embedded voice).

    The lowest layer of `tts.config.load_config`: flags, files and the environment go before it.
    """
    folder = Path(model_path) if str(model_path) else embedded_folder()
    return {"audio_decoder": "embedded", "model": {"model_path": str(folder)}}


def create_service(
    config: AudioGenerationConfig | None = None, server: ServerConfig | None = None
) -> Service:
    """Load a model and start its engine. Blocks for as long as that takes.

    `config` None, or one without a model path, means the embedded voice; `server` limits voices,
    prompts, audio and readers. Raises CheckpointError, ConfigError, CapacityError and
    DecoderConfigError.
    """
    config = with_model(config)
    client, facts = create_engine_client(config, server)
    return connect_service(config, server, client, facts)


def create_engine_client(
    config: AudioGenerationConfig, server: ServerConfig | None = None
) -> tuple[LocalEngineClient, EngineFacts]:
    """The half that needs the weights: the engine, started, and what requests must know of it.

    `config` names a model (`with_model`). Raises as `create_service` does.
    """
    folder = Path(config.model.model_path)
    import torch

    torch.set_num_threads(cpu_threads(_usable_cores()))
    from llm import create_engine
    from tts.speech_engine import LocalEngineClient, StreamLimits

    description = load_description(folder)
    decoder = _decoder(config, folder, description) if description else None
    prompts = _prompts(config, folder, description, decoder.spec if decoder else None)
    engine = create_engine(config, prompts.tokenizer)
    timeout_s = server.slow_reader_timeout_s * READER_PATIENCE if server else None
    client = LocalEngineClient(
        engine, decoder, prompts.vocabulary, StreamLimits(reader_timeout_s=timeout_s)
    )
    facts = EngineFacts(
        codec=client.codec,
        max_seq_len=min(engine.pipeline.max_seq_len, config.max_length or 2**31),
        raw_encoding=_raw_encoding(decoder),
    )
    return client, facts


def connect_service(
    config: AudioGenerationConfig,
    server: ServerConfig | None,
    client: EngineClient,
    facts: EngineFacts,
    voice_folder: Path | None = None,
) -> Service:
    """The half that needs no weights: prompts, voices and settings around an engine's client.

    `voice_folder` holds the voices that clients create, for every front end of one server.
    Raises CheckpointError, ConfigError and DecoderConfigError.
    """
    folder = Path(config.model.model_path)
    description = load_description(folder)
    parts = _Parts(config, server, folder, facts, voice_folder)
    prompts = _prompts(config, folder, description, facts.codec)
    return Service(
        model=parts.model,
        family=description.family if description else "",
        client=client,
        prompts=prompts,
        text=TextModel(
            load_sampling_defaults(folder),
            load_eos_ids(folder),
            facts.max_seq_len,
            takes_schemas=config.sampling.enable_structured_output,
        ),
        synthesizer=_synthesizer(parts, client, prompts, description) if description else None,
    )


def cpu_threads(num_cores: int) -> int:
    """How many threads share one matrix product.

    A step is several hundred small products, and threads meet after each: one that waits for a
    core the event loop uses holds up all. So one core stays free, and more than a few never pay.
    """
    return max(1, min(num_cores - 1, MAX_CPU_THREADS))


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _Parts:
    """What building the synthesizer needs of what was there before."""

    config: AudioGenerationConfig
    server: ServerConfig | None
    folder: Path
    facts: EngineFacts
    voice_folder: Path | None

    @property
    def model(self) -> str:
        """The name clients use."""
        return self.config.model.served_model_name or self.folder.name


def with_model(config: AudioGenerationConfig | None = None) -> AudioGenerationConfig:
    """The configuration, or the same with the embedded voice when it names no model."""
    from tts.config import AudioGenerationConfig

    if config is None:
        return AudioGenerationConfig(**default_values())
    if config.model.model_path:
        return config
    given = config.model_dump(exclude_unset=True)
    return type(config)(**type(config).merged(default_values(), given))


def _decoder(
    config: AudioGenerationConfig, folder: Path, description: SpeechDescription
) -> AudioDecoder:
    """The configured decoder; the checkpoint's own codec folder when it is of that kind."""
    from decoder import create_decoder, supported_decoders

    source: str | Path = config.audio_decoder
    own = folder / description.codec
    if source not in supported_decoders():
        source = Path(source)
    elif not config.audio_decoder_weights and _codec_type(own) == source:
        source = own
    return create_decoder(
        source,
        config.audio_decoder_weights,
        config.audio_decoder_config,
        config.model.device_specs[0],
        test_mode=config.run_model_test_mode,
    )


def _raw_encoding(decoder: AudioDecoder | None) -> AudioEncoding:
    """The decoder option `pcm_format`, as an encoding."""
    return AudioEncoding(decoder.options.pcm_format) if decoder else AudioEncoding.PCM_S16LE


def _codec_type(folder: Path) -> str:
    path = folder / "config.json"
    return str(read_json(path).get("type", "")) if path.is_file() else ""


def _prompts(
    config: AudioGenerationConfig,
    folder: Path,
    description: SpeechDescription | None,
    codec: CodecSpec | None,
) -> PromptBuilder:
    from tts.prompt import PromptBuilder

    codebook_size = codec.codebook_size if codec else 0
    return PromptBuilder.load(folder, description, codebook_size, config.retrieve_chat_template())


def _synthesizer(
    parts: _Parts,
    client: EngineClient,
    prompts: PromptBuilder,
    description: SpeechDescription,
) -> Synthesizer:
    from tts.synthesizer import Synthesizer
    from tts.voices import VoiceLimits, VoiceRegistry

    limits = VoiceLimits(max_voices=parts.server.max_voices) if parts.server else None
    voices = VoiceRegistry.load(parts.folder / description.voices, limits, parts.voice_folder)
    for voice in voices.voices():
        prompts.speech_prompt("", voice)  # a voice without its token is told now, not when asked
    return Synthesizer(client, prompts, voices, _settings(parts, client, description))


def _settings(
    parts: _Parts, client: EngineClient, description: SpeechDescription
) -> SynthesisSettings:
    from decoder import validate_streaming
    from tts.cloning import CloningLimits
    from tts.config import streaming_options
    from tts.synthesizer import SynthesisSettings

    if client.codec is None:
        raise CheckpointError(f"{parts.folder} has a speech.json but no codec")
    streaming = streaming_options(parts.config, client.codec.recommended)
    for warning in validate_streaming(streaming, client.codec):
        logger.warning("%s", warning)
    settings = SynthesisSettings(
        model=parts.model,
        streaming=streaming,
        sampling=load_sampling_defaults(parts.folder),
        max_characters=description.max_characters,
        max_codes=description.max_codes,
        max_seq_len=parts.facts.max_seq_len,
        raw_encoding=parts.facts.raw_encoding,
    )
    if parts.server is None:
        return settings
    from dataclasses import replace

    return replace(
        settings,
        max_audio_s=parts.server.max_audio_duration_s,
        cloning=CloningLimits(audio=_prompt_limits(parts.server)),
    )


def _prompt_limits(server: ServerConfig) -> PromptAudioLimits:
    from decoder import PromptAudioLimits

    return PromptAudioLimits(
        max_bytes=server.max_prompt_audio_bytes,
        min_s=server.min_prompt_duration_s,
        max_s=server.max_prompt_duration_s,
    )
