"""Token ids in, token ids out: the KV-cached core. It knows no text, no audio, no gRPC.

The public names are imported on first use, so that asking for a value such as `Request` costs
neither torch nor pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from llm.engine import Engine, create_engine
    from llm.engine_figures import BatchFigures
    from llm.engine_types import EngineStats, StepHook, TokenStream
    from llm.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        EngineStoppedError,
        LLMError,
        QueueFullError,
        RequestError,
    )
    from llm.kernels.cpu.team import set_product_threads
    from llm.models.encoding import with_text_encoding
    from llm.models.pooling import is_embedding_model
    from llm.models.profiling import Profiler
    from llm.request import (
        FinishReason,
        Request,
        RequestTimings,
        SamplingParams,
        TokenChunk,
        TokenLogprob,
    )
    from llm.scheduler.figures import Histogram, SequenceFigures, Tally
    from llm.structured.grammar import TokenSpelling, check_json_schema

__all__ = [
    "Architecture",
    "BatchFigures",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineStats",
    "EngineStoppedError",
    "FinishReason",
    "Histogram",
    "KVCacheConfig",
    "LLMError",
    "LoRAConfig",
    "ModelConfig",
    "PipelineConfig",
    "PipelineRole",
    "Profiler",
    "ProfilingConfig",
    "QueueFullError",
    "Request",
    "RequestError",
    "RequestTimings",
    "SamplingConfig",
    "SamplingParams",
    "SequenceFigures",
    "SpeculativeConfig",
    "StepHook",
    "StrictModel",
    "Tally",
    "TokenChunk",
    "TokenLogprob",
    "TokenSpelling",
    "TokenStream",
    "check_json_schema",
    "create_engine",
    "is_embedding_model",
    "set_product_threads",
    "with_text_encoding",
]

_HOMES = {
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
    "llm.engine": ("Engine", "create_engine"),
    "llm.engine_figures": ("BatchFigures",),
    "llm.engine_types": ("EngineStats", "StepHook", "TokenStream"),
    "llm.errors": (
        "CapacityError",
        "CheckpointError",
        "ConfigError",
        "EngineStoppedError",
        "LLMError",
        "QueueFullError",
        "RequestError",
    ),
    "llm.request": (
        "FinishReason",
        "Request",
        "RequestTimings",
        "SamplingParams",
        "TokenChunk",
        "TokenLogprob",
    ),
    "llm.kernels.cpu.team": ("set_product_threads",),
    "llm.models.encoding": ("with_text_encoding",),
    "llm.models.pooling": ("is_embedding_model",),
    "llm.models.profiling": ("Profiler",),
    "llm.scheduler.figures": ("Histogram", "SequenceFigures", "Tally"),
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
