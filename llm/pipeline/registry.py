"""Which pipeline a configuration asks for."""

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
    """A loaded pipeline; `enable_overlap_scheduler` chooses. Raises what their constructors do.

    On the CPU overlap was kept by `force`, and waits for every step. An embedding model has no
    token that the next step could wait for.
    """
    if config.enable_overlap_scheduler and not is_embedding_model(config.model.model_path):
        return OverlapTextGenerationPipeline(
            config, tokenizer=tokenizer, disable_overlap=config.model.on_cpu
        )
    return TextGenerationPipeline(config, tokenizer=tokenizer)
