"""An engine on the overlap pipeline and a late device: the same tokens as without."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm.batch import ForwardMode
from llm.engine.engine import Engine, assemble_engine, create_engine
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.request import FinishReason, Request, SamplingParams, TokenChunk, TokenLogprob
from tests.closeness import error
from tests.llm.engine import test_create_engine as plain
from tests.llm.runner.late_stream import LateStream
from tests.llm.structured import test_structured as structured


def overlapping(config: Any, tokenizer: Any = None) -> tuple[Engine, LateStream]:
    stream = LateStream()
    pipeline = OverlapTextGenerationPipeline(config, tokenizer=tokenizer, stream=stream)
    return assemble_engine(pipeline, config), stream


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path) -> plain.Results:
    engine = create_engine(plain.config(tiny_checkpoint, prefix_caching=False))
    engine.start()
    results = plain.run(engine, together=False)
    engine.shutdown()
    return results


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_batch_input_tokens": 24},
        {"num_pages": 14, "max_batch_input_tokens": 64},
        {"num_pages": 14, "prefix_caching": False},
        {"enable_in_flight_batching": False, "max_batch_input_tokens": 32},
        {"num_pages": 14, "pausing": True},
    ],
    ids=str,
)
def test_the_same_tokens_as_without(
    tiny_checkpoint: Path, alone: plain.Results, values: dict[str, Any]
) -> None:
    kept = {key: value for key, value in values.items() if key != "pausing"}
    engine, _ = overlapping(plain.config(tiny_checkpoint, **kept))
    engine.start()
    try:
        found = plain.run(engine, together=True, pausing=values.get("pausing", False))
        assert found == alone
        assert engine.drain(60)
        assert engine.stats().used_pages == 0
    finally:
        engine.shutdown()


def finish(engine: Engine, asked: Sequence[Request]) -> dict[str, list[TokenChunk]]:
    streams = [engine.submit(request) for request in asked]
    engine.start()
    found = {stream.request_id: list(stream) for stream in streams}
    engine.shutdown()
    return found


def test_stop_ids_of_the_constructor_and_of_the_checkpoint(tiny_checkpoint: Path) -> None:
    """Each ends a request by itself."""
    config = plain.config(tiny_checkpoint)
    sampling = SamplingParams(seed=4, max_tokens=40)
    free = SamplingParams(seed=4, max_tokens=40, ignore_eos=True)

    def tokens(eos_token_id: int | None, params: SamplingParams) -> tuple[list[int], Any]:
        """Return tokens and finish reasons; one more forward runs for a stop id that arrived
        late.
        """
        pipeline = OverlapTextGenerationPipeline(
            config, eos_token_id=eos_token_id, stream=LateStream()
        )
        engine = assemble_engine(pipeline, config)
        (chunks,) = finish(engine, [Request("a", (7, 8, 9), params)]).values()
        found, reason = structured.tokens(chunks), chunks[-1].finish_reason
        is_late = 2 * (reason is FinishReason.STOP)  # the one that sampled it, and the next
        assert pipeline.runner.forward_pass_id == len(found) + is_late
        return found, reason

    every, _ = tokens(None, free)
    stop = every[10]
    assert tokens(stop, sampling) == (every[: every.index(stop)], FinishReason.STOP)
    whole, reason = tokens(None, sampling)
    assert whole == every[: len(whole)]
    assert reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_two_batches_are_under_way_at_once(tiny_checkpoint: Path) -> None:
    engine, stream = overlapping(plain.config(tiny_checkpoint))
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    finish(engine, [Request(name, (1, 2), sampling) for name in "ab"])
    assert stream.most_queued == 4  # a forward with its sampling and a copy, twice
    assert stream.log == ["launch"] + ["launch", "wait"] * 5 + ["wait"]


def test_the_launch_of_a_prompts_last_step_is_reported(tiny_checkpoint: Path) -> None:
    """With the pages of the whole prompt, before its token is there; not for its other chunks."""
    engine, stream = overlapping(plain.config(tiny_checkpoint, max_batch_input_tokens=24))
    launched: list[tuple[int, int]] = []

    def on_launched(pages: Sequence[int]) -> None:
        launched.append((len(pages), stream.done))

    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    asked = Request("a", tuple(range(5, 65)), sampling)
    tokens = engine.submit(asked, on_launched=on_launched)
    engine.start()
    assert sum(len(chunk.token_ids) for chunk in tokens) == 3
    engine.shutdown()
    num_pages = engine.pipeline.kv_manager.pages_for(60)
    # Two chunks have ended, each a forward and a copy; the third one has not.
    assert launched == [(num_pages, 4)]


def test_a_steps_time_is_counted_for_the_batch_that_was_waited_for(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances only with the device's work, one second for each piece of it."""
    engine, stream = overlapping(plain.config(tiny_checkpoint))
    clock = SimpleNamespace(perf_counter=lambda: float(stream.done), monotonic=time.monotonic)
    monkeypatch.setattr("llm.engine.engine.time", clock)
    finish(engine, [Request("a", (1, 2), SamplingParams(max_tokens=4, ignore_eos=True))])
    spent = {kind.mode: kind.execute_s for kind in engine.stats().batches}
    # The call that launched the prompt took no time; the next call waited for each.
    assert (spent[ForwardMode.EXTEND].count, spent[ForwardMode.EXTEND].total) == (1, 2.0)
    assert (spent[ForwardMode.DECODE].count, spent[ForwardMode.DECODE].total) == (3, 6.0)


def test_structured_output_overlaps(tmp_path: Path) -> None:
    """Constrained and free rows in one batch, with a schema that cannot be matched."""
    folder = structured.build_text_checkpoint(tmp_path / "text")
    config = structured.config(folder)
    asked = structured.requests()
    expected = finish(create_engine(config, structured.BYTES), asked)
    engine, _ = overlapping(config, structured.BYTES)
    found = finish(engine, asked)
    for name, chunks in expected.items():
        assert structured.tokens(found[name]) == structured.tokens(chunks), name
        assert found[name][-1].finish_reason is chunks[-1].finish_reason
    for index, schema in enumerate(structured.SCHEMAS):
        text = bytes(structured.tokens(found[f"bound{index}"]))
        assert structured.is_valid(json.loads(text), schema)
    pipeline = engine.pipeline
    assert isinstance(pipeline, OverlapTextGenerationPipeline)
    assert pipeline.structured.num_matchers == 0


def test_a_request_whose_grammar_breaks_fails_alone(tmp_path: Path) -> None:
    folder = structured.build_text_checkpoint(tmp_path / "text")
    engine, _ = overlapping(structured.config(folder), structured.Spelling([b"a"] * 256))
    free, bound = structured.requests()[:2]
    chunks = finish(engine, [free, bound])
    assert chunks[bound.request_id][-1].finish_reason is FinishReason.ERROR
    assert chunks[free.request_id][-1].finish_reason is not FinishReason.ERROR


SCORED = {
    "sampled": SamplingParams(seed=1, max_tokens=9, top_logprobs=2, ignore_eos=True),
    "chosen": SamplingParams(seed=2, max_tokens=30, top_logprobs=0, repetition_penalty=1.3),
    "prompt": SamplingParams(seed=3, max_tokens=6, top_logprobs=1, echo=True, ignore_eos=True),
    "echo": SamplingParams(seed=4, max_tokens=5, top_logprobs=0, echo=True, ignore_eos=True),
    "free": SamplingParams(seed=5, max_tokens=12, ignore_eos=True),
}


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_those_without(tiny_checkpoint: Path, out_dtype: str) -> None:
    """In a batch with requests without them; prompts in pieces, penalties, echo."""
    values = {"enable_echo": True, "max_batch_input_tokens": 20, "prefix_caching": False}
    sampling = {"out_dtype": out_dtype, "enable_penalties": True}
    config = plain.config(tiny_checkpoint, **values, sampling=sampling)
    prompt = tuple(range(5, 40))
    asked = [Request(name, prompt, params) for name, params in SCORED.items()]
    expected = finish(create_engine(config), asked)
    engine, _ = overlapping(config)
    found = finish(engine, asked)
    # Relative to the largest: float32 sums in another order differ by 1e-6, bfloat16 has 8 bits.
    tolerance = 1e-5 if out_dtype == "float32" else 4e-3

    def entries(chunks: list[TokenChunk]) -> list[TokenLogprob]:
        return [e for chunk in chunks for e in (*chunk.prompt_logprobs, *chunk.logprobs)]

    for name, params in SCORED.items():
        here, there = found[name], expected[name]
        assert structured.tokens(here) == structured.tokens(there)
        num_echoed = len(prompt) if params.echo else 0
        num_scored = len(structured.tokens(here)) if params.top_logprobs is not None else 0
        assert len(entries(here)) == num_echoed + num_scored
        own, others = (
            [e.logprob for e in entries(run) if e.logprob is not None] for run in (here, there)
        )
        assert error(own, others) < tolerance
        for entry, counterpart in zip(entries(here), entries(there), strict=True):
            assert entry.token_id == counterpart.token_id
            assert [token for token, _ in entry.top] == [token for token, _ in counterpart.top]


def test_the_configuration_chooses(tiny_checkpoint: Path, alone: plain.Results) -> None:
    """With force on the CPU: the overlap pipeline, which then waits for each step."""
    config = plain.config(tiny_checkpoint, enable_overlap_scheduler=True, force=True)
    engine = create_engine(config)
    assert isinstance(engine.pipeline, OverlapTextGenerationPipeline)
    assert not engine.pipeline.overlap_active
    engine.start()
    assert plain.run(engine, together=True) == alone
    engine.shutdown()
