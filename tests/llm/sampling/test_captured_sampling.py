"""Sampling behind captured forwards, and with the program for a GPU, on the CPU."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llm.batch import ForwardMode, ScheduledBatch, StepOutput
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import SamplingParams
from llm.runner.graphs.cuda_graphs import ALL_IDS
from llm.runner.model_runner import ModelRunner
from llm.sequence import FUTURE_TOKEN
from tests.closeness import error
from tests.llm.llama_checkpoints import batch, pipeline_config, row, write_llama
from tests.llm.runner.host_graphs import use_graphs
from tests.llm.runner.late_stream import LateStream


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


def test_penalties_among_replayed_rows(checkpoint: Path) -> None:
    """Logits of a replay are read by samplers that change their own copy."""
    sampling = SamplingParams(temperature=0, presence_penalty=50.0)
    pipeline = TextGenerationPipeline(pipeline_config(checkpoint, max_batch_size=2))
    use_graphs(pipeline.runner)
    pipeline.execute(batch(row([3, 4, 5], [1])))
    output = pipeline.execute(batch(row([6], [1], 3, sampling=sampling), num_steps=8))
    tokens = output.token_ids["a"]
    assert len(set(tokens)) == len(tokens) == 8


def counted(checkpoint: Path, sampling: SamplingParams) -> tuple[list[StepOutput], LateStream]:
    """Run nine steps of one row with overlap, captured, and sampled by the program for a GPU."""
    stream = LateStream()
    config = pipeline_config(checkpoint, max_batch_size=2)
    pipeline = OverlapTextGenerationPipeline(config, stream=stream)
    pipeline.runner.sample_on_device()
    use_graphs(pipeline.runner)
    found = [pipeline.execute(batch(row([3, 4, 5], [1], sampling=sampling)))]
    for step in range(8):
        outputs = (FUTURE_TOKEN,) * (step + 1)
        follow = row([FUTURE_TOKEN], [1], 3 + step, sampling=sampling, output_ids=outputs)
        found.append(pipeline.execute(batch(follow)))
    found.append(pipeline.execute(ScheduledBatch((), ForwardMode.IDLE)))
    pipeline.release("a")
    return found[1:], stream


def test_shutdown_frees_the_sampler(checkpoint: Path) -> None:
    """Its histories and scratch are the largest part of a GPU's memory besides weights and KV."""
    pipeline = TextGenerationPipeline(pipeline_config(checkpoint, max_batch_size=2))
    runner = pipeline.runner
    runner.sample_on_device()
    pipeline.execute(batch(row([3, 4, 5], [1]), num_steps=3))
    chosen = weakref.ref(runner.token_sampler), weakref.ref(runner.token_sampler._sampler._history)
    pipeline.shutdown()
    assert [ref() for ref in chosen] == [None, None]
    pipeline.shutdown()
    runner.release("a")


PENALISED = SamplingParams(temperature=0, presence_penalty=50.0)


def test_a_device_that_counts_needs_no_token_from_the_host(checkpoint: Path) -> None:
    """Penalties overlap, too: the previous batch is only waited for to deliver it."""
    found, stream = counted(checkpoint, PENALISED)
    tokens = [output.token_ids["a"][0] for output in found]
    assert len(set(tokens)) == len(tokens) == 9
    assert stream.log == ["launch"] + ["launch", "wait"] * 8 + ["wait"]


def test_log_probabilities_are_read_before_a_replay_writes_over_the_logits(
    checkpoint: Path,
) -> None:
    found, _ = counted(checkpoint, replace(PENALISED, top_logprobs=1))
    plain, _ = counted(checkpoint, PENALISED)
    assert [output.token_ids for output in found] == [output.token_ids for output in plain]
    eager = TextGenerationPipeline(pipeline_config(checkpoint))
    tokens, pairs = [3, 4, 5], []
    for output in found:
        (entry,) = output.logprobs["a"]
        asked = row(tokens, [1], sampling=replace(PENALISED, top_logprobs=90))
        (expected,) = eager.execute(batch(asked)).logprobs["a"]
        assert entry.token_id == output.token_ids["a"][0]
        pairs.append((entry.logprob, dict(expected.top)[entry.token_id]))
        assert entry.top[0][0] == expected.top[0][0]
        tokens.append(entry.token_id)
    # Relative to the largest: float32 sums in another order differ by 1e-6.
    assert error(*zip(*pairs, strict=True)) < 1e-5


def test_a_forward_alone_counts_nothing_that_was_loaded_before(checkpoint: Path) -> None:
    """Sampling is captured behind the forward: without rows it draws nothing."""
    runner = ModelRunner(pipeline_config(checkpoint, max_batch_size=2))
    runner.initialize()
    runner.sample_on_device()
    use_graphs(runner)
    runner.forward(runner.prepare(batch(row([3, 4, 5], [1]))))
    sampling = SamplingParams(temperature=0, presence_penalty=50.0)
    first = row([6], [1], 3, sampling=sampling)
    _, tokens = runner.step(runner.prepare(batch(first)), runner.token_sampler.prepare([first]))
    for _ in range(3):
        runner.forward(runner.prepare(batch(row([7], [1], 4))))
    follow = row([int(tokens)], [1], 4, sampling=sampling, output_ids=tokens.tolist())
    inputs = runner.prepare(batch(follow))
    outputs, drawn = runner.step(inputs, runner.token_sampler.prepare([follow]))
    expected = outputs.logits.clone()
    expected[0, int(tokens)] -= 50.0
    assert drawn.tolist() == expected.argmax(1).tolist()


COMMON = (8, 24)
FEW = SamplingParams(temperature=0, allowed_ranges=((14, 16),), presence_penalty=3.0)
MORE = replace(FEW, stop_token_ids=(9,), allowed_ranges=((12, 14), (17, 20)))


def limited(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ModelRunner, list[tuple[int, ...]]]:
    """Return a runner whose captured forwards write the needed logits alone, and the range of their
    ids of each forward.
    """
    config = pipeline_config(checkpoint, max_batch_size=2).with_common_ids(COMMON)
    runner, found = ModelRunner(config), list[tuple[int, ...]]()
    runner.initialize()
    runner.sample_on_device()
    model = runner.loaded_model
    write_all = model.write_logits

    def write_logits(*given: Any) -> None:
        batch, cache, target, tokens, states, needed = given
        write_all(batch, cache, target, tokens, states)
        first, end = needed.tolist()
        found.append((first, end))
        target[:, :first] = target[:, end:] = torch.nan

    monkeypatch.setattr(model, "limit_head", lambda ids: ids == COMMON)
    monkeypatch.setattr(model, "write_logits", write_logits)
    use_graphs(runner)
    found.clear()
    return runner, found


@pytest.mark.parametrize(
    ("sampling", "reads_logits", "expected"),
    [
        (MORE, False, (9, 20)),
        (replace(MORE, temperature=1.0, seed=3), False, (9, 20)),
        (MORE, True, ALL_IDS),
        (FEW, False, (14, 16)),
        (replace(FEW, allowed_ranges=((10, 15),), stop_token_ids=(7,)), False, (7, 16)),
        (replace(MORE, min_tokens=5), False, (12, 20)),
        (replace(FEW, allowed_ranges=(), allowed_cycle=(((15, 17),), ((3, 5),))), False, (14, 17)),
        (SamplingParams(temperature=0), False, None),
    ],
)
def test_logits_are_computed_where_they_are_needed(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: SamplingParams,
    *,
    reads_logits: bool,
    expected: tuple[int, int] | None,
) -> None:
    """Run batches of two rows, the first of which samples two ids only."""
    runner, needed = limited(checkpoint, monkeypatch)
    rows = [
        row([6], [1], 3, sampling=FEW),
        row([6], [2], 3, request_id="b", sampling=sampling),
    ]
    found = []
    for reads in (True, reads_logits):
        plan = runner.token_sampler.prepare(rows)
        inputs = runner.prepare(batch(*rows))
        outputs, tokens = runner.step(inputs, plan, reads_logits=reads)
        found.append((outputs.logits.clone(), tokens.tolist()))
        runner.release("a")
        runner.release("b")
    first, end = expected or (0, runner.vocab_size)
    assert needed == [ALL_IDS, (first, end)]
    assert found[0][1] == found[1][1]
    assert found[0][0].isfinite().all()
    assert found[1][0][:, first:end].isfinite().all()


def test_a_forward_alone_computes_all_logits(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, needed = limited(checkpoint, monkeypatch)
    one = row([6], [1], 3, sampling=MORE)
    runner.step(runner.prepare(batch(one)), runner.token_sampler.prepare([one]))
    assert runner.forward(runner.prepare(batch(one))).logits.isfinite().all()
    assert needed == [(9, 20), ALL_IDS]
