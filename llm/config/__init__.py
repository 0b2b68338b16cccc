"""Configuration of the core: `PipelineConfig`, its sections, and unsupported fields."""

from llm.config.architectures import Architecture, supported_architectures
from llm.config.pipeline import PipelineConfig, Session, default_config, set_default_config
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
from llm.config.unsupported import UNSUPPORTED_FIELDS, UNSUPPORTED_VALUES

__all__ = [
    "UNSUPPORTED_FIELDS",
    "UNSUPPORTED_VALUES",
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
