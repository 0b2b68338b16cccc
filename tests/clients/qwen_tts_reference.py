"""Speech by the package qwen-tts: python qwen_tts_reference.py MODEL REQUESTS OUT

PYTHONPATH must name a folder with the package and the transformers that it needs. REQUESTS is a
JSON list; OUT becomes a file of tensors: the codes and the samples of each request, with the
settings of generation_config.json.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

LIMITS: dict[str, Any] = {"max_new_tokens": 13}  # the last one has no frame


class Unused(ModuleType):
    """A package that only the codec of 25 Hz imports."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> Any:
        return self


def leave_out(*names: str) -> None:
    """Make packages importable that are not installed and not used."""
    for name in names:
        module = Unused(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        sys.modules[name] = module


def load(kind: Any, config: Any, folder: Path) -> Any:
    """Return a model with all weights of a folder, float32."""
    model = kind(config)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


class Codec:
    """The codec as the model calls it; keeps the codes."""

    def __init__(self, folder: Path) -> None:
        core = import_module("qwen_tts.core")
        config = core.Qwen3TTSTokenizerV2Config(**json.loads((folder / "config.json").read_text()))
        self.model = load(core.Qwen3TTSTokenizerV2Model, config, folder)
        self.codes = torch.empty(0)

    def decode(self, items: list[dict[str, Any]]) -> tuple[list[Any], int]:
        (item,) = items
        self.codes = item["audio_codes"]
        with torch.inference_mode():
            (samples,) = self.model.decode(self.codes[None], return_dict=False)[0]
        return [samples.numpy()], 24_000


def speak(model: Any, request: dict[str, Any]) -> Any:
    """Return the samples of a request."""
    reference = request.pop("reference", None)
    kind = model.model.tts_model_type
    if reference is not None:
        samples = np.load(reference["recording"])
        vector = model.model.extract_speaker_embedding(samples, 24_000)
        text = reference.get("text")
        codes = torch.tensor(reference["codes"]) if text else None
        kept = import_module("qwen_tts.inference.qwen3_tts_model").VoiceClonePromptItem
        item = kept(codes, vector, text is None, text is not None, text)
        return model.generate_voice_clone(voice_clone_prompt=[item], **request, **LIMITS)[0][0]
    if kind == "voice_design":
        return model.generate_voice_design(**request, **LIMITS)[0][0]
    return model.generate_custom_voice(**request, **LIMITS)[0][0]


def main() -> None:
    """Write the speech of all requests."""
    assert transformers.__version__.startswith("4.57.")
    _, folder, requests, out = map(Path, sys.argv)
    leave_out("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")
    leave_out("onnxruntime", "sox")
    models = import_module("qwen_tts.core.models")
    torch.set_num_threads(1)
    config = models.Qwen3TTSConfig(**json.loads((folder / "config.json").read_text()))
    own = load(models.Qwen3TTSForConditionalGeneration, config, folder)
    codec = Codec(folder / "speech_tokenizer")
    own.load_speech_tokenizer(codec)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    wrapper = import_module("qwen_tts.inference.qwen3_tts_model").Qwen3TTSModel
    settings = json.loads((folder / "generation_config.json").read_text())
    model = wrapper(own, lambda text, **_: tokenizer(text, return_tensors="pt"), settings)
    found = {}
    for place, request in enumerate(json.loads(requests.read_text())):
        samples = speak(model, request)
        found |= {f"{place}.codes": codec.codes, f"{place}.samples": torch.tensor(samples)}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)


if __name__ == "__main__":
    main()
