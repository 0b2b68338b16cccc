"""Random checkpoints of Llama and related architectures, their references in transformers, and
rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llm.batch import (
    ForwardMode,
    ReturnHiddenStates,
    ReturnLogits,
    ScheduledBatch,
    ScheduledRow,
)
from llm.config import KVCacheConfig, ModelConfig, PipelineConfig
from llm.models.pickle_weights import find_weights
from llm.request import SamplingParams, Token
from llm.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

GREEDY = SamplingParams(temperature=0.0)

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 3,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

MAX_ERROR = 3e-5  # of the largest logit; float32 sums in another order differ by 4e-6

PAGES = [7, 3, 12, 4, 9, 1, 20, 21, 22, 15]  # of 16 tokens


def write_llama(folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **keys: Any) -> Path:
    """Write a random checkpoint like transformers: SMALL, with `keys` of its config changed."""
    from transformers import LlamaConfig

    config = LlamaConfig(**(SMALL | keys))
    return write_random(folder, config, seed=seed, max_shard_size=max_shard_size)


def write_random(
    folder: Path,
    config: PreTrainedConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> Path:
    """Write random weights for a config of transformers; also those that it initialises with
    constants.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith(".bias"):
            weight.data.uniform_(-0.5, 0.5, generator=generator)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def reference(folder: Path) -> PreTrainedModel:
    """Load the same checkpoint in transformers, float32."""
    from transformers import AutoModelForCausalLM, PreTrainedModel

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def pipeline_config(
    folder: Path, *, num_pages: int | None = 64, page_size: int = 16, **keys: Any
) -> PipelineConfig:
    """Return a resolved configuration; `encoding`, `rope_type`, `kv_format`, `device` and
    `attention_backend` are the model's.
    """
    model = ModelConfig(
        model_path=str(folder),
        device_specs=[keys.pop("device", "cpu")],
        quantization_encoding=keys.pop("encoding", None),
        rope_type=keys.pop("rope_type", None),
        attention_backend=keys.pop("attention_backend", "auto"),
        kv_cache=KVCacheConfig(
            num_pages=num_pages,
            kv_cache_page_size=page_size,
            kv_cache_format=keys.pop("kv_format", None),
        ),
    )
    return PipelineConfig(model=model, **({"max_batch_size": 32} | keys))


def row(
    token_ids: Sequence[Token],
    pages: Sequence[int],
    start: int = 0,
    *,
    request_id: str = "a",
    sampling: SamplingParams = GREEDY,
    samples: bool = True,
    output_ids: Sequence[Token] = (),
) -> ScheduledRow:
    """Return a row with tokens at positions start, start + 1, …"""
    return ScheduledRow(
        request_id=request_id,
        token_ids=tuple(token_ids),
        start=start,
        pages=pages,
        is_extend=len(token_ids) > 1,
        samples=samples,
        sampling=sampling,
        output_ids=output_ids,
    )


def batch(*rows: ScheduledRow, num_steps: int = 1) -> ScheduledBatch:
    """Return a batch with the mode of its rows."""
    kinds = {row.is_extend for row in rows}
    mode = ForwardMode.EXTEND if kinds == {True} else ForwardMode.MIXED
    return ScheduledBatch(rows, ForwardMode.DECODE if kinds == {False} else mode, num_steps)


def random_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


def quantize_checkpoint(source: Path, target: Path) -> Path:
    """Convert to compressed-tensors int-quantized: int8 matrices and their scales."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
    }
    (target / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.ndim == 2:
            scales = tensor.float().abs().amax(1, keepdim=True) / 127
            tensors[f"{name}_scale"] = scales
            tensors[name] = (tensor / scales).round().to(torch.int8)
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors")
    return target


def float8_checkpoint(
    source: Path, target: Path, strategy: str, method: str = "", endings: str = "proj.weight"
) -> Path:
    """Convert to float8 with scales by `channel`, `tensor` or `block` (of 32 × 48).

    Matrices whose names have one of the `endings`, divided by spaces, are converted.

    `method`: compressed-tensors by default, or fp8, which knows no channels.
    """
    target.mkdir()
    config, block = json.loads((source / "config.json").read_text()), (32, 48)
    is_block = strategy == "block"
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    weights |= {"block_structure": list(block)} if is_block else {}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": weights, "input_activations": activations}},
        "ignore": ["lm_head"],
    }
    if method == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        sizes = {"weight_block_size": list(block)} if is_block else {}
        config["quantization_config"] |= sizes
    (target / "config.json").write_text(json.dumps(config))
    ending = "_scale_inv" if method == "fp8" and is_block else "_scale"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(tuple(endings.split())):
            tensors[name] = tensor.to(torch.bfloat16)
            continue
        wide = tensor.float()
        height, width = {"channel": (1, wide.shape[1]), "block": block}.get(strategy, wide.shape)
        grid = (-(-wide.shape[0] // height), -(-wide.shape[1] // width))
        scales = torch.empty(grid)
        for i in range(grid[0]):
            for j in range(grid[1]):
                part = wide[i * height : (i + 1) * height, j * width : (j + 1) * width]
                scales[i, j] = part.abs().max() / 448
                part.div_(scales[i, j])
        tensors[name] = wide.to(torch.float8_e4m3fn)
        tensors[name + ending] = scales.reshape(()) if strategy == "tensor" else scales
    save_file(tensors, target / "model.safetensors")
    return target


def create_runner(
    config: PipelineConfig,
    return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
    return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE,
) -> ModelRunner:
    """Create an initialized runner whose model returns the requested outputs."""
    runner = ModelRunner(config)
    runner.initialize()
    runner.model = type(runner.loaded_model)(
        config,
        runner.session,
        [runner.device],
        config.model.kv_cache,
        find_weights(config.model.model_path, allow_pickle=config.allow_pickle),
        return_logits=return_logits,
        return_hidden_states=return_hidden_states,
    )
    return runner


def all_logits(folder: Path, token_ids: Sequence[int], **keys: Any) -> Tensor:
    """Return the float32 logits of every token of a prompt, [T, V]; `keys` as `pipeline_config`."""
    runner = create_runner(pipeline_config(folder, **keys), ReturnLogits.ALL)
    return runner.forward(runner.prepare(batch(row(token_ids, PAGES)))).logits
