"""`AutoModel`: any causal language model of the transformers package, one request at a time.

The fallback for architectures that have no file here. Such a model keeps its keys and values
itself, outside of the paged pool: requests share nothing, and a prompt is fed in one piece.
"""

from __future__ import annotations

import inspect
from collections.abc import Container
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from llm.batch import (
    ForwardBatch,
    KVCacheInputs,
    ModelInputs,
    ModelOutputs,
    ReturnHiddenStates,
)
from llm.config import PipelineConfig
from llm.errors import CheckpointError
from llm.models.base import upper_bounded_default
from llm.models.causal import CausalModel
from llm.models.hf_config import HuggingFaceConfig, ModelShape
from llm.models.weights import WeightsFormat

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_REPORTED = 5


def cache_name(parameters: Container[str]) -> str:
    """Return what a model's `forward` calls its cache: transformers renamed it in 5.24."""
    return "cache" if "cache" in parameters else "past_key_values"


class AutoModel(CausalModel):
    """Wraps `transformers.AutoModelForCausalLM`. Needs the extra `hub`."""

    uses_kv_pool: ClassVar[bool] = False
    can_capture: ClassVar[bool] = False

    @classmethod
    def shape(cls, huggingface_config: HuggingFaceConfig) -> ModelShape:
        """See `PipelineModel`; reads the keys that transformers uses for these sizes."""
        config = _read_config(huggingface_config).get_text_config()
        num_heads = config.num_attention_heads
        return ModelShape(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            max_positions=getattr(config, "max_position_embeddings", None) or 4096,
        )

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """See `PipelineModel`."""
        limit = cls.shape(huggingface_config).max_positions
        return upper_bounded_default(upper_bound=limit, default=pipeline_config.max_length)

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Return an estimate: a few dozen float32 hidden states for each token of the longest
        prompt.
        """
        shape = cls.shape(huggingface_config)
        tokens = cls.calculate_max_seq_len(pipeline_config, huggingface_config)
        return 4 * (24 * tokens * shape.hidden_size + 3 * shape.vocab_size)

    def load_weights(self) -> None:
        """See `PipelineModel`. Also raises `CheckpointError` for errors that transformers only
        logs.
        """
        if self.return_hidden_states is not ReturnHiddenStates.NONE:
            raise CheckpointError(f"{self.huggingface_config.path}: this model cannot embed")
        if self.adapter is not None or self.pipeline_config.model.weight_path:
            raise CheckpointError(
                "weight_path and adapters are for architectures that are built in"
            )
        self.vocab_size = self.shape(self.huggingface_config).vocab_size
        self._model = self._load()
        parameters = inspect.signature(self._model.forward).parameters
        self._takes_kept_rows = "logits_to_keep" in parameters
        self._cache_name = cache_name(parameters)
        self._caches: dict[str, tuple[Any, int]] = {}  # by request: cache, number of tokens in it

    def _load(self) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        path = self.huggingface_config.path
        try:
            found: Any = AutoModelForCausalLM.from_pretrained(
                path.parent,
                config=_read_config(self.huggingface_config),
                dtype=self.dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=self.weights.format is WeightsFormat.SAFETENSORS,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise CheckpointError(f"{path}: transformers cannot load it: {error}") from error
        model, report = found
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if report[kind]:
                names = ", ".join(sorted(map(str, report[kind]))[:MAX_REPORTED])
                raise CheckpointError(f"{path.parent}: {kind.replace('_', ' ')}: {names}")
        loaded: PreTrainedModel = model.to(self.devices[0]).eval()
        return loaded

    def hidden_states(self, batch: ForwardBatch, cache: KVCacheInputs) -> Tensor:
        """Not supported: whether transformers normalises hidden states depends on the
        architecture.
        """
        raise NotImplementedError("AutoModel has no hidden states")

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """See `PipelineModel`. Raises `ValueError` for a batch of more than one row."""
        batch = model_inputs.forward_batch
        if len(batch.request_ids) != 1:
            raise ValueError(f"one request at a time, not {len(batch.request_ids)}")
        num_rows = model_inputs.logit_offsets[-1]
        with torch.inference_mode():
            logits = self._forward(batch, num_rows)[:num_rows]
        return ModelOutputs(
            logits,
            logits[-1:] if model_inputs.sampling_rows else logits[:0],
            model_inputs.logit_offsets,
        )

    def _forward(self, batch: ForwardBatch, num_rows: int) -> Tensor:
        """Return float32 logits of the last `num_rows` tokens (at least one), [rows, V]."""
        request_id = batch.request_ids[0]
        kept = {"logits_to_keep": max(num_rows, 1)} if self._takes_kept_rows else {}
        answer = self._model(
            input_ids=batch.input_ids[None],
            use_cache=True,
            **{self._cache_name: self._cache(batch)},
            **kept,
        )
        self._caches[request_id] = (answer[self._cache_name], batch.context_lens[0])
        logits: Tensor = answer.logits[0, -max(num_rows, 1) :].float()
        return logits

    def _cache(self, batch: ForwardBatch) -> Any:
        """Return the cache of the request's earlier forwards; a new one when it starts again."""
        request_id, start = batch.request_ids[0], batch.context_lens[0] - batch.query_lens[0]
        cache, length = self._caches.pop(request_id, (None, 0))
        if start == 0:
            return None
        if length != start:
            raise ValueError(
                f"request {request_id} continues at {start}, but its cache holds {length}"
            )
        return cache

    def release(self, request_id: str) -> None:
        """See `PipelineModel`."""
        self._caches.pop(request_id, None)


def _read_config(huggingface_config: HuggingFaceConfig) -> PreTrainedConfig:
    path = huggingface_config.path
    try:
        from transformers import AutoConfig

        # False, not None: transformers would ask on the terminal whether to run remote code.
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path.parent, local_files_only=True, trust_remote_code=False
        )
    except ImportError as error:
        raise CheckpointError(
            f"{path}: only transformers may support this architecture: pip install 'sonant[hub]'"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: transformers does not support it either: {error}"
        ) from error
    return config
