"""The overlap pipeline on a late device: its contract, and the plain pipeline's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm.batch import ForwardMode, RequestOutput, ScheduledBatch, ScheduledRow, StepOutput
from llm.config import ModelConfig, PipelineConfig
from llm.models.auto import AutoModel
from llm.models.llama import LlamaModel
from llm.models.weights import WeightsFormat
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import Request, SamplingParams, TokenLogprob
from llm.runner.device_stream import ImmediateStream, PendingResult
from llm.runner.future_tokens import FutureTokens
from llm.sequence import FUTURE_TOKEN
from tests.closeness import error
from tests.llm.llama_checkpoints import (
    GREEDY,
    batch,
    pipeline_config,
    random_ids,
    row,
    write_llama,
)
from tests.llm.models.test_embeddings import write_modules
from tests.llm.runner.late_stream import LateStream
from tests.llm.structured import test_structured as structured

EMPTY = ScheduledBatch((), ForwardMode.IDLE)
PROMPT = random_ids(20, 96)
PAGES = [4, 9, 2, 7, 11]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


def late(checkpoint: Path, **values: Any) -> tuple[OverlapTextGenerationPipeline, LateStream]:
    stream = LateStream()
    config = pipeline_config(checkpoint, **values)
    return OverlapTextGenerationPipeline(config, stream=stream), stream


def prompt_row(name: str, **values: Any) -> ScheduledRow:
    return row(PROMPT, PAGES, request_id=name, **values)


def next_row(name: str, num_outputs: int, **values: Any) -> ScheduledRow:
    """Return a decode row whose last token is still being sampled."""
    start = len(PROMPT) + num_outputs - 1
    outputs = (*[1] * (num_outputs - 1), FUTURE_TOKEN)
    return row([FUTURE_TOKEN], PAGES, start, request_id=name, output_ids=outputs, **values)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    """Return greedy tokens after PROMPT."""
    pipeline = TextGenerationPipeline(pipeline_config(checkpoint))
    output = pipeline.execute(batch(row(PROMPT, PAGES)))
    first = output.token_ids["a"]
    more = pipeline.execute(batch(row(first, PAGES, 20, output_ids=first), num_steps=5))
    return [*first, *more.token_ids["a"]]


def test_results_belong_to_the_batch_before(checkpoint: Path, expected: list[int]) -> None:
    pipeline, stream = late(checkpoint)
    assert pipeline.overlap_active
    assert not pipeline.has_pending_outputs()
    assert dict(pipeline.execute(batch(prompt_row("a"), prompt_row("b"))).token_ids) == {}
    assert pipeline.has_pending_outputs()
    second = pipeline.execute(batch(next_row("b", 1)))
    assert second.token_ids == {"a": (expected[0],), "b": (expected[0],)}
    third = pipeline.execute(EMPTY)
    assert third.token_ids == {"b": (expected[1],)}
    assert not pipeline.has_pending_outputs()
    assert dict(pipeline.execute(EMPTY).token_ids) == {}
    # The second batch was launched before the first was waited for.
    assert stream.log == ["launch"] * 2 + ["wait"] * 2


def test_results_are_a_mapping_from_request_ids(checkpoint: Path, expected: list[int]) -> None:
    pipeline, _ = late(checkpoint)
    inputs = batch(prompt_row("a"), prompt_row("b"))
    output_a = pipeline.execute(inputs)
    assert len(output_a) == 0
    output_b = pipeline.execute(EMPTY)
    assert len(output_b) == len(inputs.rows)
    assert list(output_b) == ["a", "b"]
    assert output_b["b"] == RequestOutput((expected[0],))
    assert "c" not in output_b
    with pytest.raises(KeyError, match="c"):
        output_b["c"]


def test_a_request_that_only_failed_or_was_scored_counts() -> None:
    score = TokenLogprob(5, -0.5)
    output = StepOutput(
        {"a": (1, 2)},
        failures={"b": "no"},
        prompt_logprobs={"c": (score,)},
        embeddings={"d": (b"four",)},
    )
    assert dict(output) == {
        "a": RequestOutput((1, 2)),
        "b": RequestOutput(failure="no"),
        "c": RequestOutput(prompt_logprobs=(score,)),
        "d": RequestOutput(embeddings=(b"four",)),
    }


def test_a_token_goes_from_device_to_device(checkpoint: Path, expected: list[int]) -> None:
    pipeline, _ = late(checkpoint)
    tokens = []
    pipeline.execute(batch(prompt_row("a")))
    for num_outputs in range(1, 6):
        tokens += pipeline.execute(batch(next_row("a", num_outputs))).token_ids["a"]
    tokens += pipeline.execute(EMPTY).token_ids["a"]
    assert tokens == expected


def test_later_additions_to_live_views_have_no_effect(
    checkpoint: Path, expected: list[int]
) -> None:
    pipeline, _ = late(checkpoint)
    pages, outputs = list(PAGES), [1, 2]
    pipeline.execute(batch(row(PROMPT, pages, output_ids=outputs)))
    pages += [13] * 5
    outputs.clear()
    assert pipeline.execute(EMPTY).token_ids["a"] == (expected[0],)


names = st.lists(st.sampled_from("abcdefg"), unique=True, min_size=1)


@given(names, names, st.sampled_from(["all", "decode", "mixed"]))
def test_each_awaited_token_comes_from_the_row_of_its_request(
    before: list[str], after: list[str], kind: str
) -> None:
    """A row that was not in the previous batch feeds known tokens: one, or a prompt."""
    if kind == "all":
        after = [name for name in after if name in before] or before
    prompt = [5, 6, 7] if kind == "mixed" else [5]
    fed = [[FUTURE_TOKEN] if name in before else prompt for name in after]
    rows = [row(ids, PAGES, request_id=name) for name, ids in zip(after, fed, strict=True)]
    input_ids = torch.tensor([token for ids in fed for token in ids])
    sampled = torch.arange(len(before), dtype=torch.int32) + 100
    awaited = FutureTokens.find(batch(*rows), tuple(after), tuple(before))
    places = input_ids.numpy() + 1000
    awaited.point(places)  # of a table that begins with the sampled tokens
    table = torch.cat(
        [sampled, torch.zeros(1000 - len(before), dtype=torch.int32), torch.arange(9)]
    )
    pointed = table[torch.from_numpy(places)].tolist()
    assert bool(awaited) == (FUTURE_TOKEN in input_ids)
    awaited.fill(input_ids, sampled)
    expected = [
        100 + before.index(name) if token == FUTURE_TOKEN else token
        for name, ids in zip(after, fed, strict=True)
        for token in ids
    ]
    assert input_ids.tolist() == pointed == expected


many = st.lists(st.integers(0, 99).map(str), unique=True, min_size=1, max_size=60)


@given(many, st.data())
def test_rows_are_found_where_they_were_before(before: list[str], data: st.DataObject) -> None:
    """In the same order without some of them, and in another order."""
    left = [name for name in before if data.draw(st.integers(0, 9))]
    if data.draw(st.booleans()):
        left = data.draw(st.permutations(left))
    rows = [row([FUTURE_TOKEN], PAGES, request_id=name) for name in left]
    found = FutureTokens.find(batch(*rows), tuple(left), tuple(before))
    places = np.zeros(len(left), dtype=np.int64)
    found.point(places)
    assert places.tolist() == [before.index(name) for name in left]


def test_a_placeholder_without_a_sampling_row_is_refused() -> None:
    for ids, before in (([FUTURE_TOKEN], ("b",)), ([3, FUTURE_TOKEN], ("a",))):
        with pytest.raises(ValueError, match="request a feeds"):
            FutureTokens.find(batch(row(ids, PAGES)), ("a",), before)


def test_a_prompt_chunk_has_no_token_but_is_waited_for(checkpoint: Path) -> None:
    pipeline, stream = late(checkpoint)
    pipeline.execute(batch(row(PROMPT[:12], PAGES, samples=False)))
    assert pipeline.has_pending_outputs()
    assert dict(pipeline.execute(EMPTY).token_ids) == {}
    assert not pipeline.has_pending_outputs()
    assert not stream.queue
    with pytest.raises(ValueError, match=r"request a feeds \(-1,\)"):
        pipeline.execute(batch(next_row("a", 1)))


def test_unsupported_uses_of_overlap(checkpoint: Path) -> None:
    pipeline, stream = late(checkpoint)
    with pytest.raises(ValueError, match="num_steps=3"):
        pipeline.execute(batch(row([1], [1]), num_steps=3))
    assert stream.log == []
    with pytest.raises(RuntimeError, match="decoding cannot be captured"):
        pipeline.warmup_graph_capture()


def test_log_probabilities_are_those_of_their_own_batch(
    checkpoint: Path, expected: list[int]
) -> None:
    """They arrive with its tokens, one call later, and belong to its own logits."""
    asks = SamplingParams(temperature=0, top_logprobs=2)
    plain = TextGenerationPipeline(pipeline_config(checkpoint))
    scores = [plain.execute(batch(prompt_row("a", sampling=asks))).logprobs["a"]]
    known = row(expected[:1], PAGES, 20, output_ids=expected[:1], sampling=asks)
    scores.append(plain.execute(batch(known)).logprobs["a"])
    pipeline, _ = late(checkpoint)
    pipeline.admit(Request("a", (1,), asks))
    assert not pipeline.execute(batch(prompt_row("a", sampling=asks))).logprobs
    both = batch(next_row("a", 1, sampling=asks), row(PROMPT, [20, 21], request_id="b"))
    first, second = pipeline.execute(both), pipeline.execute(EMPTY)
    assert (first.token_ids, set(first.logprobs)) == ({"a": (expected[0],)}, {"a"})
    assert second.token_ids == {"a": (expected[1],), "b": (expected[0],)}
    assert set(second.logprobs) == {"a"}
    pairs = []
    for output, (entry,) in zip((first, second), scores, strict=True):
        (found,) = output.logprobs["a"]
        assert (found.token_id, found.top[0][0]) == (entry.token_id, entry.token_id)
        pairs.append((found.logprob, entry.logprob))
    # Relative to the largest: float32 sums in another order differ by 1e-6.
    assert error(*zip(*pairs, strict=True)) < 1e-5


def test_overlap_needs_a_device_that_is_late(checkpoint: Path, expected: list[int]) -> None:
    config = pipeline_config(checkpoint)
    with pytest.raises(ValueError, match="overlap needs a GPU"):
        OverlapTextGenerationPipeline(config)
    pipeline = OverlapTextGenerationPipeline(config, disable_overlap=True)
    assert not pipeline.overlap_active
    assert pipeline.execute(batch(prompt_row("a"))).token_ids == {"a": (expected[0],)}
    assert not pipeline.has_pending_outputs()
    known = row([expected[0]], PAGES, 20, output_ids=expected[:1])
    assert pipeline.execute(batch(known)).token_ids == {"a": (expected[1],)}
    assert dict(pipeline.execute(EMPTY).token_ids) == {}


def test_an_embedding_model_has_nothing_to_overlap(tmp_path: Path) -> None:
    folder = write_modules(write_llama(tmp_path), "mean_tokens")
    with pytest.raises(ValueError, match="nothing to overlap"):
        late(folder)


def test_a_model_that_keeps_its_own_cache_cannot_run_ahead(checkpoint: Path) -> None:
    cache = {"enable_prefix_caching": False}
    model = ModelConfig(model_path=str(checkpoint), kv_cache=cache)
    config = PipelineConfig(model=model, max_batch_size=1, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match="keeps its own cache"):
        OverlapTextGenerationPipeline(config, AutoModel, stream=LateStream())


def test_construction(checkpoint: Path) -> None:
    config = pipeline_config(checkpoint)
    names: list[str] = []

    def adapter(name: str) -> str:
        names.append(name)
        return name

    pipeline = OverlapTextGenerationPipeline(
        config, LlamaModel, 77, {WeightsFormat.SAFETENSORS: adapter}, structured.BYTES, True
    )
    assert pipeline.pipeline_config is config
    assert pipeline.tokenizer is structured.BYTES
    assert pipeline.eos_token_ids == {3, 77}
    assert isinstance(pipeline.runner.model, LlamaModel)
    assert "model.norm.weight" in names
    assert pipeline.draft_kv_blocks is None
    assert pipeline.spec_decode_metrics() is None
    pipeline.release("unknown")
    pipeline.release("unknown")
    with pytest.raises(TypeError, match="must be a class"):
        OverlapTextGenerationPipeline(config, pipeline.runner.model, disable_overlap=True)  # type: ignore[arg-type]
    asks = pipeline_config(checkpoint, sampling={"enable_structured_output": True})
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        OverlapTextGenerationPipeline(asks, disable_overlap=True)
    with pytest.raises(TypeError, match="final"):
        type("Mine", (OverlapTextGenerationPipeline,), {})


def test_a_launch_that_fails_leaves_the_batch_before(checkpoint: Path, expected: list[int]) -> None:
    pipeline, _ = late(checkpoint)
    pipeline.execute(batch(prompt_row("a")))
    with pytest.raises(ValueError, match="request z"):
        pipeline.execute(batch(next_row("z", 1)))
    assert pipeline.has_pending_outputs()
    assert pipeline.execute(EMPTY).token_ids == {"a": (expected[0],)}


def test_a_device_that_fails_takes_both_batches(checkpoint: Path, expected: list[int]) -> None:
    pipeline, stream = late(checkpoint)
    stream.fail_next = True
    pipeline.execute(batch(prompt_row("a")))
    with pytest.raises(RuntimeError, match="the device has failed"):
        pipeline.execute(batch(next_row("a", 1)))
    assert not pipeline.has_pending_outputs()
    pipeline.execute(batch(prompt_row("a")))
    assert pipeline.execute(EMPTY).token_ids == {"a": (expected[0],)}


def test_penalties_wait_for_the_token_before_them(checkpoint: Path) -> None:
    sampling = SamplingParams(temperature=0, presence_penalty=50.0)
    together = TextGenerationPipeline(pipeline_config(checkpoint))
    first = together.execute(batch(prompt_row("a", sampling=sampling))).token_ids["a"]
    decode = row(first, PAGES, 20, sampling=sampling, output_ids=first)
    second = together.execute(batch(decode)).token_ids["a"]
    pipeline, stream = late(checkpoint)
    pipeline.execute(batch(prompt_row("a", sampling=sampling)))
    placeholder = row(
        [FUTURE_TOKEN], PAGES, 20, sampling=sampling, output_ids=[FUTURE_TOKEN], request_id="a"
    )
    assert pipeline.execute(batch(placeholder)).token_ids["a"] == first
    # The second forward was running when the first token was waited for.
    assert stream.log[2:5] == ["launch", "wait", "launch"]
    assert pipeline.execute(EMPTY).token_ids["a"] == second


def test_a_prompt_with_penalties_does_not_wait(checkpoint: Path, expected: list[int]) -> None:
    """It has no earlier tokens to wait for."""
    pipeline, stream = late(checkpoint)
    sampling = SamplingParams(temperature=0, presence_penalty=50.0)
    pipeline.execute(batch(prompt_row("a")))
    prompt = row(PROMPT, [20, 21], request_id="b", sampling=sampling)
    pipeline.execute(batch(next_row("a", 1), prompt))
    # Rows with penalties are sampled separately, behind the forward.
    assert stream.log == ["launch"] * 3 + ["wait"]
    found = pipeline.execute(EMPTY).token_ids
    assert found == {"a": (expected[1],), "b": (expected[0],)}


def test_a_value_is_not_known_before_the_work_has_run() -> None:
    stream = LateStream()
    five = stream.launch(lambda: torch.tensor([5]))
    six = stream.launch(lambda: five.value + 1)
    with pytest.raises(RuntimeError, match="has not run"):
        _ = six.value
    copy = stream.download(six)
    assert not copy.is_ready
    assert (copy.wait().tolist(), copy.wait().tolist(), copy.is_ready) == ([6], [6], True)
    now = ImmediateStream()
    done: PendingResult[torch.Tensor] = now.launch(lambda: torch.tensor([7]))
    assert now.download(done).is_ready
    assert now.download(done).wait().tolist() == [7]


def test_greedy_rows_in_a_batch_with_random_ones(checkpoint: Path, expected: list[int]) -> None:
    """One batch, each row with its own parameters, even if another has to wait."""
    pipeline, _ = late(checkpoint)
    other = SamplingParams(seed=4, repetition_penalty=1.4)
    pages = [20, 21, 22]
    pipeline.execute(batch(prompt_row("a"), row(PROMPT, pages, request_id="b", sampling=other)))
    follow = row(
        [FUTURE_TOKEN], pages, 20, request_id="b", sampling=other, output_ids=[FUTURE_TOKEN]
    )
    first = pipeline.execute(batch(next_row("a", 1, sampling=GREEDY), follow)).token_ids
    second = pipeline.execute(EMPTY).token_ids
    assert [first["a"][0], second["a"][0]] == expected[:2]


def test_empty_batches_are_run_when_asked_for(checkpoint: Path) -> None:
    pipeline, stream = late(checkpoint)
    pipeline.execute(EMPTY)
    assert stream.log == []
    pipeline, stream = late(checkpoint, execute_empty_batches=True)
    pipeline.execute(batch(prompt_row("a")))
    before = pipeline.runner.forward_pass_id
    assert set(pipeline.execute(EMPTY).token_ids) == {"a"}
    assert not pipeline.has_pending_outputs()
    pipeline.execute(batch(prompt_row("a")))
    pipeline.execute(EMPTY)
    # Two prompts, and the idle pass between them; the second idle one was not waited for.
    assert pipeline.runner.forward_pass_id == before + 3
