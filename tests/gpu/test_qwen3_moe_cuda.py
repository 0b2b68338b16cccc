"""Qwen3-MoE on a GPU: in batches the tokens of transformers, eagerly and from CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from llm.config import PipelineConfig
from llm.engine.engine import create_engine
from llm.request import FinishReason, Request, SamplingParams
from tests.llm.llama_checkpoints import random_ids, reference
from tests.llm.parallel.engines import wait_for
from tests.llm.qwen3_moe_checkpoints import write_qwen3_moe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_TOKENS = 24
END = 3  # counted, but not delivered
PROMPTS = [tuple(random_ids(length, 96, seed=length)) for length in (5, 1, 40, 2, 17, 33)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("qwen3_moe")
    return write_qwen3_moe(place, head_dim=64, decoder_sparse_step=2, initializer_range=0.4)


def greedy(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """Return what transformers generates on the CPU, without the ids that end a text."""
    ids = torch.tensor([list(prompt)])
    options: Any = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None}
    found: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    return [token for token in found[0, len(prompt) :].tolist() if token != END]


def config(folder: Path, **keys: Any) -> PipelineConfig:
    model = {
        "model_path": str(folder),
        "device_specs": ["cuda"],
        "quantization_encoding": "float32",
        "attention_backend": "gathered",
        "kv_cache": {"kv_cache_page_size": 16, "num_pages": 64},
        **keys.pop("model", {}),
    }
    return PipelineConfig(model=model, max_batch_size=8, max_num_steps=1, **keys)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("captures", [False, True])
def test_greedy_tokens_in_a_batch(folder: Path, captures: bool, overlaps: bool) -> None:
    model = reference(folder)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    values = config(
        folder, model={"disable_cuda_graph": not captures}, enable_overlap_scheduler=overlaps
    )
    engine = create_engine(values)
    engine.start()
    try:
        for turn in range(2):  # the second time from cached prefixes
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


@pytest.mark.parametrize("encoding", ["bfloat16", "float8_e4m3fn"])
def test_idle_forwards_of_other_encodings(folder: Path, encoding: str) -> None:
    """Requests end, and an idle engine keeps running forwards, which do not queue up."""
    if encoding == "float8_e4m3fn" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with products of float8")
    values = config(folder, model={"quantization_encoding": encoding}, execute_empty_batches=True)
    engine = create_engine(values)
    engine.start()
    try:
        for name in "ab":
            chunks = list(engine.submit(Request(name, PROMPTS[2], GREEDY)))
            assert chunks[-1].finish_reason is FinishReason.LENGTH
            before = engine.stats().empty_steps
            wait_for(lambda before=before: engine.stats().empty_steps > before + 10)  # type: ignore[misc]
        assert engine.stats().failed_steps == 0
    finally:
        engine.shutdown()
