"""Registry of language-model architectures: facts that need no torch, and the class of each.

The names are those in `architectures` of a checkpoint's config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llm.config.sections import QuantizationEncoding
from llm.errors import CheckpointError, ConfigError

FLOATS = tuple(map(QuantizationEncoding, ("float32", "float16", "bfloat16")))
HELD_AS = (
    *FLOATS,
    *map(QuantizationEncoding, ("int8", "float8_e4m3fn", "float4_e2m1fnx2")),
    *map(QuantizationEncoding, ("gptq", "q4_0", "q4_k", "q6_k")),
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. A plug-in registers its own, see `PipelineConfig.custom_architectures`.

    `model` is "module:Class", a `PipelineModel`, imported when a model is created.
    `required_arguments` are configuration fields (dotted) and the only values that it supports.
    """

    name: str
    model: str
    encodings: tuple[QuantizationEncoding, ...] = HELD_AS
    required_arguments: tuple[tuple[str, Any], ...] = ()
    # key in config.json of the maximum length of a sequence
    length_key: str = "max_position_embeddings"
    is_embedding: bool = False  # it has no head: it computes embeddings instead of generating
    supports_lora: bool = False
    supports_drafts: bool = True  # it can verify the tokens of a draft model
    supports_empty_batches: bool = False
    has_experts: bool = False  # some of its checkpoints have
    # the sum of lengths in one batch is limited to one maximum length
    needs_total_tokens_limit: bool = False

    def __post_init__(self) -> None:
        module, found, class_name = self.model.partition(":")
        if not (self.name and module and found and class_name):
            raise ConfigError(
                f"architecture '{self.name}': model='{self.model}' is no module:Class"
            )

    def max_length(self, values: Mapping[str, Any]) -> int | None:
        """Return the limit in a checkpoint's config.json (or in the language model's part of it).

        None if there is none, it is not an integer, or rotary scaling may extend it: then the model
        determines it when it is loaded.
        """
        nested = values.get("text_config", values.get("talker_config"))
        keys = nested if isinstance(nested, Mapping) else values
        rope = keys.get("rope_parameters") or keys.get("rope_scaling")
        limit = keys.get(self.length_key)
        is_stretched = isinstance(rope, Mapping) and "factor" in rope
        return None if type(limit) is not int or is_stretched else limit


_BUILT_IN = {
    "LlamaForCausalLM": "llm.models.llama:LlamaModel",
    "MistralForCausalLM": "llm.models.mistral:MistralModel",
    "Qwen2ForCausalLM": "llm.models.qwen2:Qwen2Model",
    "Qwen3ForCausalLM": "llm.models.qwen3:Qwen3Model",
    "Qwen3MoeForCausalLM": "llm.models.qwen3_moe:Qwen3MoeModel",
}
_WITH_EXPERTS = ("Qwen3MoeForCausalLM", "Qwen3NextForCausalLM")
_architectures = {
    name: Architecture(
        name,
        model,
        supports_lora=True,
        supports_empty_batches=True,
        has_experts=name in _WITH_EXPERTS,
    )
    for name, model in _BUILT_IN.items()
}
_architectures |= {
    found.name: found
    for found in (
        replace(causal, name=causal.name.replace("ForCausalLM", "Model"), is_embedding=True)
        for causal in _architectures.values()
    )
}
_architectures |= {
    name: Architecture(
        name,
        model,
        encodings=FLOATS,
        supports_lora=True,
        supports_empty_batches=True,
        supports_drafts=False,
    )
    for name, model in (
        ("CsmForConditionalGeneration", "llm.models.csm:CsmModel"),
        ("HiggsAudioV2ForConditionalGeneration", "llm.models.higgs_audio_v2:HiggsAudioV2Model"),
        ("Qwen3TTSForConditionalGeneration", "llm.models.qwen3_tts:Qwen3TTSModel"),
    )
}


_architectures |= {
    name: Architecture(
        name,
        model,
        supports_lora=True,
        supports_empty_batches=True,
        # A state is that of one position: it cannot be shared, nor go back to a rejected draft's.
        supports_drafts=False,
        required_arguments=(("model.kv_cache.enable_prefix_caching", False),),
        has_experts=name in _WITH_EXPERTS,
    )
    for name, model in (
        ("Lfm2ForCausalLM", "llm.models.lfm2:Lfm2Model"),
        ("Qwen3NextForCausalLM", "llm.models.qwen3_next:Qwen3NextModel"),
    )
}


_architectures |= {
    name: Architecture(name, "llm.models.qwen2_vl:Qwen2VLModel", supports_empty_batches=True)
    for name in ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
}


FALLBACK = Architecture(
    "AutoModelForCausalLM",
    "llm.models.auto:AutoModel",
    encodings=FLOATS,
    supports_drafts=False,
    required_arguments=(("enable_chunked_prefill", False), ("enable_overlap_scheduler", False)),
)
"""Runs architectures without an entry by way of the transformers package."""


def register_architecture(architecture: Architecture) -> None:
    """Add an architecture to this process; one of the same name is replaced."""
    _architectures[architecture.name] = architecture


def supported_architectures() -> tuple[str, ...]:
    """Return the names of registered architectures."""
    return tuple(_architectures)


def find_architecture(name: str, source: object, *, runs_alone: bool = False) -> Architecture:
    """Return an architecture by name; `source` names the origin of the name for errors.

    A model that `runs_alone` (see `PipelineConfig`) may be any that transformers supports. Raises
    `CheckpointError` listing the known ones, and how others run.
    """
    found = _architectures.get(name)
    if found is None and runs_alone:
        return FALLBACK
    if found is None:
        raise CheckpointError(
            f"{source}: architecture '{name}' is not supported; "
            f"these are: {', '.join(_architectures)}. transformers runs others, one request at a "
            "time: set max_batch_size=1 and model.kv_cache.enable_prefix_caching=false"
        )
    return found
