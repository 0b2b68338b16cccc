"""Engines that run the same requests in different ways: each must give the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from llm.engine.engine import Engine, assemble_engine, create_engine
from llm.pipeline.base import TextGenerationPipelineInterface
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import Token, TokenChunk
from tests.llm.llama_checkpoints import pipeline_config
from tests.llm.runner.host_graphs import use_graphs
from tests.llm.runner.late_stream import LateStream


def overlapping(folder: Path) -> Engine:
    """Return an engine that prepares steps before it has the results of those before."""
    config = pipeline_config(folder, max_batch_size=8, max_num_steps=1)
    return assemble_engine(OverlapTextGenerationPipeline(config, stream=LateStream()), config)


def captured(folder: Path, *, samples: bool, overlaps: bool) -> Engine:
    """Return an engine that replays forwards, and with `samples` also samples inside of them."""
    config = pipeline_config(folder, max_batch_size=8, max_batch_input_tokens=48)
    pipeline: TextGenerationPipelineInterface = TextGenerationPipeline(config)
    if overlaps:
        pipeline = OverlapTextGenerationPipeline(config, stream=LateStream())
    if samples:
        pipeline.runner.sample_on_device()
    use_graphs(pipeline.runner)
    return assemble_engine(pipeline, config)


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "one step at a time": lambda f: create_engine(pipeline_config(f, max_batch_size=8)),
    "several steps a turn": lambda f: create_engine(pipeline_config(f, max_num_steps=4)),
    "ahead of the results": overlapping,
    "replayed": lambda f: captured(f, samples=False, overlaps=False),
    "replayed with sampling": lambda f: captured(f, samples=True, overlaps=False),
    "replayed ahead": lambda f: captured(f, samples=True, overlaps=True),
}


def tokens_of(chunks: Iterable[TokenChunk]) -> list[Token]:
    """Return all tokens of a request."""
    return [token for chunk in chunks for token in chunk.token_ids]
