"""Choice of the pipeline for a configuration."""

from __future__ import annotations

from llm.config import PipelineConfig
from llm.models.pooling import is_embedding_model
from llm.pipeline.base import TextGenerationPipelineInterface
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.structured.grammar import TokenSpelling


def create_pipeline(
    config: PipelineConfig, tokenizer: TokenSpelling | None = None
) -> TextGenerationPipelineInterface:
    """Create a loaded pipeline; `enable_overlap_scheduler` selects the class.

    Raises the errors of the constructors. On the CPU `force` keeps overlap enabled, and every step
    is waited for. An embedding model samples no token that a next step could feed.
    """
    if config.enable_overlap_scheduler and not is_embedding_model(config.model.model_path):
        return OverlapTextGenerationPipeline(
            config, tokenizer=tokenizer, disable_overlap=config.model.on_cpu
        )
    return TextGenerationPipeline(config, tokenizer=tokenizer)
