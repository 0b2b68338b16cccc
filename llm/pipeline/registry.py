"""Which pipeline a configuration asks for."""

from __future__ import annotations

from llm.config import PipelineConfig
from llm.pipeline.base import TextGenerationPipelineInterface
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.structured.grammar import TokenSpelling


def create_pipeline(
    config: PipelineConfig, tokenizer: TokenSpelling | None = None
) -> TextGenerationPipelineInterface:
    """A loaded pipeline; `enable_overlap_scheduler` chooses. Raises what their constructors do.

    On the CPU overlap was kept by `force`, and waits for every step.
    """
    if config.enable_overlap_scheduler:
        return OverlapTextGenerationPipeline(
            config, tokenizer=tokenizer, disable_overlap=config.model.on_cpu
        )
    return TextGenerationPipeline(config, tokenizer=tokenizer)
