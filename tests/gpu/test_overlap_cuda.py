"""Overlap on a real GPU: the tokens of the plain pipeline, and results that arrive later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llm.config import PipelineConfig
from llm.engine.engine import create_engine
from llm.memory.transfer import to_device
from llm.pipeline.base import TextGenerationPipelineInterface
from llm.request import Request, SamplingParams, Token, TokenChunk
from llm.runner.device_stream import CudaStream
from tests.closeness import error
from tests.llm.llama_checkpoints import reference, write_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def generate(checkpoint: Path, **values: Any) -> dict[str, list[TokenChunk]]:
    model = {
        "model_path": str(checkpoint),
        "device_specs": ["cuda"],
        "kv_cache": {"kv_cache_page_size": 16, "num_pages": 64},
    }
    engine = create_engine(PipelineConfig(model=model, max_num_steps=1, **values))
    sampling = [
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(seed=3, max_tokens=30, repetition_penalty=1.2),
        SamplingParams(seed=4, max_tokens=20, top_logprobs=1),
    ]
    asked = [Request(f"r{n}", (5, 6 + n), params) for n, params in enumerate(sampling)]
    streams = [engine.submit(request) for request in asked]
    engine.start()
    found = {stream.request_id: list(stream) for stream in streams}
    engine.shutdown()
    return found


def test_the_same_tokens_as_without(tiny_checkpoint: Path) -> None:
    """Also log-probabilities, in a batch with requests without them."""
    expected = generate(tiny_checkpoint)
    found = generate(tiny_checkpoint, enable_overlap_scheduler=True)
    for name, chunks in expected.items():
        tokens, wanted = (
            [token for chunk in run for token in chunk.token_ids] for run in (found[name], chunks)
        )
        assert tokens == wanted
        entries, others = (
            [entry for chunk in run for entry in chunk.logprobs] for run in (found[name], chunks)
        )
        assert [e.token_id for e in entries] == (tokens if name == "r2" else [])
        # Relative to the largest: the same kernels, whose sums may have another order in another
        # graph.
        values, known = ([e.logprob for e in run] for run in (entries, others))
        assert error(torch.tensor(values), torch.tensor(known)) < 1e-3


def difference(
    checkpoint: Path, prompt: Sequence[Token], tokens: list[Token], others: list[Token]
) -> float:
    """Return the difference of the exact logits of the first two different tokens, in standard
    deviations of all logits; 0 if the tokens are the same.
    """
    for n, pair in enumerate(zip(tokens, others, strict=True)):
        if pair[0] != pair[1]:
            with torch.inference_mode():
                logits = reference(checkpoint)(torch.tensor([[*prompt, *tokens[:n]]])).logits[0, -1]
            return float(logits[list(pair)].diff().abs() / logits.std())
    return 0.0


@pytest.mark.parametrize("level", ["0", "2"])
@pytest.mark.parametrize(
    ("num_speakers", "others"),
    [(1, ()), (2, ()), (7, ()), (0, ((0, 50_000),)), (1, ((0, 50_000),))],
)
def test_common_ids_change_no_token(
    tmp_path: Path, num_speakers: int, others: tuple[tuple[int, int], ...], level: str
) -> None:
    """Compare tokens of requests that sample common ids, alone and next to one that samples any, or
    `others`. The first speaker samples few of them, at each position other ones.

    Logits of other ids come from another kernel, which rounds its input: of two ids with nearly
    the same logit it may find the other one.
    """
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    checkpoint = write_llama(tmp_path / "model", vocab_size=140_000, **sizes)
    model = {
        "model_path": str(checkpoint),
        "device_specs": ["cuda"],
        "quantization_encoding": "bfloat16",
        "kv_cache": {"kv_cache_page_size": 16, "num_pages": 64},
    }
    sampling = [
        SamplingParams(
            seed=n,
            max_tokens=40 - n,
            stop_token_ids=(100_500,),
            allowed_ranges=((100_000, 100_400),),
        )
        for n in range(num_speakers)
    ]
    if sampling:
        cycle = ((100_000, 100_040),), ((100_200, 100_240),), ((100_300, 100_340),)
        sampling[0] = replace(sampling[0], allowed_ranges=(), allowed_cycle=cycle)
    sampling.append(SamplingParams(temperature=0, max_tokens=12, allowed_ranges=others))
    found = []
    for common in (None, (100_000, 100_501)):
        config = PipelineConfig(
            model=model,
            max_num_steps=1,
            max_batch_size=8,
            enable_overlap_scheduler=True,
            use_experimental_kernels="true",
            pdl_level=level,
        )
        engine = create_engine(config.with_common_ids(common))
        assert isinstance(engine.pipeline, TextGenerationPipelineInterface)
        graphs = engine.pipeline.runner.graph_runner
        assert graphs is not None
        assert graphs.is_limited == (common is not None)
        asked = [Request(f"r{n}", (5, 6 + n), params) for n, params in enumerate(sampling)]
        streams = [engine.submit(request) for request in asked]
        engine.start()
        found.append([[t for chunk in stream for t in chunk.token_ids] for stream in streams])
        engine.shutdown()
    assert found[0][:-1] == found[1][:-1]
    most = 0.15 if num_speakers and others else 0.0  # there two logits nearly tie
    assert difference(checkpoint, asked[-1].prompt_ids, found[0][-1], found[1][-1]) <= most
    lengths = [len(tokens) for tokens in found[0]]
    assert all(lengths)
    assert max(lengths) > 12 or not num_speakers  # some are alone after the last one


def test_uploading_does_not_wait_for_the_gpu() -> None:
    stream = CudaStream()
    matrix = torch.randn(4096, 4096, device="cuda")
    host = torch.arange(10)

    def work() -> torch.Tensor:
        product = matrix
        for _ in range(50):
            product = product @ matrix / 64
        return to_device(host, product.device)

    copy = stream.download(stream.launch(work))
    host.zero_()  # the copy was made when it was requested
    assert not copy.is_ready
    assert copy.wait().tolist() == list(range(10))


def test_the_host_continues_while_the_gpu_works() -> None:
    stream = CudaStream()
    matrix = torch.randn(4096, 4096, device="cuda")

    def work() -> torch.Tensor:
        product = matrix
        for _ in range(50):
            product = product @ matrix / 64
        return product[0]

    copy = stream.download(stream.launch(work))
    assert not copy.is_ready
    assert len(copy.wait()) == 4096
    assert copy.is_ready
