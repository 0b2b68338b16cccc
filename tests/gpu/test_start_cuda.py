"""A start on a GPU: kernels are compiled in threads, and steps find all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llm.config import PipelineConfig
from llm.runner.model_runner import ModelRunner
from tests.gpu.flashinfer_runner import initialized
from tests.llm.llama_checkpoints import batch, random_ids, row, write_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 6000  # rows of logits are sampled by several programs
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 384,  # of no other test: its kernels are new
    "intermediate_size": 640,
    "head_dim": 64,
}


@pytest.fixture
def compiled(tmp_path: Path) -> Iterator[list[str]]:
    """Names of the threads that have compiled a kernel, which none found on disk."""
    from triton import knobs

    found: list[str] = []

    def note(*, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            found.append(threading.current_thread().name)

    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(tmp_path / "kernels")
        knobs.compilation.listener = note
        yield found


def pages_of(place: int) -> list[int]:
    return [1 + 10 * place + step for step in range(10)]


@pytest.mark.parametrize("captures", [True, False])
def test_everything_is_compiled_at_start(
    tmp_path: Path, compiled: list[str], captures: bool
) -> None:
    config = PipelineConfig(
        model={
            "model_path": str(write_llama(tmp_path / "llama", **SHAPE)),
            "device_specs": ["cuda"],
            "quantization_encoding": "bfloat16",
            "disable_cuda_graph": not captures,
            "kv_cache": {"num_pages": 64},
        },
        max_batch_size=40,
        use_experimental_kernels="true",
        pdl_level="2",
    )
    runner = initialized(ModelRunner(config))
    del compiled[:]  # of the threads, and of kernels that only one start in a process needs
    for lengths in ([1], [5], [37], [100], [3, 20], [16, 16, 16]):
        rows = [
            row(random_ids(length, VOCAB, seed=length), pages_of(n), request_id=str(n))
            for n, length in enumerate(lengths)
        ]
        outputs = runner.forward(runner.prepare(batch(*rows)))
        runner.sample_tokens(outputs, runner.token_sampler.prepare(rows))
    for count in (1, 2, 3, 5, 16, 17, 33):
        rows = [row([7], [1 + n], 3, request_id=str(n)) for n in range(count)]
        plan = runner.token_sampler.prepare(rows)
        runner.step(runner.prepare(batch(*rows)), plan)
    assert compiled == []
    runner.shutdown()
