"""Composition root: creates engines, decoders and synthesizers from a configuration.

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from decoder import AudioEncoding
from llm import (
    CheckpointError,
    ConfigError,
    PipelineRole,
    RequestError,
    SamplingParams,
    is_embedding_model,
)
from tts.checkpoint.files import load_eos_ids, load_sampling_defaults, read_json
from tts.engine.client import EngineInfo
from tts.errors import InvalidRequestError

if TYPE_CHECKING:
    from decoder import AudioDecoder, CodecSpec, PromptAudioLimits, SpeakerEncoder
    from tts.config.pipeline import AudioGenerationConfig
    from tts.config.server import ServerConfig
    from tts.engine.client import EngineClient
    from tts.engine.local_client import LocalEngineClient, StreamLimits
    from tts.families.base import Checkpoint, SpeechFamily
    from tts.families.prompt import PromptBuilder
    from tts.speech.run import SynthesisSettings
    from tts.speech.synthesizer import Synthesizer
    from tts.text.lexicon.watched import WatchedLexicons
    from tts.voices.types import Voice

logger = logging.getLogger(__name__)

MAX_CPU_THREADS = 4
WARM_UP_CODES = 16
READER_PATIENCE = 6
"""Ratio of the read timeout of a whole block to that of one message: a block is sent as many
messages, each with a timeout of its own."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """Properties of the model for text requests. Lengths are in tokens."""

    sampling: SamplingParams  # defaults of a request
    stop_token_ids: tuple[int, ...]
    max_seq_len: int
    takes_schemas: bool = False  # structured output is enabled
    echoes: bool = False  # can return log-probabilities of prompt tokens
    embeds: bool = False  # embeds texts and does not generate
    only_speaks: bool = False  # generates frames of speech and no text
    pools_embeddings: bool = True  # one vector per text, else one per token
    adapters: tuple[str, ...] = ()  # names for requests

    @property
    def generates(self) -> bool:
        """Whether it writes text."""
        return not (self.embeds or self.only_speaks)


@dataclass(frozen=True, slots=True)
class Service:
    """Components of a served model for a front end. `synthesizer` is None for a text-only model."""

    model: str
    family: str  # of the speech model; empty for a text-only model
    client: EngineClient
    prompts: PromptBuilder
    text: TextModel
    synthesizer: Synthesizer | None
    text_service: Service | None = None
    """Service of a second model, which answers requests for text; see `with_text_model`."""

    @property
    def for_text(self) -> Service:
        """The service that answers requests for text."""
        return self.text_service or self

    @property
    def services(self) -> tuple[Service, ...]:
        """The services of all models, this one first."""
        return (self,) if self.text_service is None else (self, self.text_service)

    async def warm_up(self, num_codes: int = WARM_UP_CODES) -> None:
        """Check the chat templates and synthesize a word; see `synthesize_word`.

        Raises CheckpointError for defects that only a first call finds.
        """
        for service in self.services:
            service.prompts.check_chat()
        await self.synthesize_word(num_codes)

    async def synthesize_word(self, num_codes: int = WARM_UP_CODES) -> None:
        """Synthesize a word, so that the first call does not pay for lazy imports and allocations.

        `num_codes` is the most that the model generates.
        """
        from tts.speech.types import SamplingOverrides, SpeechRequest

        if self.synthesizer is not None:
            sampling = SamplingOverrides(seed=0, max_tokens=num_codes)
            await self.synthesizer.synthesize(SpeechRequest("Ready.", sampling=sampling))

    async def close(self) -> None:
        """Stop the engines."""
        for service in self.services:
            await service.client.close()

    @property
    def codec(self) -> CodecSpec | None:
        """Specification of the codec; None for a text-only model."""
        return self.client.codec


def create_service(
    config: AudioGenerationConfig | None = None,
    server: ServerConfig | None = None,
    text: AudioGenerationConfig | None = None,
    on_ranks_lost: Callable[[str], None] | None = None,
) -> Service:
    """Load a model and start its engine; block until both are done.

    `config` None, or one without a model path, means the built-in voice; `server` limits voices,
    prompts, audio and readers; `text` is the configuration of a second model for requests for
    text; `on_ranks_lost` as in `llm.create_engine`. Raises CheckpointError, ConfigError,
    CapacityError and DecoderConfigError.
    """
    config = with_model(config)
    if config.pipeline_role is not PipelineRole.PrefillAndDecode:
        raise ConfigError(
            f"pipeline_role={config.pipeline_role.value} needs tts.serve with front_ends of at "
            "least 1: engines with roles are processes of their own"
        )
    checkpoint = open_checkpoint(config)
    client, info = create_engine_client(config, server, checkpoint, on_ranks_lost)
    service = connect_service(config, server, client, info, checkpoint=checkpoint)
    if text is None:
        return service
    return with_text_model(service, create_service(text, server, on_ranks_lost=on_ranks_lost))


def with_text_model(service: Service, text: Service) -> Service:
    """Return the service of a voice whose requests for text go to another model.

    Raises ConfigError for models that do not go together.
    """
    if service.synthesizer is None:
        raise ConfigError(f"text_model={text.model} needs a model that speaks; name it with model")
    if text.synthesizer is not None:
        raise ConfigError(f"text_model={text.model} is a model that speaks; name it with model")
    if text.model == service.model:
        raise ConfigError(
            f"text_model={text.model} has the name of the model; set model.served_model_name"
        )
    return replace(service, text_service=text)


def open_checkpoint(config: AudioGenerationConfig) -> Checkpoint:
    """Return the checkpoint in the configured folder; its parts are read once, on first use."""
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
    on_ranks_lost: Callable[[str], None] | None = None,
    num_replicas: int = 1,
) -> tuple[LocalEngineClient, EngineInfo]:
    """Load the weights and return the started engine, with its properties for requests.

    `config` must name a model (`with_model`); `checkpoint` is its checkpoint, if already open;
    `on_ranks_lost` as in `llm.create_engine`. Engines of `num_replicas` processes share the cores.
    Raises the errors of `create_service`.
    """
    config.load_architectures()  # the configuration may have been resolved in another process
    checkpoint = checkpoint or open_checkpoint(config)
    import torch

    num_cores = max(1, _usable_cores() // num_replicas)
    torch.set_num_threads(cpu_threads(num_cores))
    from decoder import with_graphs
    from llm import Profiler, create_engine, set_product_threads, with_text_encoding
    from tts.config.pipeline import streaming_options
    from tts.engine.local_client import LocalEngineClient
    from tts.families.registry import find_family

    if config.model.on_cpu:
        set_product_threads(min(num_cores, MAX_CPU_THREADS))
    family = find_family(checkpoint, config.family)
    computes_prompts_only = config.pipeline_role is PipelineRole.PrefillOnly
    decoder = _decoder(config, family) if family and not computes_prompts_only else None
    streaming = None
    if decoder:  # before the language model takes the rest of a GPU's memory
        streaming = streaming_options(config, decoder.spec.recommended)
        num_streams = config.max_queue_size_tg or config.max_batch_size
        decoder = with_graphs(decoder, streaming, num_streams)
    speakers = _speaker_encoder(config, family, decoder.spec) if family and decoder else None
    vocabulary = family.vocabulary(decoder.spec) if family and decoder else None
    # Speech is played while it is generated, so its tokens should arrive one by one.
    config = with_text_encoding(config) if family is None else config.planning_ahead()
    if vocabulary and vocabulary.codes_per_token == 1:
        config = config.with_common_ids(vocabulary.id_range)
    engine = create_engine(config, checkpoint.tokenizer, on_ranks_lost)
    client = LocalEngineClient(
        engine,
        decoder,
        vocabulary,
        replace(_stream_limits(server), by_deadline=config.pace_streams),
        streaming=streaming,
        profiler=Profiler(config.profiling.gpu_profiling, config.model.device_specs[0]),
        linear_layers=config.running_plan.linear_layers if config.running_plan else (),
    )
    client.speakers = speakers
    info = EngineInfo(
        codec=client.codec,
        max_seq_len=min(engine.pipeline.max_seq_len, config.max_length or 2**31),
        raw_encoding=_raw_encoding(decoder),
        voice_codec=_voice_codec(config, server, family, decoder, speakers),
    )
    return client, info


def connect_service(
    config: AudioGenerationConfig,
    server: ServerConfig | None,
    client: EngineClient,
    info: EngineInfo,
    voice_folder: Path | None = None,
    checkpoint: Checkpoint | None = None,
    *,
    requires_lexicons: bool = True,
) -> Service:
    """Create the components that need no weights: prompts, voices and settings of a client.

    `voice_folder` holds created voices, shared by the front ends of one server, unless `server`
    names a permanent folder. Without `requires_lexicons` a broken lexicon is left out.
    Raises CheckpointError, ConfigError and DecoderConfigError.
    """
    from tts.families.prompt import PromptBuilder
    from tts.families.registry import find_family

    checkpoint = checkpoint or open_checkpoint(config)
    folder = checkpoint.folder
    family = find_family(checkpoint, config.family)
    if server is not None and server.speech_server is not None:
        _check_has_no_voice(folder, family)
    parts = _Parts(config, server, folder, info, voice_folder, requires_lexicons)
    prompts = PromptBuilder(checkpoint, family, info.codec)
    return Service(
        model=parts.model,
        family=family.name if family else "",
        client=client,
        prompts=prompts,
        text=TextModel(
            load_sampling_defaults(folder),
            load_eos_ids(folder),
            info.max_seq_len,
            takes_schemas=config.sampling.enable_structured_output,
            echoes=config.enable_echo,
            embeds=is_embedding_model(folder),
            only_speaks=prompts.vocabulary is not None and prompts.vocabulary.codes_per_token > 1,
            pools_embeddings=config.pool_embeddings,
            adapters=_adapter_names(config),
        ),
        synthesizer=_synthesizer(parts, client, prompts, family) if family else None,
    )


def _check_has_no_voice(folder: Path, family: SpeechFamily | None) -> None:
    """Raise ConfigError for a model whose texts cannot be spoken by a speech server."""
    if family is not None:
        raise ConfigError(f"{folder} speaks itself; leave out speech_server, or name a text model")
    if is_embedding_model(folder):
        raise ConfigError(f"{folder} embeds texts; speech_server needs a model that generates")


def _adapter_names(config: AudioGenerationConfig) -> tuple[str, ...]:
    lora = config.lora
    return tuple(lora.adapters()) if lora is not None and lora.enable_lora else ()


def cpu_threads(num_cores: int) -> int:
    """Return the number of threads for one torch operation.

    A step consists of several hundred small operations with a barrier after each, so one thread
    that waits for the event loop's core delays all. One core is therefore left free, and more than
    a few threads do not help. Matrix products of a language model have no such barrier
    (`llm.set_product_threads`) and may use every core.
    """
    return max(1, min(num_cores - 1, MAX_CPU_THREADS))


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _Parts:
    """Inputs of the components that are created around an engine client."""

    config: AudioGenerationConfig
    server: ServerConfig | None
    folder: Path
    info: EngineInfo
    voice_folder: Path | None
    requires_lexicons: bool

    @property
    def model(self) -> str:
        """Model name for clients."""
        return self.config.model.served_model_name or self.folder.name


def with_model(config: AudioGenerationConfig | None = None) -> AudioGenerationConfig:
    """Return the configuration, with the built-in voice's model if it names none."""
    from tts.config.defaults import default_values
    from tts.config.pipeline import AudioGenerationConfig

    if config is None:
        return AudioGenerationConfig(**default_values())
    if config.model.model_path:
        return config
    given = config.model_dump(exclude_unset=True)
    return type(config)(**type(config).merged(default_values(), given))


def _decoder(config: AudioGenerationConfig, family: SpeechFamily) -> AudioDecoder:
    """Return the configured decoder, else the family's default one."""
    from decoder import create_decoder

    return create_decoder(
        _codec_source(config, family),
        config.audio_decoder_weights,
        config.audio_decoder_config,
        config.model.device_specs[0],
        test_mode=config.run_model_test_mode,
        allow_pickle=config.allow_pickle,
    )


def _stream_limits(server: ServerConfig | None) -> StreamLimits:
    from tts.engine.local_client import StreamLimits

    if server is None:
        return StreamLimits()
    return StreamLimits(
        reader_timeout_s=server.slow_reader_timeout_s * READER_PATIENCE,
        step_timeout_s=server.step_timeout_s,
    )


def _speaker_encoder(
    config: AudioGenerationConfig, family: SpeechFamily, spec: CodecSpec
) -> SpeakerEncoder | None:
    """Return the encoder of a model that reads vectors of speakers."""
    from decoder import create_speaker_encoder

    if not family.traits.takes_vectors:
        return None
    folder = family.checkpoint.folder
    encoder = create_speaker_encoder(folder, config.model.device_specs[0])
    if encoder.sample_rate != spec.sample_rate:
        raise CheckpointError(
            f"{folder}: the speaker encoder reads {encoder.sample_rate} samples a second, the "
            f"codec {spec.sample_rate}"
        )
    return encoder


def _voice_codec(
    config: AudioGenerationConfig,
    server: ServerConfig | None,
    family: SpeechFamily | None,
    decoder: AudioDecoder | None,
    speakers: SpeakerEncoder | None,
) -> str:
    """Return the identity of the codec of voices that are kept; empty where none are.

    Models with the same codec may have vectors of speakers of different sizes, or none.
    """
    from decoder import codec_identity

    if server is None or server.voice_folder is None or family is None or decoder is None:
        return ""
    source = _codec_source(config, family)
    identity = codec_identity(source, config.audio_decoder_weights, decoder.spec)
    return identity if speakers is None else f"{identity}+{speakers.vector_size}"


def _codec_source(config: AudioGenerationConfig, family: SpeechFamily) -> str | Path:
    """Return a codec's name or folder: the configured codec, else the checkpoint's."""
    from decoder import supported_decoders
    from tts.config.pipeline import AUTO_DECODER

    own = family.checkpoint.folder / family.traits.codec
    source = config.audio_decoder
    if source == AUTO_DECODER:
        if own.is_dir():
            return own
        if family.contains_codec:
            return family.checkpoint.folder
        if family.traits.codec in supported_decoders():
            return family.traits.codec
        raise CheckpointError(_missing_codec(family, own))
    if source not in supported_decoders():
        return Path(source)
    if not config.audio_decoder_weights and _codec_type(own) == source:
        return own
    return source


def _missing_codec(family: SpeechFamily, own: Path) -> str:
    published = family.traits.codec_repository
    origin = f" ({published})" if published else ""
    return f"{family.name} needs its codec{origin}: put it into {own} or name it, audio_decoder=…"


def _raw_encoding(decoder: AudioDecoder | None) -> AudioEncoding:
    """Return the decoder option `pcm_format` as an encoding."""
    return AudioEncoding(decoder.options.pcm_format) if decoder else AudioEncoding.PCM_S16LE


def _codec_type(folder: Path) -> str:
    path = folder / "config.json"
    return str(read_json(path).get("type", "")) if path.is_file() else ""


def _synthesizer(
    parts: _Parts, client: EngineClient, prompts: PromptBuilder, family: SpeechFamily
) -> Synthesizer:
    from tts.speech.synthesizer import Synthesizer
    from tts.voices.registry import VoiceLimits, VoiceRegistry

    settings = _settings(parts, client, family)
    own, server = family.voices(), parts.server
    limits = VoiceLimits(server.max_voices, server.max_voice_bytes) if server else None
    folder = (server.voice_folder if server else None) or parts.voice_folder
    levels = client.codec.voice_levels if client.codec else ()
    voices = VoiceRegistry(own.voices, own.default, limits, folder, parts.info.voice_codec, levels)
    lexicons = _lexicons(parts, prompts, family)
    synthesizer = Synthesizer(client, prompts, voices, settings, lexicons)
    for voice in own.voices:
        _check_voice(parts.folder / family.traits.voices_file, prompts, synthesizer, voice)
    return synthesizer


def _lexicons(
    parts: _Parts, prompts: PromptBuilder, family: SpeechFamily
) -> WatchedLexicons | None:
    """Return the configured lexicons. Raises ConfigError for a required one that is broken."""
    from tts.text.lexicon.files import load_lexicon
    from tts.text.lexicon.watched import WatchedLexicons

    if not parts.config.lexicon:
        return None
    read = partial(load_lexicon, adapt=prompts.pronounced, ascii_only=family.traits.ascii_only)
    paths = tuple(map(Path, parts.config.lexicon))
    return WatchedLexicons(paths, read, is_required=parts.requires_lexicons)


def _check_voice(
    path: Path, prompts: PromptBuilder, synthesizer: Synthesizer, voice: Voice
) -> None:
    """Raise CheckpointError for a voice of the checkpoint that cannot be used."""
    try:
        synthesizer.read_pronunciations(voice.pronunciations, "pronunciations")
        if voice.clip is None:
            prompts.speech_prompt("", voice)
    except (RequestError, InvalidRequestError) as error:
        raise CheckpointError(f"{path}: voice '{voice.name}': {error}") from error


def _aligner_folder(folder: Path) -> Path | None:
    """Return the folder of the word aligner, if the checkpoint has one."""
    from tts.speech.aligner import FOLDER

    own = folder / FOLDER
    return own if own.is_dir() else None


def _settings(parts: _Parts, client: EngineClient, family: SpeechFamily) -> SynthesisSettings:
    from decoder import validate_streaming
    from tts.config.pipeline import streaming_options
    from tts.speech.cloning import CloningLimits
    from tts.speech.run import SynthesisSettings
    from tts.speech.watermark import load_watermark

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
        max_seq_len=min(parts.info.max_seq_len, family.traits.max_seq_len or 2**31),
        raw_encoding=parts.info.raw_encoding,
        adapters=_adapter_names(parts.config),
        aligner=_aligner_folder(parts.folder),
        watermark=load_watermark() if parts.config.watermark else None,
    )
    if parts.server is None:
        return settings
    return replace(
        settings,
        max_audio_s=parts.server.max_audio_duration_s,
        cloning=CloningLimits(audio=_prompt_limits(parts.server)),
    )


def _sampling(config: AudioGenerationConfig, family: SpeechFamily) -> SamplingParams:
    """Return the family's sampling parameters, without penalties if they are disabled."""
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
