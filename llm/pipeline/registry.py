"""Choice of the pipeline for a configuration."""

from __future__ import annotations

from llm.config import PipelineConfig
from llm.errors import ConfigError, LLMError, RanksLostError
from llm.models.pooling import is_embedding_model
from llm.parallel.group import Group
from llm.pipeline.base import TextGenerationPipelineInterface
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.ranks import RankLeader
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.structured.grammar import TokenSpelling


def create_pipeline(
    config: PipelineConfig, tokenizer: TokenSpelling | None = None
) -> TextGenerationPipelineInterface:
    """Create a loaded pipeline; `enable_overlap_scheduler` selects the class.

    Raises the errors of the constructors, and `ConfigError` for several replicas. On the CPU
    `force` keeps overlap enabled, and every step is waited for. An embedding model samples no token
    that a next step could feed. A model on several devices gets a process for each but the first.
    """
    if config.model.data_parallel_degree > 1:
        raise ConfigError(
            f"model.data_parallel_degree={config.model.data_parallel_degree}: this process runs "
            "one engine; tts.serve starts one for each replica, with front_ends of at least 1"
        )
    if len(config.model.device_specs) == 1:
        return _create(config, tokenizer, None)
    leader = RankLeader(config)
    try:
        pipeline = _create(config, tokenizer, leader.group)
    except BaseException as error:
        is_lost = leader.is_lost
        leader.close()
        if is_lost and not isinstance(error, LLMError):
            raise RanksLostError("another rank has failed while the model was loaded") from error
        raise
    pipeline.leader = leader
    return pipeline


def create_rank(config: PipelineConfig, group: Group) -> TextGenerationPipelineInterface:
    """Create the pipeline of a rank other than 0."""
    return _create(config, None, group)


def _create(
    config: PipelineConfig, tokenizer: TokenSpelling | None, group: Group | None
) -> TextGenerationPipelineInterface:
    if config.enable_overlap_scheduler and not is_embedding_model(config.model.model_path):
        return OverlapTextGenerationPipeline(
            config, tokenizer=tokenizer, disable_overlap=config.model.on_cpu, group=group
        )
    return TextGenerationPipeline(config, tokenizer=tokenizer, group=group)
