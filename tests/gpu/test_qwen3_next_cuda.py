"""Qwen3-Next on a GPU: in batches the tokens of transformers, eagerly and from CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from llm.config import PipelineConfig
from llm.engine.engine import create_engine
from llm.request import Request, SamplingParams
from tests.llm.llama_checkpoints import random_ids, reference
from tests.llm.qwen3_next_checkpoints import EXPERTS, QWEN3_NEXT, write_qwen3_next

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_TOKENS = 24
PROMPTS = [tuple(random_ids(length, 96, seed=length)) for length in (5, 1, 40, 2, 17, 33)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_next") / "dense"
    return write_qwen3_next(folder, hidden_size=256, head_dim=64, initializer_range=0.1)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_next(
        tmp_path_factory.mktemp("qwen3_next") / "sparse", head_dim=64, **EXPERTS
    )


def greedy(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """Return what transformers generates on the CPU, without the ids that end a text."""
    ids = torch.tensor([list(prompt)])
    options: Any = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None}
    found: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    return [
        token for token in found[0, len(prompt) :].tolist() if token != QWEN3_NEXT["eos_token_id"]
    ]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("model_name", "captures"),
    [("dense", False), ("dense", True), ("sparse", False), ("sparse", True)],
)
def test_greedy_tokens_in_a_batch(
    model_name: str, captures: bool, overlaps: bool, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model_name)
    model = reference(folder)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    config = PipelineConfig(
        model={
            "model_path": str(folder),
            "device_specs": ["cuda"],
            "quantization_encoding": "float32",
            "attention_backend": "gathered",
            "disable_cuda_graph": not captures,
            "kv_cache": {"kv_cache_page_size": 16, "num_pages": 64},
        },
        max_batch_size=8,
        max_num_steps=1,
        enable_overlap_scheduler=overlaps,
    )
    engine = create_engine(config)
    engine.start()
    try:
        for turn in range(2):  # the second time in states that were used
            streams = [
                engine.submit(Request(f"{turn}.{n}", prompt, GREEDY))
                for n, prompt in enumerate(PROMPTS)
            ]
            found = [[t for chunk in stream for t in chunk.token_ids] for stream in streams]
            assert found == expected
        graphs = engine.stats().graphs
        assert (graphs is not None) == captures
        assert graphs is None or (graphs.replays > NUM_TOKENS and graphs.eager_decodes == 0)
    finally:
        engine.shutdown()
