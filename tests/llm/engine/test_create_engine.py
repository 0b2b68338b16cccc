"""The engine on a real (tiny) model: the same tokens alone, crowded, preempted, chunked, paused."""

from __future__ import annotations

import logging
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import llm
from llm.config import PipelineConfig
from llm.engine.engine import Engine, create_engine
from llm.errors import RequestError
from llm.request import FinishReason, Request, SamplingParams, TokenChunk

NUM_REQUESTS = 8

Results = dict[str, tuple[tuple[int, ...], FinishReason | None]]


def config(checkpoint: Path, **values: Any) -> PipelineConfig:
    cache = {"kv_cache_page_size": 16, "num_pages": values.pop("num_pages", 256)}
    cache["enable_prefix_caching"] = values.pop("prefix_caching", True)
    model = {"model_path": str(checkpoint), "kv_cache": cache}
    defaults: dict[str, Any] = {"max_batch_size": 8, "max_length": 200, "kvcache_ce_watermark": 1.0}
    return PipelineConfig(model=model, **(defaults | values))


def requests() -> list[Request]:
    """Return prompts with a common beginning; greedy and random sampling, with and without
    penalties.
    """
    rng = random.Random(1)
    return [
        Request(
            f"r{index}",
            tuple([5] * 20 + [rng.randrange(256) for _ in range(rng.randint(5, 60))]),
            SamplingParams(
                seed=index,
                temperature=0.8 if index % 3 else 0.0,
                top_k=20 * (index % 2),
                repetition_penalty=1.0 + 0.2 * (index % 4 == 0),
                max_tokens=30,
            ),
        )
        for index in range(NUM_REQUESTS)
    ]


def run(engine: Engine, *, together: bool, pausing: bool = False) -> Results:
    results: Results = {}
    streams = {}
    for request in requests():
        streams[request.request_id] = engine.submit(request)
        if pausing:
            engine.pause(request.request_id)
            engine.run_on_engine(lambda: None).result(60)
            engine.resume(request.request_id)
        if not together:
            chunks = list(streams[request.request_id])
            tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
            results[request.request_id] = tokens, chunks[-1].finish_reason
    if together:
        for request_id, stream in streams.items():
            chunks = list(stream)
            tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
            results[request_id] = tokens, chunks[-1].finish_reason
    return results


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path) -> Results:
    """Run each request alone, with a whole prompt, without a cache."""
    engine = create_engine(config(tiny_checkpoint, prefix_caching=False))
    engine.start()
    results = run(engine, together=False)
    engine.shutdown()
    assert len({tokens for tokens, _ in results.values()}) == NUM_REQUESTS
    return results


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_batch_input_tokens": 24},
        {"num_pages": 14, "max_batch_input_tokens": 64},
        {"num_pages": 14, "prefix_caching": False},
        {"num_pages": 16, "max_num_steps": 4},
        {"enable_in_flight_batching": False, "max_batch_input_tokens": 32},
        {"num_pages": 14, "pausing": True},
    ],
    ids=str,
)
def test_same_tokens_under_all_conditions(
    tiny_checkpoint: Path, alone: Results, values: dict[str, Any]
) -> None:
    pausing = values.get("pausing", False)
    engine = create_engine(
        config(tiny_checkpoint, **{k: v for k, v in values.items() if k != "pausing"})
    )
    engine.start()
    try:
        assert run(engine, together=True, pausing=pausing) == alone
        stats = engine.stats()
        assert stats.used_pages == 0
        assert stats.preemptions > 0 or "num_pages" not in values
        # The first batch finds no cached pages; later or preempted requests do.
        assert stats.prefix_hit_tokens > 0 or not values or "prefix_caching" in values
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("values", "order"),
    [({}, "aaaab"), ({"enable_in_flight_batching": False}, "ab")],
)
def test_in_flight_batching_is_on_unless_turned_off(
    tiny_checkpoint: Path, values: dict[str, bool], order: str
) -> None:
    """A prompt of three chunks arrives when a stream has had its first token."""
    engine = create_engine(config(tiny_checkpoint, max_batch_input_tokens=16, **values))
    delivered, done = [], threading.Event()

    def late(chunk: TokenChunk) -> None:
        delivered.append("b")
        done.set()

    def early(chunk: TokenChunk) -> None:
        if not delivered:
            engine.submit(Request("b", (2,) * 40, SamplingParams(max_tokens=1)), late)
        if not done.is_set():
            delivered.append("a")

    engine.start()
    stream = Request("a", (1,) * 4, SamplingParams(max_tokens=150, ignore_eos=True))
    engine.submit(stream, early)
    assert done.wait(60)
    engine.shutdown()
    assert "".join(delivered) == order


@pytest.mark.parametrize(
    "values", [{"num_pages": 5}, {"max_batch_total_tokens": 64, "max_length": None}], ids=str
)
def test_a_sequence_cannot_outgrow_what_can_run(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, values: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = create_engine(config(tiny_checkpoint, **values))
    assert re.search(r"max_length is cut from \d+ to 64 tokens", caplog.text)
    with pytest.raises(RequestError, match="the prompt has 64 tokens; at most 63 fit"):
        engine.submit(Request("long", (1,) * 64, SamplingParams()))
    engine.start()
    made = SamplingParams(max_tokens=500, ignore_eos=True)
    last = list(engine.submit(Request("a", (1,) * 10, made)))[-1]
    assert (last.finish_reason, last.prompt_tokens + last.output_tokens) == (
        FinishReason.LENGTH,
        64,
    )
    engine.shutdown()


def test_an_open_batch_size_is_the_engines_to_find(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = config(tiny_checkpoint, num_pages=14, max_batch_size=None, max_length=60)
    with caplog.at_level(logging.INFO, "llm.config"):
        engine = create_engine(made)
    rows = 13 // 4  # of 60 tokens in pages of 16
    lines = [" ".join(line.split()) for line in caplog.messages]
    assert {f"max_batch_size: {rows}, from KV memory", f"max_queue_size_tg: {rows}"} <= {*lines}
    assert made.running_plan is not None
    assert made.running_plan.max_batch_size == rows
    together: list[int] = []
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    for n in range(10):
        request = Request(f"r{n}", (n + 1,) * 5, sampling)
        engine.submit(request, lambda _: together.append(engine.stats().running))
    engine.start()
    assert engine.drain(60)
    engine.shutdown()
    assert max(together) == rows


def test_an_unresolved_configuration_makes_no_engine(tiny_checkpoint: Path) -> None:
    with pytest.raises(RuntimeError, match="resolve the configuration"):
        create_engine(config(tiny_checkpoint, defer_resolve=True))


@pytest.mark.parametrize(
    ("switch", "wanted", "message"),
    [
        ("enable_penalties", {"repetition_penalty": 1.1}, "penalties are switched off"),
        ("enable_penalties", {"presence_penalty": -0.5}, "penalties are switched off"),
        ("enable_min_tokens", {"min_tokens": 1}, "minimum lengths are switched off"),
    ],
)
def test_disabled_features_are_refused(
    tiny_checkpoint: Path, switch: str, wanted: dict[str, Any], message: str
) -> None:
    engine = create_engine(config(tiny_checkpoint, sampling={switch: False}))
    try:
        with pytest.raises(RequestError, match=f"{message}.*{switch}"):
            engine.submit(Request("r", (1,), SamplingParams(**wanted)))
        engine.submit(Request("r", (1,), SamplingParams()))
    finally:
        engine.shutdown()


def test_an_engine_logs_its_plan(tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llm.config"):
        create_engine(config(tiny_checkpoint, num_pages=5)).shutdown()
    lines = [" ".join(line.split()) for line in caplog.messages]
    assert {"pipeline: TextGenerationPipeline", "encoding: float32", "max_seq_len: 64"} <= {*lines}
    assert "KV page size: 16" in lines
    assert any(re.fullmatch(r"linear layers: \d+ one order of sums", line) for line in lines)


def test_the_root_gives_every_public_name() -> None:
    assert {"Engine", "TokenStream", "Request", "RequestError", "PipelineConfig"} <= set(
        llm.__all__
    )
    assert set(llm.__all__) == set(dir(llm))
    assert llm.VECTOR_WIDTH > 0
    without_name = {"WeightsAdapter", "Token", "VECTOR_WIDTH"}  # aliases of types, and a number
    for name in set(llm.__all__) - without_name:
        assert getattr(llm, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        llm.Nothing  # noqa: B018
