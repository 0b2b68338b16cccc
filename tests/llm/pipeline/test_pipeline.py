"""TextGenerationPipeline: steps, multi-step turns, stop ids, log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm.batch import ForwardMode, ScheduledBatch
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import SamplingParams
from llm.sampling.log_probabilities import round_logprob
from tests.llm.llama_checkpoints import (
    GREEDY,
    batch,
    pipeline_config,
    random_ids,
    reference,
    row,
    write_llama,
)

PROMPT = random_ids(20, 96)
PAGES = [4, 9, 2, 7, 11]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> TextGenerationPipeline:
    return TextGenerationPipeline(pipeline_config(checkpoint))


def generate(
    pipeline: TextGenerationPipeline, turns: list[int], sampling: SamplingParams = GREEDY
) -> list[int]:
    """Generate the first token from the prompt, then turns of so many steps."""
    output = pipeline.execute(batch(row(PROMPT, PAGES, sampling=sampling)))
    tokens = list(output.token_ids["a"])
    for num_steps in turns:
        decode = row(
            [tokens[-1]],
            PAGES,
            len(PROMPT) + len(tokens) - 1,
            sampling=sampling,
            output_ids=tuple(tokens),
        )
        output = pipeline.execute(batch(decode, num_steps=num_steps))
        tokens += output.token_ids["a"]
    return tokens


def test_greedy_text_is_that_of_transformers(
    checkpoint: Path, pipeline: TextGenerationPipeline
) -> None:
    expected = reference(checkpoint).generate(
        torch.tensor([PROMPT]), max_new_tokens=25, do_sample=False, eos_token_id=None
    )
    assert generate(pipeline, [1] * 24) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(seed=7),
        SamplingParams(seed=8, top_k=30, min_tokens=10, stop_token_ids=(5,), ignore_eos=True),
        SamplingParams(seed=9, repetition_penalty=1.3, frequency_penalty=0.2, penalty_window=5),
    ],
)
def test_a_turn_of_n_steps_is_n_steps(
    pipeline: TextGenerationPipeline, sampling: SamplingParams
) -> None:
    single = generate(pipeline, [1] * 24, sampling)
    assert len(single) == 25
    assert generate(pipeline, [24], sampling) == single
    assert generate(pipeline, [5, 1, 10, 8], sampling) == single


def test_a_turn_ends_when_every_row_has_stopped(pipeline: TextGenerationPipeline) -> None:
    tokens = generate(pipeline, [1] * 10)
    stop = tokens[4]
    stopping = SamplingParams(temperature=0, stop_token_ids=(stop,))
    assert generate(pipeline, [10], stopping) == tokens[: 1 + tokens[1:].index(stop) + 1]
    ignoring = SamplingParams(temperature=0, stop_token_ids=(stop,), ignore_eos=True)
    assert generate(pipeline, [10], ignoring) == tokens
    rows = [
        row([tokens[0]], PAGES, 20, sampling=stopping),
        row([tokens[0]], PAGES, 20, request_id="b"),
    ]
    both = pipeline.execute(batch(*rows, num_steps=10)).token_ids
    # it continues to compute; the scheduler drops the surplus
    assert both["a"] == both["b"] == tuple(tokens[1:11])


def test_prompt_chunks_sample_nothing_but_the_last(pipeline: TextGenerationPipeline) -> None:
    chunk = row(PROMPT[:12], PAGES, samples=False)
    assert dict(pipeline.execute(batch(chunk)).token_ids) == {}
    neighbour = row([5], [14], request_id="b")
    mixed = batch(row(PROMPT[12:18], PAGES, 12, samples=False), neighbour)
    assert mixed.mode is ForwardMode.MIXED
    assert set(pipeline.execute(mixed).token_ids) == {"b"}
    last = pipeline.execute(batch(row(PROMPT[18:], PAGES, 18)))
    assert last.token_ids["a"] == tuple(generate(pipeline, []))


def test_nothing_to_do(pipeline: TextGenerationPipeline) -> None:
    before = pipeline.runner.forward_pass_id
    output = pipeline.execute(ScheduledBatch((), ForwardMode.IDLE))
    assert dict(output.token_ids) == {}
    assert pipeline.runner.forward_pass_id == before + 1


def test_log_probabilities_are_returned_on_request(pipeline: TextGenerationPipeline) -> None:
    rows = [
        row(PROMPT, PAGES, request_id=name, sampling=SamplingParams(temperature=0, top_logprobs=n))
        for name, n in (("none", None), ("chosen", 0), ("best", 3))
    ]
    output = pipeline.execute(batch(*rows))
    assert set(output.logprobs) == {"chosen", "best"}
    (chosen,), (best,) = output.logprobs["chosen"], output.logprobs["best"]
    assert chosen.token_id == output.token_ids["chosen"][0]
    assert chosen.top == ()
    assert len(best.top) == 3
    assert best.top[0] == (best.token_id, best.logprob)
    assert chosen.logprob == best.logprob < 0
    penalised = SamplingParams(temperature=0.3, top_logprobs=1, presence_penalty=9.0)
    turn = row([PROMPT[0]], PAGES, 20, sampling=penalised, output_ids=(1, 2))
    entries = pipeline.execute(batch(turn, num_steps=4)).logprobs["a"]
    assert len(entries) == 4


def test_logits_in_another_format(checkpoint: Path, pipeline: TextGenerationPipeline) -> None:
    """`in_dtype` rounds the logits for all readers; the model's computation is unchanged."""
    halved = TextGenerationPipeline(pipeline_config(checkpoint, sampling={"in_dtype": "bfloat16"}))
    prompt = batch(row(PROMPT, PAGES, sampling=SamplingParams(temperature=0, top_logprobs=1)))
    exact, rounded = (
        made.runner.forward(made.runner.prepare(prompt)).next_token_logits
        for made in (pipeline, halved)
    )
    assert torch.equal(rounded, exact.bfloat16().float())
    assert not torch.equal(rounded, exact)
    output = halved.execute(prompt)
    assert output.token_ids["a"] == (int(rounded.argmax()),)
    (entry,) = output.logprobs["a"]
    assert entry.logprob == pytest.approx(float(rounded.log_softmax(-1).max()), abs=1e-6)


def test_log_probabilities_in_another_format(
    checkpoint: Path, pipeline: TextGenerationPipeline
) -> None:
    values = {"sampling": {"out_dtype": "bfloat16"}, "enable_echo": True}
    halved = TextGenerationPipeline(pipeline_config(checkpoint, **values))
    plain = TextGenerationPipeline(pipeline_config(checkpoint, enable_echo=True))
    params = SamplingParams(temperature=0, top_logprobs=2, echo=True)
    prompt = batch(row(PROMPT, PAGES, sampling=params))
    exact, rounded = plain.execute(prompt), halved.execute(prompt)
    assert exact.token_ids == rounded.token_ids
    pairs = [
        (exact.logprobs["a"], rounded.logprobs["a"]),
        (exact.prompt_logprobs["a"], rounded.prompt_logprobs["a"]),
    ]
    for before, after in pairs:
        assert after == tuple(round_logprob(entry, torch.bfloat16) for entry in before)
        assert after != before


def test_the_facts_the_engine_asks_for(checkpoint: Path, pipeline: TextGenerationPipeline) -> None:
    assert pipeline.vocab_size == 96
    assert pipeline.max_seq_len == 512
    assert pipeline.eos_token_ids == {3}
    assert pipeline.memory_plan.num_pages == pipeline.kv_manager.num_pages == 64
    assert pipeline.kv_manager.page_size == 16
    pipeline.release("unknown")
    pipeline.release("unknown")
    other = TextGenerationPipeline(pipeline_config(checkpoint, max_length=99))
    assert other.max_seq_len == 99
    other.shutdown()
    with pytest.raises(RuntimeError, match="initialize"):
        other.execute(batch(row([1], [1])))
