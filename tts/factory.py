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
from llm import CheckpointError, SamplingParams, is_embedding_model
from tts.checkpoint import load_eos_ids, load_sampling_defaults, read_json
from tts.engine_client import EngineFacts

if TYPE_CHECKING:
    from decoder import AudioDecoder, CodecSpec, PromptAudioLimits
    from tts.config import AudioGenerationConfig, ServerConfig
    from tts.engine_client import EngineClient
    from tts.families.base import Checkpoint, SpeechFamily
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
    echoes: bool = False  # it scores prompts
    embeds: bool = False  # it embeds texts, and writes none
    pools_embeddings: bool = True  # one vector for each text
    adapters: tuple[str, ...] = ()  # that requests can name


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
    The embedded voice was made for a CPU: it is there at once, and a single stream is no slower.
    """
    from tts.config import AUTO_DECODER

    if not str(model_path):
        embedded = {"model_path": str(embedded_folder()), "device_specs": ["cpu"]}
        return {"audio_decoder": AUTO_DECODER, "model": embedded}
    return {"audio_decoder": AUTO_DECODER, "model": {"model_path": str(model_path)}}


def create_service(
    config: AudioGenerationConfig | None = None, server: ServerConfig | None = None
) -> Service:
    """Load a model and start its engine. Blocks for as long as that takes.

    `config` None, or one without a model path, means the embedded voice; `server` limits voices,
    prompts, audio and readers. Raises CheckpointError, ConfigError, CapacityError and
    DecoderConfigError.
    """
    config = with_model(config)
    checkpoint = open_checkpoint(config)
    client, facts = create_engine_client(config, server, checkpoint)
    return connect_service(config, server, client, facts, checkpoint=checkpoint)


def open_checkpoint(config: AudioGenerationConfig) -> Checkpoint:
    """The configured folder's files; its parts are read when they are asked for, and once."""
    from tts.families.base import Checkpoint

    return Checkpoint(
        Path(config.model.model_path),
        config.retrieve_chat_template(),
        allow_pickle=config.allow_pickle,
    )


def create_engine_client(
    config: AudioGenerationConfig,
    server: ServerConfig | None = None,
    checkpoint: Checkpoint | None = None,
) -> tuple[LocalEngineClient, EngineFacts]:
    """The half that needs the weights: the engine, started, and what requests must know of it.

    `config` names a model (`with_model`); `checkpoint` is its, where it is open already. Raises
    as `create_service` does.
    """
    config.load_architectures()  # it may have been resolved in another process
    checkpoint = checkpoint or open_checkpoint(config)
    import torch

    num_cores = _usable_cores()
    torch.set_num_threads(cpu_threads(num_cores))
    from decoder import with_graphs
    from llm import Profiler, create_engine, set_product_threads, with_text_encoding
    from tts.config import streaming_options
    from tts.families.registry import find_family
    from tts.speech_engine import LocalEngineClient, StreamLimits

    if config.model.on_cpu:
        set_product_threads(min(num_cores, MAX_CPU_THREADS))
    family = find_family(checkpoint, config.family)
    decoder = _decoder(config, family) if family else None
    if decoder:  # before the language model takes the rest of a GPU's memory
        decoder = with_graphs(decoder, streaming_options(config, decoder.spec.recommended))
    vocabulary = family.vocabulary(decoder.spec) if family and decoder else None
    # Speech is heard as it comes, so its tokens are to come one by one.
    config = with_text_encoding(config) if family is None else config.planning_ahead()
    engine = create_engine(config, checkpoint.tokenizer)
    limits = StreamLimits()
    if server is not None:
        reader_timeout_s = server.slow_reader_timeout_s * READER_PATIENCE
        limits = StreamLimits(
            reader_timeout_s=reader_timeout_s, step_timeout_s=server.step_timeout_s
        )
    client = LocalEngineClient(
        engine,
        decoder,
        vocabulary,
        limits,
        profiler=Profiler(config.profiling.gpu_profiling, config.model.device_specs[0]),
        linear_layers=config.running_plan.linear_layers if config.running_plan else (),
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
    checkpoint: Checkpoint | None = None,
) -> Service:
    """The half that needs no weights: prompts, voices and settings around an engine's client.

    `voice_folder` holds the voices that clients create, for every front end of one server, unless
    `server` names a folder that is to outlive it.
    Raises CheckpointError, ConfigError and DecoderConfigError.
    """
    from tts.families.registry import find_family
    from tts.prompt import PromptBuilder

    checkpoint = checkpoint or open_checkpoint(config)
    folder = checkpoint.folder
    family = find_family(checkpoint, config.family)
    parts = _Parts(config, server, folder, facts, voice_folder)
    prompts = PromptBuilder(checkpoint, family, facts.codec)
    return Service(
        model=parts.model,
        family=family.name if family else "",
        client=client,
        prompts=prompts,
        text=TextModel(
            load_sampling_defaults(folder),
            load_eos_ids(folder),
            facts.max_seq_len,
            takes_schemas=config.sampling.enable_structured_output,
            echoes=config.enable_echo,
            embeds=is_embedding_model(folder),
            pools_embeddings=config.pool_embeddings,
            adapters=_adapter_names(config),
        ),
        synthesizer=_synthesizer(parts, client, prompts, family) if family else None,
    )


def _adapter_names(config: AudioGenerationConfig) -> tuple[str, ...]:
    lora = config.lora
    return tuple(lora.adapters()) if lora is not None and lora.enable_lora else ()


def cpu_threads(num_cores: int) -> int:
    """How many threads share one of torch's operations.

    A step is several hundred small ones, and threads meet after each: one that waits for a core the
    event loop uses holds up all. So one core stays free, and more than a few never pay. Products of
    a language model wait for no thread (`llm.set_product_threads`): they may use every core.
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


def _decoder(config: AudioGenerationConfig, family: SpeechFamily) -> AudioDecoder:
    """The configured decoder, or the family's own."""
    from decoder import create_decoder

    return create_decoder(
        _codec_source(config, family),
        config.audio_decoder_weights,
        config.audio_decoder_config,
        config.model.device_specs[0],
        test_mode=config.run_model_test_mode,
        allow_pickle=config.allow_pickle,
    )


def _codec_source(config: AudioGenerationConfig, family: SpeechFamily) -> str | Path:
    """A codec's name or folder: the checkpoint's own codec unless another one is asked for."""
    from decoder import supported_decoders
    from tts.config import AUTO_DECODER

    own = family.checkpoint.folder / family.traits.codec
    source = config.audio_decoder
    if source == AUTO_DECODER:
        if own.is_dir():
            return own
        if family.traits.codec in supported_decoders():
            return family.traits.codec
        raise CheckpointError(_no_codec(family, own))
    if source not in supported_decoders():
        return Path(source)
    if not config.audio_decoder_weights and _codec_type(own) == source:
        return own
    return source


def _no_codec(family: SpeechFamily, own: Path) -> str:
    published = family.traits.codec_repository
    origin = f" ({published})" if published else ""
    return f"{family.name} needs its codec{origin}: put it into {own} or name it, audio_decoder=…"


def _raw_encoding(decoder: AudioDecoder | None) -> AudioEncoding:
    """The decoder option `pcm_format`, as an encoding."""
    return AudioEncoding(decoder.options.pcm_format) if decoder else AudioEncoding.PCM_S16LE


def _codec_type(folder: Path) -> str:
    path = folder / "config.json"
    return str(read_json(path).get("type", "")) if path.is_file() else ""


def _synthesizer(
    parts: _Parts, client: EngineClient, prompts: PromptBuilder, family: SpeechFamily
) -> Synthesizer:
    from tts.synthesizer import Synthesizer
    from tts.voices import VoiceLimits, VoiceRegistry

    settings = _settings(parts, client, family)
    own, server = family.voices(), parts.server
    limits = VoiceLimits(server.max_voices, server.max_voice_bytes) if server else None
    folder = (server.voice_folder if server else None) or parts.voice_folder
    voices = VoiceRegistry(own.voices, own.default, limits, folder)
    for voice in own.voices:
        if voice.clip is None:
            prompts.speech_prompt("", voice)  # what a voice lacks is told now, not when asked
    return Synthesizer(client, prompts, voices, settings)


def _aligner_folder(folder: Path) -> Path | None:
    """What finds words in speech codes, where the checkpoint has it."""
    from tts.aligner import FOLDER

    own = folder / FOLDER
    return own if own.is_dir() else None


def _settings(parts: _Parts, client: EngineClient, family: SpeechFamily) -> SynthesisSettings:
    from decoder import validate_streaming
    from tts.cloning import CloningLimits
    from tts.config import streaming_options
    from tts.synthesizer import SynthesisSettings

    if client.codec is None:
        raise CheckpointError(f"{parts.folder} is of family {family.name} but has no codec")
    streaming = streaming_options(parts.config, client.codec.recommended)
    for warning in validate_streaming(streaming, client.codec):
        logger.warning("%s", warning)
    settings = SynthesisSettings(
        model=parts.model,
        streaming=streaming,
        sampling=_sampling(parts.config, family),
        traits=family.traits,
        max_seq_len=min(parts.facts.max_seq_len, family.traits.max_seq_len or 2**31),
        raw_encoding=parts.facts.raw_encoding,
        adapters=_adapter_names(parts.config),
        aligner=_aligner_folder(parts.folder),
    )
    if parts.server is None:
        return settings
    from dataclasses import replace

    return replace(
        settings,
        max_audio_s=parts.server.max_audio_duration_s,
        cloning=CloningLimits(audio=_prompt_limits(parts.server)),
    )


def _sampling(config: AudioGenerationConfig, family: SpeechFamily) -> SamplingParams:
    """The family's, without the penalties that this server's engine is not to know."""
    from dataclasses import replace

    if config.sampling.enable_penalties:
        return family.sampling()
    return replace(
        family.sampling(), repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0
    )


def _prompt_limits(server: ServerConfig) -> PromptAudioLimits:
    from decoder import PromptAudioLimits

    return PromptAudioLimits(
        max_bytes=server.max_prompt_audio_bytes,
        min_s=server.min_prompt_duration_s,
        max_s=server.max_prompt_duration_s,
    )
