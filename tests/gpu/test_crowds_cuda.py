"""More requests than fit a GPU: they take turns, and memory never runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.engine_load import Job, Load, pipeline_of, release_memory, running
from benchmarks.shapes import LLAMA_1B, Shape
from llm.runner.memory_planning import MAX_ROWS
from tests.llm.engine.flood import Flood, throw
from tests.llm.llama_checkpoints import pipeline_config, write_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LITTLE_BYTES = 4e9
PROMPT, OUTPUT = 800, 90  # tokens: in pages nearly the expected number of a request, and not so
# so many that the last ones have to wait for running ones
SLACK = 1.1
SMALL = Shape(
    "small",
    {
        **LLAMA_1B.values,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "vocab_size": 32_000,
    },
)


def test_a_flood_on_a_small_pool(tmp_path: Path) -> None:
    """With captured forwards and overlap."""
    folder = write_llama(tmp_path, hidden_size=128, head_dim=64)
    config = pipeline_config(
        folder,
        device="cuda:0",
        encoding="bfloat16",
        num_pages=80,
        max_length=128,
        max_batch_size=64,
        enable_overlap_scheduler=True,
    )
    stats = throw(config, Flood(4096, prompt=40, output=60))
    assert stats.graphs is not None
    assert stats.graphs.replays > 0
    assert stats.graphs.prompt_replays > 0


@contextmanager
def no_more_than(num_bytes: float) -> Iterator[None]:
    """Limit torch to its present memory and so much more."""
    release_memory()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_as_many_rows_run_as_were_inferred(tmp_path: Path) -> None:
    """All at once, with nearly as many tokens as expected of each, in the memory allowed."""
    with no_more_than(SLACK * LITTLE_BYTES):
        free, _ = torch.cuda.mem_get_info()
        cache = {"device_memory_utilization": LITTLE_BYTES / free}
        values = {
            "max_length": 2 * (PROMPT + OUTPUT),
            "enable_overlap_scheduler": True,
            "model": {"device_specs": ["cuda:0"], "kv_cache": cache},
        }
        with running(SMALL, tmp_path, values) as engine:
            runner = pipeline_of(engine).runner
            rows = runner.max_running_requests
            assert 16 < rows < MAX_ROWS
            load = Load(engine, [Job((n,) * PROMPT, OUTPUT, 0.8) for n in range(rows)])
            load.wait_until(lambda: engine.stats().decoding == rows)
            done = load.wait(60)
            assert (done.is_whole, done.num_tokens) == (True, rows * OUTPUT)
            stats = engine.stats()
            assert (stats.failed_steps, stats.preemptions) == (0, 0)
