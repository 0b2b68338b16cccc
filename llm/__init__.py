"""The token core: token ids in, token ids out. It is independent of text, audio and gRPC.

The public names are imported on first use, so that a value such as `Request` can be imported
without torch and pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm.attention.base import AttentionBackend
    from llm.batch import (
        ForwardBatch,
        ForwardMode,
        ModelInputs,
        ModelOutputs,
        RequestOutput,
        ReturnHiddenStates,
        ReturnLogits,
        ScheduledBatch,
        ScheduledRow,
        StepOutput,
    )
    from llm.config import (
        Architecture,
        KVCacheConfig,
        LoRAConfig,
        ModelConfig,
        PipelineConfig,
        PipelineRole,
        ProfilingConfig,
        SamplingConfig,
        SpeculativeConfig,
        StrictModel,
    )
    from llm.delays import FrameDelays
    from llm.engine.engine import Engine, TokenStream, create_engine
    from llm.engine.types import EngineStats, StepHook
    from llm.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        EngineStoppedError,
        LLMError,
        QueueFullError,
        RanksLostError,
        RequestError,
    )
    from llm.kernels.cpu.team import set_product_threads
    from llm.kv_cache.kv_pool import KVPool
    from llm.kv_cache.layer_marks import LayerMarks
    from llm.kv_cache.manager import KVCacheManager
    from llm.kv_cache.peer_pool import PeerPool
    from llm.kv_cache.pool_handle import PoolHandle
    from llm.kv_cache.state_pool import StatePart, StatePool
    from llm.kv_cache.token_pools import ReqToTokenPool, TokenToKVPoolAllocator
    from llm.kv_cache.transfer import LaunchedPages, PageClaim, PageTransfer
    from llm.lora.manager import LoRAManager
    from llm.models.base import PipelineModel
    from llm.models.encoding import with_text_encoding
    from llm.models.gguf import GGUFFile
    from llm.models.pooling import is_embedding_model
    from llm.models.profiling import Profiler
    from llm.models.session import EngineSession
    from llm.models.weights import WeightsAdapter, WeightsFormat
    from llm.pipeline.overlap import OverlapTextGenerationPipeline
    from llm.pipeline.text_generation import TextGenerationPipeline
    from llm.request import (
        VECTOR_WIDTH,
        CodeSampling,
        FinishReason,
        Request,
        SamplingParams,
        Token,
        TokenBuffer,
        TokenChunk,
        TokenLogprob,
        as_ids,
        paired_token,
    )
    from llm.runner.device_memory import get_available_gpu_memory, get_total_gpu_memory
    from llm.runner.model_runner import ModelRunner
    from llm.runner.tensor_api.interface import LogitsProcessorOutput
    from llm.sampling.log_probabilities import LogProbabilities
    from llm.sequence import ReceivedPrompt
    from llm.speculative.metrics import SpeculativeDecodingMetrics
    from llm.stats import BatchStats, Histogram, HistogramCounter, SequenceStats
    from llm.structured.grammar import TokenSpelling, check_json_schema

__all__ = [
    "VECTOR_WIDTH",
    "Architecture",
    "AttentionBackend",
    "BatchStats",
    "CapacityError",
    "CheckpointError",
    "CodeSampling",
    "ConfigError",
    "Engine",
    "EngineSession",
    "EngineStats",
    "EngineStoppedError",
    "FinishReason",
    "ForwardBatch",
    "ForwardMode",
    "FrameDelays",
    "GGUFFile",
    "Histogram",
    "HistogramCounter",
    "KVCacheConfig",
    "KVCacheManager",
    "KVPool",
    "LLMError",
    "LaunchedPages",
    "LayerMarks",
    "LoRAConfig",
    "LoRAManager",
    "LogProbabilities",
    "LogitsProcessorOutput",
    "ModelConfig",
    "ModelInputs",
    "ModelOutputs",
    "ModelRunner",
    "OverlapTextGenerationPipeline",
    "PageClaim",
    "PageTransfer",
    "PeerPool",
    "PipelineConfig",
    "PipelineModel",
    "PipelineRole",
    "PoolHandle",
    "Profiler",
    "ProfilingConfig",
    "QueueFullError",
    "RanksLostError",
    "ReceivedPrompt",
    "ReqToTokenPool",
    "Request",
    "RequestError",
    "RequestOutput",
    "ReturnHiddenStates",
    "ReturnLogits",
    "SamplingConfig",
    "SamplingParams",
    "ScheduledBatch",
    "ScheduledRow",
    "SequenceStats",
    "SpeculativeConfig",
    "SpeculativeDecodingMetrics",
    "StatePart",
    "StatePool",
    "StepHook",
    "StepOutput",
    "StrictModel",
    "TextGenerationPipeline",
    "Token",
    "TokenBuffer",
    "TokenChunk",
    "TokenLogprob",
    "TokenSpelling",
    "TokenStream",
    "TokenToKVPoolAllocator",
    "WeightsAdapter",
    "WeightsFormat",
    "as_ids",
    "check_json_schema",
    "create_engine",
    "get_available_gpu_memory",
    "get_total_gpu_memory",
    "is_embedding_model",
    "paired_token",
    "set_product_threads",
    "with_text_encoding",
]

_HOMES = {
    "llm.attention.base": ("AttentionBackend",),
    "llm.batch": (
        "ForwardBatch",
        "ForwardMode",
        "ModelInputs",
        "ModelOutputs",
        "RequestOutput",
        "ReturnHiddenStates",
        "ReturnLogits",
        "ScheduledBatch",
        "ScheduledRow",
        "StepOutput",
    ),
    "llm.config": (
        "Architecture",
        "KVCacheConfig",
        "LoRAConfig",
        "ModelConfig",
        "PipelineConfig",
        "PipelineRole",
        "ProfilingConfig",
        "SamplingConfig",
        "SpeculativeConfig",
        "StrictModel",
    ),
    "llm.delays": ("FrameDelays",),
    "llm.engine.engine": ("Engine", "TokenStream", "create_engine"),
    "llm.engine.types": ("EngineStats", "StepHook"),
    "llm.errors": (
        "CapacityError",
        "CheckpointError",
        "ConfigError",
        "EngineStoppedError",
        "LLMError",
        "QueueFullError",
        "RanksLostError",
        "RequestError",
    ),
    "llm.kernels.cpu.team": ("set_product_threads",),
    "llm.kv_cache.kv_pool": ("KVPool",),
    "llm.kv_cache.manager": ("KVCacheManager",),
    "llm.kv_cache.layer_marks": ("LayerMarks",),
    "llm.kv_cache.peer_pool": ("PeerPool",),
    "llm.kv_cache.pool_handle": ("PoolHandle",),
    "llm.kv_cache.state_pool": ("StatePart", "StatePool"),
    "llm.kv_cache.token_pools": ("ReqToTokenPool", "TokenToKVPoolAllocator"),
    "llm.kv_cache.transfer": ("LaunchedPages", "PageClaim", "PageTransfer"),
    "llm.lora.manager": ("LoRAManager",),
    "llm.models.base": ("PipelineModel",),
    "llm.models.encoding": ("with_text_encoding",),
    "llm.models.gguf": ("GGUFFile",),
    "llm.models.pooling": ("is_embedding_model",),
    "llm.models.profiling": ("Profiler",),
    "llm.models.session": ("EngineSession",),
    "llm.models.weights": ("WeightsAdapter", "WeightsFormat"),
    "llm.pipeline.overlap": ("OverlapTextGenerationPipeline",),
    "llm.pipeline.text_generation": ("TextGenerationPipeline",),
    "llm.request": (
        "VECTOR_WIDTH",
        "CodeSampling",
        "FinishReason",
        "Request",
        "SamplingParams",
        "Token",
        "TokenBuffer",
        "TokenChunk",
        "TokenLogprob",
        "as_ids",
        "paired_token",
    ),
    "llm.runner.device_memory": ("get_available_gpu_memory", "get_total_gpu_memory"),
    "llm.runner.model_runner": ("ModelRunner",),
    "llm.runner.tensor_api.interface": ("LogitsProcessorOutput",),
    "llm.sampling.log_probabilities": ("LogProbabilities",),
    "llm.speculative.metrics": ("SpeculativeDecodingMetrics",),
    "llm.sequence": ("ReceivedPrompt",),
    "llm.stats": ("BatchStats", "Histogram", "HistogramCounter", "SequenceStats"),
    "llm.structured.grammar": ("TokenSpelling", "check_json_schema"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
