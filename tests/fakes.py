"""Small real parts for tests: a checkpoint in the embedded layout with random, seeded weights.

Nothing here is a mock: the files are read by the same code that reads the shipped voice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from decoder.codecs.embedded.modules import CodecConfig, EmbeddedCodec
from tests.deadlines import HANG_S
from tests.vocabulary import (
    END_OF_SPEECH,
    END_OF_TEXT,
    FIRST_CODE,
    MAX_VOICES,
    PAD,
    build_tokenizer,
)

if TYPE_CHECKING:
    from decoder import AudioDecoder
    from llm import Token
    from llm.batch import ScheduledBatch, StepOutput
    from llm.engine.types import Pipeline
    from tts.config.pipeline import AudioGenerationConfig
    from tts.engine.client import EngineClient
    from tts.engine.local_client import LocalEngineClient, StreamLimits

VOICE_NAMES = ("hazel", "owen", "edith")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

TINY_CODEC = CodecConfig(
    sample_rate=16_000,
    levels=(4, 4, 4),
    frames_per_code=2,
    spectra_per_frame=2,
    stft_hop=160,
    n_fft=640,
    mel_bins=20,
    mel_n_fft=512,
    encoder_dim=16,
    encoder_layers=1,
    encoder_heads=2,
    encoder_window=4,
    decoder_dim=32,
    decoder_layers=1,
    decoder_heads=2,
    decoder_ff=64,
    left_window=4,
    right_window=4,
)

BRIEF = 1.5
"""Factor of the end token's weights in speech: its logit varies more, so that most sentences end
before their longest time, after a third of the tokens.
"""

STREAMING = {
    "chunk_sizes": [2, 4, 8],
    "buffer": 8,
    "block_causal": True,
    "prepend": "never",
    "prepend_prompt_speech_tokens_causal": True,
}


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a random language model; the vocabulary has 320 + the codec's codebook ids."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 128
    max_positions: int = 1024

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def build_tiny_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    voices: int = 3,
    shape: LlamaShape | None = None,
    codec: CodecConfig = TINY_CODEC,
) -> Path:
    """Write a whole checkpoint in the embedded layout into `folder` and return it.

    The same seed writes the same bytes. Larger `shape` and `codec` give a model of the shipped
    size with random weights, for speed measurements.
    """
    shape = shape or LlamaShape()
    build_text_checkpoint(
        folder, seed=seed, shape=shape, codebook_size=codec.codebook_size, end_gain=BRIEF
    )
    _write_json(folder / "speech.json", speech_description())
    _write_json(folder / "voices.json", voices_description(voices))
    _write_codec(folder / "codec", codec, seed)
    (folder / "MODEL_CARD.md").write_text("# Random weights\n\nFor tests only.\n")
    return folder


def build_text_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    shape: LlamaShape | None = None,
    codebook_size: int = 0,
    end_gain: float = 1.0,
) -> Path:
    """Write the language model only: a checkpoint without speech."""
    shape = shape or LlamaShape()
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = FIRST_CODE + codebook_size
    _write_json(folder / "config.json", llama_config(shape, vocab_size))
    build_tokenizer(codebook_size).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config())
    _write_json(folder / "generation_config.json", generation_config())
    weights = random_llama(shape, vocab_size, seed)
    weights["model.embed_tokens.weight"][END_OF_SPEECH] *= end_gain
    save_file(weights, folder / "model.safetensors")
    return folder


def build_embedding_checkpoint(folder: Path) -> Path:
    """Write the text model as an embedding model: by its layout, not by its weights."""
    build_text_checkpoint(folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": f"sentence_transformers.models.{k}", "path": k} for k in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "Pooling").mkdir()
    (folder / "Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return folder


def tiny_config(checkpoint: Path, **values: Any) -> AudioGenerationConfig:
    """Return a configuration for a tiny checkpoint: small pages, few of them."""
    from tts.config.pipeline import AudioGenerationConfig

    own: dict[str, Any] = {
        "audio_decoder": "embedded",
        "max_batch_size": 16,
        "model": {
            "model_path": str(checkpoint),
            "kv_cache": {"kv_cache_page_size": 16, "num_pages": 512},
        },
    }
    return AudioGenerationConfig(**AudioGenerationConfig.merged(own, values))


class OffsetCodes:
    """A code map: code k is token id `first_code + k`; other ids are not codes."""

    codes_per_token = 1

    def __init__(self, first_code: int = FIRST_CODE) -> None:
        self._first_code = first_code

    def reader(self) -> Callable[[Sequence[Token]], tuple[int, ...]]:
        return self.codes

    def codes(self, token_ids: Sequence[Token]) -> tuple[int, ...]:
        first = self._first_code
        given = (token_id for token_id in token_ids if isinstance(token_id, int))
        return tuple(token_id - first for token_id in given if token_id >= first)


class StepLog:
    """A pipeline that records which requests shared each step, and passes the step on."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, ...]] = []
        self._inner: Pipeline | None = None

    def watch(self, pipeline: Pipeline) -> StepLog:
        self._inner = pipeline
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self.steps.append(tuple(row.request_id for row in batch.rows))
        assert self._inner is not None
        return self._inner.execute(batch)

    def count(self, request_id: str) -> int:
        """Return the number of steps that contained a request."""
        return sum(request_id in rows for rows in self.steps)


def create_client(
    checkpoint: Path,
    *,
    limits: StreamLimits | None = None,
    step_log: StepLog | None = None,
    wrap_decoder: Callable[[AudioDecoder], AudioDecoder] = lambda decoder: decoder,
    **config_values: Any,
) -> LocalEngineClient:
    """Return a running engine client on a tiny checkpoint, with real parts."""
    from decoder import create_decoder
    from llm.engine.engine import Engine
    from llm.pipeline.text_generation import TextGenerationPipeline
    from llm.scheduler import Scheduler
    from tts.engine.local_client import LocalEngineClient

    config = tiny_config(checkpoint, **config_values)
    pipeline = TextGenerationPipeline(config)
    scheduler = Scheduler(
        config,
        pipeline.kv_manager,
        max_seq_len=pipeline.max_seq_len,
        enable_in_flight_batching=True,
    )
    engine = Engine(step_log.watch(pipeline) if step_log else pipeline, scheduler)
    if not (checkpoint / "codec").is_dir():
        return LocalEngineClient(engine, limits=limits)
    decoder = wrap_decoder(create_decoder(checkpoint / "codec"))
    return LocalEngineClient(engine, decoder, OffsetCodes(), limits)


async def wait_until_idle(client: EngineClient, timeout_s: float = HANG_S) -> None:
    """Wait until no request runs, waits, decodes or holds a page; fails after a timeout."""
    for _ in range(round(timeout_s / 0.005)):
        status = await client.status()
        in_use = (status.running, status.waiting, status.used_pages, status.audio_streams)
        if not any(in_use):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"still in use: {status}")


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "pad_token": "<|pad|>",
        "eos_token": "<|end_of_text|>",
        "clean_up_tokenization_spaces": False,
    }


def generation_config() -> dict[str, object]:
    return {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 50,
        "eos_token_id": [END_OF_SPEECH, END_OF_TEXT],
        "pad_token_id": PAD,
    }


def speech_description() -> dict[str, object]:
    return {
        "family": "embedded",
        "codec": "codec",
        "voices": "voices.json",
        "code_token": "<|s_{}|>",
        "start_of_speech": "<|start_of_speech|>",
        "end_of_speech": "<|end_of_speech|>",
        "any_voice": "<|voice_any|>",
        "max_characters": 200,
        "max_codes": 500,
    }


def voices_description(voices: int) -> dict[str, object]:
    names = [*VOICE_NAMES, *(f"voice-{k}" for k in range(len(VOICE_NAMES), MAX_VOICES))]
    entries = [
        {
            "name": name,
            "display_name": name.capitalize(),
            "language_codes": ["en-US"],
            "control_token": f"<|voice_{k}|>",
        }
        for k, name in enumerate(names[:voices])
    ]
    return {"default": names[0], "voices": entries}


def llama_config(shape: LlamaShape, vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": [END_OF_SPEECH, END_OF_TEXT],
        "pad_token_id": PAD,
    }


def random_llama(shape: LlamaShape, vocab_size: int, seed: int) -> dict[str, Tensor]:
    """Return weights whose next-token distribution is neither flat nor repeats the last token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5

    hidden, query = shape.hidden, shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": normal(vocab_size, hidden, 2.0),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": normal(query, hidden, 2.0),
            prefix + "self_attn.k_proj.weight": normal(kv, hidden, 2.0),
            prefix + "self_attn.v_proj.weight": normal(kv, hidden, 2.0),
            prefix + "self_attn.o_proj.weight": normal(hidden, query, 2.0),
            prefix + "mlp.gate_proj.weight": normal(shape.intermediate, hidden, 2.0),
            prefix + "mlp.up_proj.weight": normal(shape.intermediate, hidden, 2.0),
            prefix + "mlp.down_proj.weight": normal(hidden, shape.intermediate, 2.0),
        }
    return weights


def _write_codec(folder: Path, config: CodecConfig, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"type": "embedded", **asdict(config), "hop": config.hop, "streaming": STREAMING}
    _write_json(folder / "config.json", values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        codec = EmbeddedCodec(config)
    weights = {name: value.contiguous() for name, value in codec.state_dict().items()}
    weights["decoder.spectra.bias"] += 1.5  # random spectra about as loud as speech
    save_file(weights, folder / "model.safetensors")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
