"""Whole models with grouped experts against those with separate ones; run by `test_kernels.py` with
Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from llm.kv_cache.state_slots import FIRST_STATE, StatePages
from llm.layers.factory import BY_EXPERT, LinearFactory
from llm.runner.model_runner import ModelRunner
from tests.llm.kernels.triton_interpreter import repair_interpreter
from tests.llm.llama_checkpoints import batch, pipeline_config, random_ids, row
from tests.llm.qwen3_moe_checkpoints import write_qwen3_moe
from tests.llm.qwen3_next_checkpoints import ATTENTION, DELTA_NET, EXPERTS, write_qwen3_next

repair_interpreter()

WRITERS: dict[str, Callable[[Path], Path]] = {
    "qwen3 moe": lambda folder: write_qwen3_moe(folder, num_hidden_layers=2),
    "qwen3 next": lambda folder: write_qwen3_next(
        folder, num_hidden_layers=2, layer_types=[DELTA_NET, ATTENTION], **EXPERTS
    ),
}


def logits(folder: Path, num_products: int) -> Tensor:
    """Return the logits of a decode step in one batch with another prompt."""
    runner = ModelRunner(pipeline_config(folder, max_batch_size=4))
    runner.initialize()
    assert runner.loaded_model.linear_backends.get(BY_EXPERT, 0) == num_products
    pages = [StatePages.of([1 + n], FIRST_STATE + n) for n in range(2)]
    ids = random_ids(9, 96)
    runner.forward(runner.prepare(batch(row(ids[:8], pages[0]))))
    rows = (row(ids[8:], pages[0], 8), row(ids[:3], pages[1], request_id="b"))
    return runner.forward(runner.prepare(batch(*rows))).logits


@pytest.mark.parametrize(("name", "num_layers"), [("qwen3 moe", 2), ("qwen3 next", 1)])
def test_a_model(
    name: str, num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = WRITERS[name](tmp_path)
    expected = logits(folder, 0)
    monkeypatch.setattr(LinearFactory, "groups_experts", True)
    assert float((logits(folder, 2 * num_layers) - expected).abs().max()) < 1e-4
