"""Random adapters in PEFT's format, and checkpoints with an adapter merged into them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Path,
    *,
    modules: tuple[str, ...] = ALL,
    rank: int = 4,
    seed: int = 0,
    gain: float = 0.3,
    **config: Any,
) -> Path:
    """Write an adapter for `base` in PEFT's format; `config` is added to its
    adapter_config.json.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or not module.endswith(modules):
            continue
        num_out, num_in = weight.shape
        down = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
        up = torch.randn(num_out, rank, generator=generator) * gain
        tensors[f"base_model.model.{module}.lora_A.weight"] = down
        tensors[f"base_model.model.{module}.lora_B.weight"] = up
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    values |= {"target_modules": list(modules), "fan_in_fan_out": False, "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    return folder


def merge(base: Path, adapter: Path, target: Path) -> Path:
    """Return the checkpoint with W + s·B·A in place of W, by the formula alone."""
    shutil.copytree(base, target)
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(base / "model.safetensors")
    for key, down in factors.items():
        if ".lora_A." not in key:
            continue
        up = factors[key.replace("lora_A", "lora_B")]
        name = key.removeprefix("base_model.model.").replace(".lora_A", "")
        alpha = config["lora_alpha"]
        for pattern, own in config.get("alpha_pattern", {}).items():
            alpha = own if re.search(pattern, name) else alpha
        scale = alpha / (len(down) ** 0.5 if config.get("use_rslora") else len(down))
        weights[name] = (weights[name].double() + scale * (up.double() @ down.double())).float()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target
