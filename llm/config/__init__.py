"""Configuration of the core: `PipelineConfig`, its sections, and what this release lacks."""

from llm.config.architectures import Architecture, supported_architectures
from llm.config.default import default_config, set_default_config
from llm.config.not_yet import NOT_YET_AVAILABLE, NOT_YET_AVAILABLE_VALUES
from llm.config.pipeline import PipelineConfig, Session
from llm.config.report import RunningPlan
from llm.config.sections import (
    KVCacheConfig,
    LoRAConfig,
    ModelConfig,
    PipelineRole,
    ProfilingConfig,
    QuantizationEncoding,
    RopeType,
    SamplingConfig,
    SpeculativeConfig,
)
from llm.config.strict import StrictModel

__all__ = [
    "NOT_YET_AVAILABLE",
    "NOT_YET_AVAILABLE_VALUES",
    "Architecture",
    "KVCacheConfig",
    "LoRAConfig",
    "ModelConfig",
    "PipelineConfig",
    "PipelineRole",
    "ProfilingConfig",
    "QuantizationEncoding",
    "RopeType",
    "RunningPlan",
    "SamplingConfig",
    "Session",
    "SpeculativeConfig",
    "StrictModel",
    "default_config",
    "set_default_config",
    "supported_architectures",
]
