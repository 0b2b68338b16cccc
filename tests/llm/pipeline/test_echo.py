"""Echo: every prompt token is scored once, by the raw model, for every division of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from llm import (
    Engine,
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)
from llm.config import PipelineConfig
from llm.engine.engine import create_engine
from llm.kv_cache.manager import KVCacheManager
from tests.closeness import error
from tests.llm.llama_checkpoints import pipeline_config, random_ids, reference, write_llama

PROMPT = tuple(random_ids(45, 96, seed=3))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("echo"))


def request(name: str = "a", prompt: tuple[int, ...] = PROMPT, top: int = 2) -> Request:
    sampling = SamplingParams(
        seed=4, max_tokens=12, ignore_eos=True, top_logprobs=top, echo=True, temperature=0.7
    )
    return Request(name, prompt, sampling)


def run(engine: Engine, *requests: Request) -> list[list[TokenChunk]]:
    streams = [engine.submit(request) for request in requests]
    if not engine.is_running:
        engine.start()
    return [list(stream) for stream in streams]


def scores(chunks: list[TokenChunk]) -> list[TokenLogprob]:
    return [entry for chunk in chunks for entry in chunk.prompt_logprobs]


def tokens(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[TokenChunk]:
    engine = create_engine(pipeline_config(checkpoint, enable_echo=True))
    (chunks,) = run(engine, request())
    engine.shutdown()
    return chunks


def test_entries_are_those_of_an_independent_forward(
    checkpoint: Path, alone: list[TokenChunk]
) -> None:
    """Five tokens give five entries: none for the first, log-softmax of raw logits for others."""
    found = scores(alone)
    assert [entry.token_id for entry in found] == list(PROMPT)
    assert found[0] == TokenLogprob(PROMPT[0], None)
    with torch.inference_mode():
        logits = reference(checkpoint)(torch.tensor([PROMPT])).logits[0]
    expected = torch.log_softmax(logits.double(), dim=1)
    own = [expected[place, token] for place, token in enumerate(PROMPT[1:])]
    # Relative to the largest: float32 sums in another order differ by some 1e-6.
    assert error([entry.logprob for entry in found[1:]], own) < 3e-5
    for place, entry in enumerate(found[1:]):
        best = expected[place].topk(2)
        assert [token for token, _ in entry.top] == best.indices.tolist()
    assert len(tokens(alone)) == 12
    assert sum(len(chunk.logprobs) for chunk in alone) == 12


SCHEDULES: dict[str, dict[str, object]] = {
    "chunked": {"max_batch_input_tokens": 33},
    "short of pages": {"num_pages": 21, "page_size": 8, "kvcache_ce_watermark": 1.0},
    "several steps": {"max_num_steps": 4},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_changes_an_entry(checkpoint: Path, alone: list[TokenChunk], name: str) -> None:
    config = pipeline_config(checkpoint, enable_echo=True, **SCHEDULES[name])
    engine = create_engine(config)
    others = [request(f"b{n}", tuple(random_ids(30 + n, 96, seed=n))) for n in range(3)]
    free = Request("free", PROMPT, SamplingParams(seed=4, max_tokens=12, temperature=0.7))
    # The prompt is in the prefix cache now, and must be computed again to be scored.
    run(engine, free)
    chunks, *beside = run(engine, request(), *others)
    assert scores(chunks) == scores(alone)
    assert tokens(chunks) == tokens(alone)
    assert chunks[-1].cached_prompt_tokens == 0
    for other, found in zip(others, beside, strict=True):
        assert [entry.token_id for entry in scores(found)] == list(other.prompt_ids)
    if name == "chunked":
        assert sum(bool(chunk.prompt_logprobs) for chunk in chunks) > 1
    if name == "short of pages":
        assert engine.stats().preemptions > 0
    assert engine.stats().used_pages == 0
    engine.shutdown()


def test_a_prompt_of_one_token_and_no_alternatives(checkpoint: Path) -> None:
    engine = create_engine(pipeline_config(checkpoint, enable_echo=True))
    one, none = run(engine, request("one", (7,)), request("none", PROMPT[:4], top=0))
    assert scores(one) == [TokenLogprob(7, None)]
    assert all(entry.top == () for entry in scores(none))
    assert all(entry.logprob is not None for entry in scores(none)[1:])
    assert one[-1].finish_reason is FinishReason.LENGTH
    engine.shutdown()


def test_echo_is_asked_for_when_the_model_is_built(checkpoint: Path) -> None:
    engine = create_engine(pipeline_config(checkpoint))
    with pytest.raises(RequestError, match="enable_echo"):
        engine.submit(request())
    engine.shutdown()
    with pytest.raises(RequestError, match="top_logprobs"):
        SamplingParams(echo=True)
    config = PipelineConfig(enable_echo=True)
    assert config.sampling.enable_variable_logits
    assert not PipelineConfig().sampling.enable_variable_logits


def test_logits_of_every_token_are_planned_for(checkpoint: Path) -> None:
    from llm.models.hf_config import HuggingFaceConfig
    from llm.models.llama import LlamaModel

    files = HuggingFaceConfig.read(checkpoint)

    def estimate(**values: object) -> int:
        config = pipeline_config(checkpoint, max_batch_input_tokens=1000, **values)
        return LlamaModel.estimate_activation_memory(config, files)

    rows = 1000 - 32
    assert estimate(enable_echo=True) - estimate() == 3 * rows * 96 * 4


def test_a_claim_may_do_without_the_cache() -> None:
    manager = KVCacheManager(9, 2)
    prompt: Sequence[int] = [1, 2, 3, 4, 5]
    manager.claim("a", prompt)
    manager.release("a", prompt, 5)
    assert manager.claim("b", prompt, reads_cache=False) == 0
    assert manager.claim("c", prompt) == 4
    manager.commit("b", prompt, 5)
    manager.check_integrity()
