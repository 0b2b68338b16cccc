"""A runner that was shut down restores a CUDA device's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm.config import PipelineConfig
from llm.runner.model_runner import ModelRunner
from tests.llm.llama_checkpoints import batch, row, write_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = 512
# bytes; memory that libraries keep from the first run on is allocated before the second one
LEFT = 2 * 2**20


def test_memory_is_back_after_a_shutdown(tmp_path: Path) -> None:
    """The runners themselves stay, as in an engine that was shut down."""
    model = {
        "model_path": str(write_llama(tmp_path)),
        "device_specs": ["cuda:0"],
        "disable_cuda_graph": True,  # each capture has a stream, whose scratch libraries keep
        "kv_cache": {"kv_cache_page_size": 16, "num_pages": 256},
    }
    config = PipelineConfig(model=model, max_batch_size=ROWS)
    runners = [ModelRunner(config) for _ in range(2)]
    left = []
    for runner in runners:
        runner.initialize()
        held = torch.cuda.memory_allocated()
        fed = row([3, 4, 5], [1])
        runner.step(runner.prepare(batch(fed)), runner.token_sampler.prepare([fed]))
        runner.shutdown()
        left.append(torch.cuda.memory_allocated())
        assert held - left[-1] > 8 * LEFT  # weights, pool, histories and scratch
    assert left[1] - left[0] < LEFT
