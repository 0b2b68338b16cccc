"""Number formats on a CUDA device: narrow ones are close to float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm.runner.model_runner import ModelRunner
from tests.llm.llama_checkpoints import batch, pipeline_config, row, write_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCES = {"float16": 0.02, "bfloat16": 0.15}  # of the largest logit: 10 and 7 bits


def logits(folder: Path, encoding: str) -> torch.Tensor:
    runner = ModelRunner(pipeline_config(folder, encoding=encoding, device="cuda:0"))
    runner.initialize()
    assert runner.dtype == runner.kv_cache_dtype == getattr(torch, encoding)
    fed = row([5 * n % 96 for n in range(40)], [1, 2, 3])
    outputs = runner.forward(runner.prepare(batch(fed)))
    return outputs.next_token_logits.float().cpu()


@pytest.mark.parametrize("encoding", TOLERANCES)
def test_narrow_formats_are_near_float32(tmp_path: Path, encoding: str) -> None:
    folder = write_llama(tmp_path)
    expected = logits(folder, "float32")
    got = logits(folder, encoding)
    assert not torch.equal(got, expected)
    assert (got - expected).abs().max() <= TOLERANCES[encoding] * expected.abs().max()
