"""`TextGenerationPipelineInterface`: what the two pipelines share, which is all but the step.

It is the engine's `Pipeline`: one model on one device, loaded when constructed, used from one
thread at a time. It decides nothing about who runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from llm.batch import ScheduledBatch, ScheduledRow, StepOutput
from llm.config import PipelineConfig, SpeculativeConfig
from llm.errors import RequestError
from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.manager import KVCacheManager
from llm.memory import MemoryPlan
from llm.models.base import PipelineModel
from llm.models.hf_config import read_eos_token_ids
from llm.models.weights import WeightsAdapter, WeightsFormat
from llm.pipeline.embeddings import Embeddings
from llm.pipeline.kv_memory import create_kv_manager
from llm.pipeline.prompt_scores import PromptScores
from llm.request import Request
from llm.runner.device_stream import DeviceStream, create_stream
from llm.runner.graph_figures import GraphFigures
from llm.runner.model_runner import ModelRunner
from llm.speculative.draft import DraftModel, create_draft_runner
from llm.speculative.metrics import SpeculativeDecodingMetrics
from llm.speculative.verify import SpeculativeDecoding
from llm.structured.bitmask import StructuredOutput
from llm.structured.grammar import TokenSpelling


class TextGenerationPipelineInterface(ABC):
    """See the module; text and speech tokens alike."""

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        pipeline_model: type[PipelineModel[ScheduledRow]] | None = None,
        eos_token_id: int | None = None,
        weight_adapters: Mapping[WeightsFormat, WeightsAdapter] | None = None,
        tokenizer: TokenSpelling | None = None,
        *,
        stream: DeviceStream | None = None,
    ) -> None:
        """`pipeline_model` None: the architecture that the checkpoint names. `eos_token_id` is
        added to those of the checkpoint. `tokenizer` spells the vocabulary; structured output
        needs it. `stream` None: the device's own.

        Raises `CheckpointError`, `ConfigError`, `CapacityError`; `ValueError` for structured
        output without a tokenizer; `TypeError` for a model that is an instance, not a class.
        """
        if pipeline_model is not None and not isinstance(pipeline_model, type):
            raise TypeError(f"pipeline_model must be a class, not {pipeline_model!r}")
        self._config = pipeline_config
        self._tokenizer = tokenizer
        is_structured = pipeline_config.sampling.enable_structured_output
        if is_structured and tokenizer is None:
            raise ValueError("enable_structured_output needs the model's tokenizer")
        self.runner = ModelRunner(
            pipeline_config, model_type=pipeline_model, weight_adapters=weight_adapters
        )
        draft = self._load_models()
        self._stream = create_stream(self.runner.device) if stream is None else stream
        cache = pipeline_config.model.kv_cache
        runners = [self.runner] if draft is None else [self.runner, draft.runner]
        self._kv_manager = create_kv_manager(cache, runners, self._stream)
        self.structured = StructuredOutput(
            self.vocab_size, self.runner.device, tokenizer, enabled=is_structured
        )
        self.speculation: SpeculativeDecoding | None = None
        if draft is not None:
            speculative = pipeline_config.speculative or SpeculativeConfig()
            self.speculation = SpeculativeDecoding(speculative, self.runner, draft, self.structured)
        self.prompt_scores = PromptScores(enabled=pipeline_config.enable_echo)
        self.embeddings = Embeddings(self.runner.pooling, pools=pipeline_config.pool_embeddings)
        own = set() if eos_token_id is None else {eos_token_id}
        self.eos_token_ids = own.union(read_eos_token_ids(pipeline_config.model.model_path))

    def _load_models(self) -> DraftModel | None:
        """Load the model, and the draft model where there is one."""
        if self._config.draft_model is None:
            self.runner.initialize()
            return None
        planned = create_draft_runner(self._config, self.max_seq_len)
        self.runner.initialize(planned)
        running = self.runner.server_config  # its batch size is known by now
        draft = create_draft_runner(running, self.max_seq_len, self.memory_plan.num_pages)
        draft.initialize()
        return DraftModel(draft)

    @property
    def pipeline_config(self) -> PipelineConfig:
        """As given."""
        return self._config

    @property
    def tokenizer(self) -> TokenSpelling | None:
        """As given; the core asks nothing of it but how tokens are spelled."""
        return self._tokenizer

    @property
    def kv_manager(self) -> KVCacheManager:
        """The pages, which the scheduler claims and releases."""
        return self._kv_manager

    @property
    def vocab_size(self) -> int:
        """Ids the model knows are [0, vocab_size)."""
        return self.runner.vocab_size

    @property
    def max_seq_len(self) -> int:
        """Most tokens of one sequence, prompt and generated."""
        return self.runner.context_len

    @property
    def memory_plan(self) -> MemoryPlan:
        """How the device's memory is shared out."""
        plan = self.runner.memory_plan
        assert plan is not None  # `initialize` has made it
        return plan

    @property
    def draft_kv_blocks(self) -> list[KVPool] | None:
        """Keys and values of the draft model, a pool for each replica; None without one."""
        return None if self.speculation is None else self.speculation.draft.kv_blocks

    def spec_decode_metrics(self) -> SpeculativeDecodingMetrics | None:
        """What became of drafted tokens; None without a draft model."""
        return None if self.speculation is None else self.speculation.metrics()

    def graph_figures(self) -> GraphFigures | None:
        """How often decoding was replayed; None where it is not captured."""
        graphs = self.runner.graph_runner
        return None if graphs is None else graphs.figures()

    def warmup_graph_capture(self) -> None:
        """Capture the decode forward, before the first request. Loading has done so where it can.

        Raises `RuntimeError` where it cannot be captured.
        """
        graphs = self.runner.graph_runner
        if graphs is None:
            raise RuntimeError(
                "decoding cannot be captured: CUDA graphs need a GPU, an attention backend and a "
                "model that can be captured, no draft model, and disable_cuda_graph off"
            )
        graphs.capture()

    @property
    @abstractmethod
    def overlap_active(self) -> bool:
        """Whether `execute` answers one call later, and takes as long as the batch before."""

    @abstractmethod
    def has_pending_outputs(self) -> bool:
        """Whether results are still to come, with the next call, be its batch empty."""

    def is_alive(self) -> bool:
        """Whether further steps can run after one that raised."""
        return self._stream.is_alive()

    @abstractmethod
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Start a batch; return the results that are due."""

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; harmless the second time.

        The scheduler owns its pages; what is kept beside them goes here.
        """
        self.runner.release(request_id)
        self.structured.release(request_id)
        self.prompt_scores.release(request_id)
        self.embeddings.release(request_id)

    def admit(self, request: Request) -> None:
        """Raise `RequestError` for a request that this pipeline cannot run. Thread-safe."""
        self.structured.admit(request)
        self.prompt_scores.admit(request)
        self.embeddings.admit(request)
        self.runner.choice.admit(request.sampling)
        model = self.runner.loaded_model
        if request.sampling.top_logprobs is not None and model.no_log_probabilities:
            raise RequestError(model.no_log_probabilities)
        manager = model.lora_manager
        if manager is not None:
            manager.admit(request)
        elif request.lora:
            raise RequestError("adapters need lora.enable_lora")

    def initialize_bitmask(self, batch: list[ScheduledRow]) -> np.ndarray | None:
        """int32 [B, V] of ones; None when no request of the batch has a schema."""
        return self.structured.initialize_bitmask(batch)

    def update_for_structured_output(
        self, context: ScheduledRow, bitmask: np.ndarray, index: int
    ) -> None:
        """Set one row of a bitmask to what the request may sample. Raises `ValueError`."""
        self.structured.update_for_structured_output(context, bitmask, index)

    def shutdown(self) -> None:
        """Let go of model and memory. Calling it again is harmless."""
        self.runner.shutdown()
        if self.speculation is not None:
            self.speculation.draft.shutdown()
