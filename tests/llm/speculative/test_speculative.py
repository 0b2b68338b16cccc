"""Drafting and verifying: the tokens of plain decoding, its distribution, and statistics."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llm.config import PipelineConfig
from llm.engine.engine import Engine, create_engine
from llm.errors import ConfigError, RequestError
from llm.kv_cache.kv_pool import KVPool
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import Request, SamplingParams, TokenChunk
from llm.speculative.acceptance import RULES
from llm.speculative.metrics import AcceptanceCounter
from tests.fakes import TINY_CODEC, LlamaShape, build_text_checkpoint
from tests.llm.llama_checkpoints import batch, random_ids, row
from tests.llm.structured import test_structured as structured
from tests.vocabulary import FIRST_CODE

SMALL_DRAFT = LlamaShape(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64)
SPEECH = {"allowed_ranges": ((FIRST_CODE, FIRST_CODE + 64),), "stop_token_ids": (258,)}
FRAMES = {
    "allowed_cycle": tuple(((FIRST_CODE + k, FIRST_CODE + k + 16),) for k in (0, 16, 40)),
    "stop_token_ids": (258,),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a speech model, and a smaller one with the same vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    size = TINY_CODEC.codebook_size
    target = build_text_checkpoint(folder / "target", codebook_size=size)
    draft = build_text_checkpoint(folder / "draft", seed=5, shape=SMALL_DRAFT, codebook_size=size)
    return target, draft


def requests() -> list[Request]:
    """Return text and speech requests, greedy and sampled."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.8},
        {"temperature": 0.5, **SPEECH},
        {"temperature": 0.0, **SPEECH},
        {"temperature": 0.0, **FRAMES},
        {"min_p": 0.05, "min_tokens": 10},
        {"temperature": 0.4, "top_logprobs": 2},
    ]
    return [
        Request(
            f"r{index}",
            tuple([5] * 20 + random_ids(8 + 7 * index, 256, seed=index)),
            SamplingParams(**{"seed": index, "max_tokens": 30, **way}),
        )
        for index, way in enumerate(ways)
    ]


def config(models: tuple[Path, Path], draft: Path | None = None, **values: Any) -> PipelineConfig:
    own: dict[str, Any] = {
        "max_batch_size": 8,
        "max_length": 200,
        "kvcache_ce_watermark": 1.0,
        "model": {
            "model_path": str(models[0]),
            "kv_cache": {"kv_cache_page_size": 8, "num_pages": values.pop("num_pages", 300)},
        },
    }
    if draft is not None:
        own["draft_model"] = {"model_path": str(draft)}
    return PipelineConfig(**PipelineConfig.merged(own, values))


def finish(engine: Engine, asked: Sequence[Request]) -> dict[str, list[TokenChunk]]:
    streams = [engine.submit(request) for request in asked]
    if not engine.is_running:
        engine.start()
    return {stream.request_id: list(stream) for stream in streams}


def results(engine: Engine, asked: Sequence[Request]) -> dict[str, tuple[Any, ...]]:
    """Return tokens, log-probabilities, reason."""
    found = {}
    for name, chunks in finish(engine, asked).items():
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [entry for chunk in chunks for entry in chunk.logprobs]
        found[name] = (tokens, logprobs, chunks[-1].finish_reason)
    engine.shutdown()
    assert engine.stats().used_pages == 0
    return found


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> dict[str, tuple[Any, ...]]:
    """Return results without a draft model."""
    return results(create_engine(config(models)), requests())


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"speculative": {"num_speculative_tokens": 1}},
        {"num_pages": 30},
        {"max_batch_input_tokens": 24, "enable_in_flight_batching": False},
        {"max_batch_size": 1},
    ],
    ids=str,
)
def test_the_same_tokens_as_without_a_draft(
    models: tuple[Path, Path], expected: dict[str, tuple[Any, ...]], values: dict[str, Any]
) -> None:
    """Greedy and sampled, in any batch and with preemptions."""
    engine = create_engine(config(models, models[1], **values))
    assert results(engine, requests()) == expected
    assert engine.stats().preemptions > 0 or "num_pages" not in values
    metrics = engine.stats().speculative
    assert metrics is not None
    assert metrics.num_verifications > 0
    assert all(0 <= a <= d for a, d in zip(metrics.accepted, metrics.drafted, strict=True))
    assert list(metrics.accepted) == sorted(metrics.accepted, reverse=True)


@pytest.mark.parametrize("strategy", RULES)
def test_greedy_requests_are_the_same_under_every_rule(
    models: tuple[Path, Path], expected: dict[str, tuple[Any, ...]], strategy: str
) -> None:
    greedy = [request for request in requests() if request.sampling.temperature == 0]
    speculative = {"rejection_strategy": strategy, "num_speculative_tokens": 3}
    engine = create_engine(config(models, models[1], speculative=speculative))
    found = results(engine, greedy)
    assert found == {request.request_id: expected[request.request_id] for request in greedy}


@pytest.mark.parametrize("strategy", RULES)
def test_a_perfect_draft_is_accepted_everywhere(models: tuple[Path, Path], strategy: str) -> None:
    """The target as its own draft: every position 1.0, and far fewer steps."""
    values = {"rejection_strategy": strategy, "num_speculative_tokens": 4}
    engine = create_engine(config(models, models[0], speculative=values))
    asked = [Request(f"r{n}", (5, n), SamplingParams(seed=n, max_tokens=26)) for n in range(4)]
    results(engine, asked)
    metrics = engine.stats().speculative
    assert metrics is not None
    assert metrics.acceptance_rates == (1.0,) * 4
    assert metrics.mean_accepted > 3
    assert engine.stats().steps < 10


def test_structured_rows_are_not_drafted_and_share_the_batch(tmp_path: Path) -> None:
    target = build_text_checkpoint(tmp_path / "target")
    draft = build_text_checkpoint(tmp_path / "draft", seed=3, shape=SMALL_DRAFT)
    sampling = {"enable_structured_output": True}
    asked = [r for r in structured.requests() if r.sampling.repetition_penalty == 1.0]
    plain = create_engine(config((target, draft), sampling=sampling), structured.BYTES)
    wanted = results(plain, asked)
    drafting = create_engine(config((target, draft), draft, sampling=sampling), structured.BYTES)
    assert results(drafting, asked) == wanted
    for index in range(4):
        text = bytes(wanted[f"bound{index}"][0])
        assert structured.is_valid(json.loads(text), structured.SCHEMAS[index])


# Statistics, KV and refused configurations.


def test_what_is_counted() -> None:
    counter = AcceptanceCounter(3)
    for drafted, accepted in ((3, 3), (3, 1), (2, 0), (0, 0)):
        counter.add(drafted, accepted)
    found = counter.snapshot()
    assert found.num_verifications == 3
    assert (found.drafted, found.accepted) == ((3, 3, 2), (2, 1, 1))
    assert found.acceptance_rates == (2 / 3, 1 / 3, 1 / 2)
    assert found.mean_accepted == 4 / 3
    assert AcceptanceCounter(2).snapshot().acceptance_rates == (0.0, 0.0)
    with pytest.raises(ValueError, match="4 of 3"):
        counter.add(3, 4)


def test_tokens_past_the_end_are_not_counted(models: tuple[Path, Path]) -> None:
    """The draft continues behind a stop id; those tokens are not counted."""
    pipeline = TextGenerationPipeline(
        config(models, models[0], speculative={"num_speculative_tokens": 5})
    )
    prompt = row([5, 6, 7], [1, 2])
    tokens = list(pipeline.execute(batch(prompt)).token_ids["a"])
    decode = row(tokens, [1, 2], 3, output_ids=tuple(tokens))
    tokens += pipeline.execute(batch(decode, num_steps=6)).token_ids["a"]
    stop = next(n for n in range(2, 6) if tokens[n] not in tokens[1:n])
    before = pipeline.spec_decode_metrics()
    stopping = SamplingParams(temperature=0, stop_token_ids=(tokens[stop],))
    again = pipeline.execute(batch(decode._replace(sampling=stopping), num_steps=6))
    assert again.token_ids["a"] == tuple(tokens[1 : stop + 1])
    after = pipeline.spec_decode_metrics()
    assert before is not None
    assert after is not None
    assert sum(after.drafted) - sum(before.drafted) == stop
    assert after.acceptance_rates == (1.0,) * 5


def test_the_drafts_keys_and_values(models: tuple[Path, Path]) -> None:
    """They are under the target's page ids and cover every position of the target."""
    plain = TextGenerationPipeline(config(models))
    assert plain.draft_kv_blocks is None
    assert plain.spec_decode_metrics() is None
    pipeline = TextGenerationPipeline(config(models, models[1]))
    (blocks,) = pipeline.draft_kv_blocks or []
    assert isinstance(blocks, KVPool)
    target = pipeline.runner.token_to_kv_pool
    assert target is not None
    assert (blocks.num_pages, blocks.page_size) == (target.num_pages, target.page_size)
    assert pipeline.memory_plan.kv_bytes == blocks.nbytes + target.nbytes
    assert pipeline.memory_plan.weights_bytes > plain.memory_plan.weights_bytes
    first = pipeline.execute(batch(row(random_ids(9, 256), [1, 2, 3]))).token_ids["a"]
    decode = row(first, [1, 2, 3], 9, output_ids=first)
    tokens = pipeline.execute(batch(decode, num_steps=6)).token_ids["a"]
    known = 9 + len(tokens)
    for pool in (blocks, target):
        keys = pool.keys(0)[[1, 2, 3]].flatten(0, 1)
        assert bool((keys[:known] != 0).any(2).any(1).all())
    pipeline.shutdown()
    assert pipeline.draft_kv_blocks == []


def test_with_the_overlap_pipeline_steps_are_waited_for(
    models: tuple[Path, Path], expected: dict[str, tuple[Any, ...]]
) -> None:
    asked = [request for request in requests() if request.sampling.top_logprobs is None]
    engine = create_engine(config(models, models[1], enable_overlap_scheduler=True, force=True))
    pipeline = engine.pipeline
    assert isinstance(pipeline, OverlapTextGenerationPipeline)
    assert not pipeline.overlap_active
    found = results(engine, asked)
    assert found == {request.request_id: expected[request.request_id] for request in asked}
    metrics = pipeline.spec_decode_metrics()
    assert metrics is not None
    assert metrics.num_verifications > 0


def test_the_drafts_pages_are_restored_from_the_host(models: tuple[Path, Path]) -> None:
    """A perfect draft stays perfect on pages that were evicted: none of its KV was lost."""
    cache = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 0.01}
    engine = create_engine(
        config(models, models[0], num_pages=24, max_batch_size=2, model={"kv_cache": cache})
    )
    tokens = []
    for first in (1, 50, 100, 150, 1):
        ids = tuple((first + 7 * index) % 250 for index in range(70))
        asked = Request(str(len(tokens)), ids, SamplingParams(temperature=0, max_tokens=20))
        (chunks,) = finish(engine, [asked]).values()
        tokens.append([token for chunk in chunks for token in chunk.token_ids])
    assert tokens[0] == tokens[-1]
    assert chunks[-1].cached_prompt_tokens == 64
    assert engine.stats().pages_from_host >= 4
    metrics = engine.stats().speculative
    assert metrics is not None
    assert metrics.acceptance_rates == (1.0,) * 5
    engine.shutdown()


def test_penalties_with_a_draft(models: tuple[Path, Path]) -> None:
    """They are counted token by token, in the draft and in its verification."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"presence_penalty": 2.0, "penalty_window": 4},
        {"temperature": 0.6, "frequency_penalty": 0.7, **SPEECH},
    ]
    asked = [
        Request(f"r{n}", (5, 6, n), SamplingParams(**{"seed": n, "max_tokens": 30, **way}))
        for n, way in enumerate(ways)
    ]
    engine = create_engine(config(models, models[1]))
    with pytest.raises(RequestError, match="enable_penalties"):
        engine.submit(asked[0])
    engine.shutdown()
    wanted = results(create_engine(config(models)), asked)
    sampling = {"enable_penalties": True}
    assert results(create_engine(config(models, models[1], sampling=sampling)), asked) == wanted
    perfect = create_engine(config(models, models[0], sampling=sampling))
    assert results(perfect, asked) == wanted
    metrics = perfect.stats().speculative
    assert metrics is not None
    assert metrics.acceptance_rates == (1.0,) * 5


def edited(folder: Path, source: Path, name: str, **values: Any) -> Path:
    """Return a copy of a checkpoint with some keys of one JSON file changed."""
    copy = folder / name.replace(".", "_")
    shutil.copytree(source, copy)
    path = copy / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return copy


def test_a_draft_that_does_not_fit(models: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = models
    other = edited(tmp_path / "a", draft, "config.json", architectures=["MistralForCausalLM"])
    with pytest.raises(ConfigError, match=r"architectures=.*Mistral.*needs the same architecture"):
        config(models, other)
    other = edited(tmp_path / "b", draft, "config.json", vocab_size=7)
    with pytest.raises(ConfigError, match="vocab_size=7"):
        config(models, other)
    other = edited(tmp_path / "c", draft, "tokenizer.json", added_tokens=[])
    with pytest.raises(ConfigError, match="another vocabulary"):
        config(models, other)
    with pytest.raises(ConfigError, match=r"speculative_method=eagle is not available"):
        config(models, draft, speculative={"speculative_method": "eagle"})
    with pytest.raises(ConfigError, match="max_num_steps=4 cannot be set with a draft_model"):
        config(models, draft, max_num_steps=4)
    short = edited(tmp_path / "d", draft, "config.json", max_position_embeddings=100)
    with pytest.raises(ConfigError, match=r"draft_model: max_length=200 exceeds .*=100"):
        create_engine(config(models, short))
    elsewhere = {"draft_model": {"model_path": str(draft), "device_specs": ["cuda"]}}
    with pytest.raises(ConfigError, match=r"draft_model.device_specs must be the model's"):
        create_engine(config(models, **elsewhere))
    unread = {"draft_model": {"model_path": str(draft), "kv_cache": {"num_pages": 7}}}
    with pytest.raises(ConfigError, match=r"draft_model.kv_cache.num_pages: the draft shares"):
        create_engine(config(models, **unread))
    strange = [
        edited(tmp_path / name, source, "config.json", architectures=["StrangeForCausalLM"])
        for name, source in (("e", target), ("f", draft))
    ]
    alone = {"max_batch_size": 1, "model": {"kv_cache": {"enable_prefix_caching": False}}}
    with pytest.raises(ConfigError, match="AutoModelForCausalLM cannot verify"):
        config((strange[0], strange[1]), strange[1], **alone)
    assert config(models, draft).max_num_steps == 6
    assert target != draft
