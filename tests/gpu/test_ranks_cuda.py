"""A model on two GPUs: the tokens of one GPU, collectives in captured graphs, a lost rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from llm.config import PipelineConfig
from llm.engine.engine import create_engine
from llm.request import FinishReason, Request, SamplingParams, Token
from tests.gpu.test_cuda_graphs import SHAPE, VOCAB
from tests.llm.llama_checkpoints import random_ids, write_llama
from tests.llm.parallel.engines import pipeline_of, tokens, wait_for, wait_stopped
from tests.llm.qwen3_moe_checkpoints import write_qwen3_moe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

TWO = ["cuda:0", "cuda:1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), **SHAPE)


def config(checkpoint: Path, devices: list[str], **keys: Any) -> PipelineConfig:
    """Return a configuration in float32 with attention that can be captured in it."""
    model = {
        "model_path": str(checkpoint),
        "device_specs": devices,
        "quantization_encoding": "float32",
        "attention_backend": "gathered",
        "kv_cache": {"kv_cache_page_size": 16, "num_pages": 128},
        **keys.pop("model", {}),
    }
    keys = {"max_batch_size": 8, "sampling": {"enable_penalties": True}} | keys
    return PipelineConfig(model=model, **keys)


def run(checkpoint: Path, devices: list[str], **keys: Any) -> tuple[list[list[Token]], int]:
    """Return the tokens of all requests, and the number of replayed decode forwards."""
    engine = create_engine(config(checkpoint, devices, **keys))
    pipeline = pipeline_of(engine)
    found, stats = tokens(engine), pipeline.graph_stats()
    engine.shutdown()
    buffers = pipeline.runner.loaded_model.signal_buffers
    assert [buffer.device for buffer in buffers] == [torch.device("cuda:0")] * (len(devices) - 1)
    pipeline.shutdown()
    return found, 0 if stats is None else stats.replays


@pytest.mark.parametrize("overlaps", [False, True])
def test_two_gpus_generate_the_tokens_of_one(checkpoint: Path, overlaps: bool) -> None:
    keys = {"enable_overlap_scheduler": overlaps, "max_num_steps": 1 if overlaps else 4}
    expected, _ = run(checkpoint, TWO[:1], **keys)
    found, replays = run(checkpoint, TWO, **keys)
    assert replays > 0
    assert found == expected
    eager, replays = run(checkpoint, TWO, model={"disable_cuda_graph": True}, **keys)
    assert (eager, replays) == (expected, 0)


@pytest.mark.parametrize("overlaps", [False, True])
def test_two_gpus_with_experts_generate_the_tokens_of_one(tmp_path: Path, overlaps: bool) -> None:
    """Whole experts on each, and a part of each expert."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    folder = write_qwen3_moe(tmp_path, **heads, initializer_range=0.4)
    keys = {"enable_overlap_scheduler": overlaps, "max_num_steps": 1}
    expected, _ = run(folder, TWO[:1], **keys)
    for ep_size in (1, 2):
        found, replays = run(folder, TWO, ep_size=ep_size, **keys)
        assert replays > 0
        assert found == expected
    eager, _ = run(folder, TWO, ep_size=2, model={"disable_cuda_graph": True}, **keys)
    assert eager == expected


def test_a_group_ends_after_its_collectives_were_captured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """NCCL takes sums of more than 4 MB: here those of more than 128 rows."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    folder = write_llama(tmp_path, **SHAPE | heads | {"hidden_size": 8192})
    found, replays = run(folder, TWO, max_num_steps=1, max_batch_size=256)
    assert min(map(len, found)) > 12
    assert replays > 0
    assert "not ended" not in caplog.text


def test_idle_gpus_run_forwards_together(tmp_path: Path) -> None:
    folder = write_qwen3_moe(tmp_path, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    expected, _ = run(folder, TWO[:1])
    engine = create_engine(config(folder, TWO, ep_size=2, execute_empty_batches=True))
    engine.start()
    wait_for(lambda: engine.stats().empty_steps > 10)
    found = tokens(engine)
    before = engine.stats().empty_steps
    wait_for(lambda: engine.stats().empty_steps > before + 10)
    engine.shutdown()
    pipeline_of(engine).shutdown()
    assert found == expected


def test_biases_of_a_matrix_whose_inputs_are_split(tmp_path: Path) -> None:
    """One rank adds them; all exchange their sums in the same way, also of one row."""
    folder = write_llama(tmp_path / "llama", attention_bias=True, mlp_bias=True, **SHAPE)
    expected, _ = run(folder, TWO[:1], max_num_steps=1)
    found, _ = run(folder, TWO, max_num_steps=1)
    assert found == expected


def test_a_killed_rank_does_not_leave_the_other_one_in_a_collective(checkpoint: Path) -> None:
    engine = create_engine(config(checkpoint, TWO))
    engine.start()
    leader = pipeline_of(engine).leader
    assert leader is not None
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    stream = engine.submit(Request("a", tuple(random_ids(9, VOCAB)), endless))
    assert next(stream).token_ids
    os.kill(leader.process_ids[0], signal.SIGKILL)
    assert list(stream)[-1].finish_reason is FinishReason.ERROR
    wait_stopped(engine)
    pipeline_of(engine).shutdown()
