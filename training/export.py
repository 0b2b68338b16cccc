"""Write a checkpoint in the embedded layout from a trained model and codec.

    python -m training.export --model runs/lm.safetensors --codec runs/codec.safetensors \
        --out tts/embedded

The language model is stored in int8 with one scale per row ("int-quantized" of compressed-tensors),
the codec in float16. MODEL_CARD.md is written by hand, its figures by `training.card`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from decoder.codecs.embedded.modules import CodecConfig
from training.recipe import load_recipe
from training.vocabulary import (
    END_OF_SPEECH,
    END_OF_TEXT,
    FIRST_CODE,
    FIRST_VOICE,
    PAD,
    build_tokenizer,
)
from training.voices import NAMED
from tts.speech.aligner import AlignerConfig

MAX_POSITIONS = 2048
CHAT_TEMPLATE = (
    "<|phonemes|>{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|end_of_text|>{% endif %}"
)
STREAMING = {
    "chunk_sizes": [5, 10, 20, 40],
    "block_causal": True,
    "prepend": "never",
    "prepend_prompt_speech_tokens_causal": True,
}


def llama_config(state: dict[str, Tensor], head_dim: int) -> dict[str, Any]:
    """Return Hugging Face's LlamaConfig, derived from the weights."""
    layer = "model.layers.0."
    vocab_size, hidden = state["model.embed_tokens.weight"].shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": state[f"{layer}mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": sum(k.endswith("mlp.gate_proj.weight") for k in state),
        "num_attention_heads": state[f"{layer}self_attn.q_proj.weight"].shape[0] // head_dim,
        "num_key_value_heads": state[f"{layer}self_attn.k_proj.weight"].shape[0] // head_dim,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": [END_OF_SPEECH, END_OF_TEXT],
        "pad_token_id": PAD,
        "torch_dtype": "float32",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear", "Embedding"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel",
                                "symmetric": True},
                }
            },
            "quantization_status": "compressed",
        },
    }  # fmt: skip


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def export_aligner(weights: Path, codebook: int, out: Path) -> None:
    """Write the aligner, which finds words in codes."""
    out.mkdir(exist_ok=True)
    write_json(out / "config.json", asdict(AlignerConfig(codebook)))
    shutil.copy(weights, out / "model.safetensors")


def export(
    model: Path,
    codec: Path,
    out: Path,
    aligner: Path | None = None,
    config: CodecConfig | None = None,
) -> None:
    """Write every file of the checkpoint except the model card; `config` None: the shipped
    codec's.
    """
    (out / "codec").mkdir(parents=True, exist_ok=True)
    config, state = config or CodecConfig(), load_file(model)
    codebook = state["model.embed_tokens.weight"].shape[0] - FIRST_CODE
    write_json(out / "config.json", llama_config(state, head_dim=64))
    build_tokenizer(codebook).save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|end_of_text|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    })  # fmt: skip
    write_json(out / "generation_config.json", {
        "do_sample": True, "temperature": 0.4, "top_k": 50, "pad_token_id": PAD,
        "eos_token_id": [END_OF_SPEECH, END_OF_TEXT],
    })  # fmt: skip
    write_json(out / "speech.json", {
        "family": "embedded", "codec": "codec", "voices": "voices.json", "code_token": "<|s_{}|>",
        "start_of_speech": "<|start_of_speech|>", "end_of_speech": "<|end_of_speech|>",
        "any_voice": "<|voice_any|>", "max_characters": 200, "max_codes": 500,
    })  # fmt: skip
    voices = [
        {"name": voice.name, "display_name": f"{voice.name.capitalize()} ({voice.description})",
         "language_codes": ["en-US"], "control_token": f"<|voice_{i}|>"}
        for i, voice in enumerate(NAMED)
    ]  # fmt: skip
    write_json(out / "voices.json", {"default": NAMED[0].name, "voices": voices})
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    sizes = asdict(config) | {"levels": list(config.levels), "hop": config.hop}
    streaming = STREAMING | {"buffer": config.receptive_field}
    write_json(out / "codec/config.json", {"type": "embedded", **sizes, "streaming": streaming})
    shutil.copy(codec, out / "codec/model.safetensors")
    if aligner is not None:
        export_aligner(aligner, codebook, out / "aligner")
    assert FIRST_VOICE + len(NAMED) <= FIRST_CODE


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--aligner", type=Path, help="word timings are known with it only")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, help="values other than those of recipe.toml")
    args = parser.parse_args(argv)
    export(args.model, args.codec, args.out, args.aligner, load_recipe(args.config).codec)


if __name__ == "__main__":
    main()
