"""The memory plan on a CUDA device: like test_estimates.py, measured by its allocator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.engine_load import release_memory
from benchmarks.shapes import LLAMA_1B
from llm.runner.model_runner import ModelRunner
from tests.gpu.flashinfer_runner import initialized
from tests.llm.llama_checkpoints import batch, random_ids, row
from tests.llm.runner.largest_prefill import largest_prefill
from tests.llm.runner.peak_memory import MODELS, NUMS_OF_ROWS, SLACK, create_runner
from tts.config.pipeline import AUTO_DECODER, AudioGenerationConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ON_GPU = {"device": "cuda:0", "encoding": "bfloat16", "attention_backend": "flashinfer"}
PUBLISHED_TOKENS = 8192  # of one step: the default of `max_batch_input_tokens`


@pytest.mark.parametrize("num_rows", NUMS_OF_ROWS)
@pytest.mark.parametrize("model", MODELS)
def test_the_largest_prefill_takes_no_more_than_was_planned(
    tmp_path: Path, model: str, num_rows: int
) -> None:
    peak = largest_prefill(initialized(create_runner(tmp_path, model, **ON_GPU)), num_rows)
    assert 0 < peak.ratio <= SLACK, str(peak)


@pytest.mark.parametrize("num_rows", [1, 256])
def test_so_does_that_of_a_published_model(tmp_path: Path, num_rows: int) -> None:
    model = {
        "model_path": str(LLAMA_1B.write(tmp_path)),
        "device_specs": ["cuda:0"],
        "attention_backend": "flashinfer",
        "kv_cache": {"num_pages": 1024},
    }
    config = AudioGenerationConfig(
        model=model,
        audio_decoder=AUTO_DECODER,
        run_model_test_mode=True,
        max_length=PUBLISHED_TOKENS,
        max_batch_size=256,
    )
    runner = initialized(ModelRunner(config))
    assert runner.server_config.max_batch_input_tokens == PUBLISHED_TOKENS
    peak = largest_prefill(runner, num_rows)
    assert peak.num_tokens == PUBLISHED_TOKENS
    assert 0 < peak.ratio <= SLACK, str(peak)


def test_the_attention_backend_takes_what_was_planned_for_it(tmp_path: Path) -> None:
    """Its scratch is allocated before a step begins, and is planned separately."""
    runner = initialized(create_runner(tmp_path, "wide", **ON_GPU))
    assert runner.attn_backend is not None
    runner.graph_runner = runner.attn_backend = None
    release_memory()
    before = torch.cuda.memory_allocated()
    runner.init_attention_backend()
    for step in (row(random_ids(40, 512), [1, 2, 3]), row([5], [1, 2, 3], 40)):
        runner.forward(runner._prepare_eagerly(batch(step)))
    torch.cuda.synchronize()
    release_memory()
    taken = torch.cuda.memory_allocated() - before
    planned = runner.attention_bytes(runner.max_running_requests)
    assert 0 < taken <= planned, f"{taken / 2**20:.1f} MiB of {planned / 2**20:.1f} MiB"
