"""Captured forwards with prompts, on the CPU: equality with eager ones, for any mixture."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm.batch import ScheduledRow
from llm.engine.engine import assemble_engine
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import Request, SamplingParams
from llm.runner.graphs.shapes import MIN_PROMPTS
from llm.runner.graphs.stats import GraphStats
from llm.runner.model_runner import ModelRunner
from tests.closeness import error
from tests.llm.config import test_architectures as architectures
from tests.llm.engine import test_create_engine as plain
from tests.llm.llama_checkpoints import batch, pipeline_config, random_ids, row, write_llama
from tests.llm.runner.host_graphs import create_pair, use_gathered, use_graphs
from tests.llm.runner.test_cuda_graphs import same_with_graphs

MAX_ERROR = 1e-5  # of the largest number; float32 sums in another order differ by 1e-6

NUM_ROWS = 5
LENGTH = 120  # maximum number of tokens of a row
MAX_FED = 48  # tokens of prompts in a batch; single tokens in front have separate room


@dataclass(frozen=True, slots=True)
class Feed:
    """A number of tokens of a row, and whether it samples."""

    place: int
    count: int
    samples: bool = True


class Mixtures:
    """Rows on a pair of runners that get the same inputs, and must compute the same."""

    def __init__(self, eager: ModelRunner, replayed: ModelRunner) -> None:
        self.eager, self.replayed = eager, replayed
        size = eager.page_size
        each = -(-LENGTH // size)
        order = torch.randperm(NUM_ROWS * each, generator=torch.Generator().manual_seed(size)) + 1
        self.pages = [part.tolist() for part in order.split(each)]
        self.fed = [0] * NUM_ROWS

    def run(self, feeds: list[Feed]) -> bool:
        """Compare one step; return whether a captured shape has room for it."""
        rows = [self._row(feed) for feed in feeds]
        rows.sort(key=lambda r: r.is_extend)  # decode rows come first
        expected = self.eager.forward(self.eager.prepare(batch(*rows)))
        inputs = self.replayed.prepare(batch(*rows))
        found = self.replayed.forward(inputs)
        assert inputs.sampling_rows == tuple(n for n, r in enumerate(rows) if r.samples)
        assert found.logit_offsets == expected.logit_offsets
        assert error(found.logits, expected.logits) < MAX_ERROR
        assert error(found.next_token_logits, expected.next_token_logits) < MAX_ERROR
        ids = [token for r in rows for token in r.token_ids]
        assert inputs.forward_batch.input_ids.tolist() == ids
        lengths = [len(r.token_ids) for r in rows]
        prompts = list(dropwhile(lambda length: length == 1, lengths))
        return sum(prompts) <= MAX_FED and len(prompts) <= MIN_PROMPTS

    def _row(self, feed: Feed) -> ScheduledRow:
        start, pages = self.fed[feed.place], self.pages[feed.place]
        self.fed[feed.place] += feed.count
        ids = random_ids(feed.count, 96, seed=100 * feed.place + start)
        name = str(feed.place)
        return row(ids, pages, start, request_id=name, samples=feed.samples)

    def check_pages(self) -> None:
        """Check that keys and values of all layers are the same, except in the padding page."""
        pools = [r.token_to_kv_pool for r in (self.eager, self.replayed)]
        assert pools[0] is not None
        assert pools[1] is not None
        for expected, found in zip(pools[0].storage, pools[1].storage, strict=True):
            size = self.eager.page_size
            assert error(found[:, size:], expected[:, size:]) < MAX_ERROR


def mixture(page_size: int, folder: Path, **values: Any) -> Mixtures:
    num_pages = 1 + NUM_ROWS * -(-LENGTH // page_size)
    sizes = {"page_size": page_size, "num_pages": num_pages, "max_length": LENGTH}
    return Mixtures(*create_pair(folder, max_batch_size=NUM_ROWS, **sizes, **values))


feeds = st.lists(
    st.builds(Feed, st.integers(0, NUM_ROWS - 1), st.integers(1, 14), st.booleans()),
    min_size=1,
    max_size=NUM_ROWS,
    unique_by=lambda feed: feed.place,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@given(st.sampled_from([1, 16, 128]), st.lists(feeds, min_size=1, max_size=6))
@example(page_size=16, steps=[[Feed(0, 1), Feed(1, 24), Feed(2, 24)], [Feed(0, 1), Feed(3, 49)]])
@settings(max_examples=25)
def test_any_mixed_batches(checkpoint: Path, page_size: int, steps: list[list[Feed]]) -> None:
    """Prompts, chunks that sample nothing, single tokens behind a prefix, decode rows."""
    mixed = mixture(page_size, checkpoint)
    have_room = [mixed.run(step) for step in steps]
    mixed.check_pages()
    graphs = mixed.replayed.graph_runner
    assert graphs is not None
    counts = graphs.stats()
    run_eagerly = counts.eager_decodes + counts.eager_prompts
    assert counts.replays + counts.prompt_replays + run_eagerly == len(steps)
    assert run_eagerly == have_room.count(False)


@pytest.mark.parametrize("name", ["qwen2", "qwen3 with biases", "mistral with a window"])
def test_other_architectures(tmp_path: Path, name: str) -> None:
    """With windows, head norms and biases."""
    mixed = mixture(16, architectures.write(tmp_path, name))
    mixed.run([Feed(0, 30), Feed(1, 9)])
    mixed.run([Feed(0, 1), Feed(1, 1), Feed(2, 40, samples=False)])
    mixed.run([Feed(2, 7), Feed(0, 1), Feed(3, 3)])
    mixed.check_pages()
    graphs = mixed.replayed.graph_runner
    assert graphs is not None
    assert graphs.num_prompt_replays == 3


def test_tokens_that_pad_change_nothing(checkpoint: Path) -> None:
    """Only the slots of the fed tokens are written, and slot 0."""
    mixed = mixture(16, checkpoint)
    mixed.run([Feed(0, 5)])
    pool = mixed.replayed.token_to_kv_pool
    assert pool is not None
    before = pool.storage[0].clone()
    slots = {mixed.pages[1][0] * 16 + n for n in range(7)} | {mixed.pages[0][0] * 16 + 5}
    mixed.run([Feed(0, 1), Feed(1, 7)])
    changed = set((pool.storage[0] != before).any(2).any(0).nonzero().flatten().tolist())
    assert changed - {0} == slots


def test_warming_up_runs_eagerly(checkpoint: Path) -> None:
    """With short and long prompts; later forwards are unchanged."""
    runner = ModelRunner(pipeline_config(checkpoint, max_batch_size=4))
    runner.initialize()
    runner.sample_on_device()
    use_graphs(runner)
    prompt = batch(row(random_ids(20, 96), [1, 2]))
    expected = runner.forward(runner.prepare(prompt)).logits.clone()
    runner.warm_up()
    assert torch.equal(runner.forward(runner.prepare(prompt)).logits, expected)
    assert runner.graph_runner is not None
    counts = runner.graph_runner.stats()
    assert (counts.prompt_replays, counts.eager_prompts, counts.replays) == (2, 0, 0)


def test_a_turn_of_several_steps_begins_with_prompts(checkpoint: Path) -> None:
    prompts = [row(random_ids(n + 4, 96), [n + 1, n + 20], request_id=str(n)) for n in range(3)]
    found = []
    for use in (use_gathered, use_graphs):
        pipeline = TextGenerationPipeline(pipeline_config(checkpoint, max_batch_size=4))
        use(pipeline.runner)
        found.append(pipeline.execute(batch(*prompts, num_steps=5)).token_ids)
    assert found[0] == found[1]
    counts = pipeline.graph_stats()
    assert counts is not None
    assert (counts.replays, counts.prompt_replays) == (4, 1)
    chunk = row([1, 2], [40], samples=False)
    with pytest.raises(ValueError, match="only a batch in which every row samples can continue"):
        pipeline.execute(batch(chunk, prompts[0], num_steps=2))


@pytest.mark.parametrize("values", [{}, {"num_pages": 14}], ids=str)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_an_engine_that_mixes_delivers_the_same_tokens(
    tiny_checkpoint: Path, values: dict[str, Any], overlaps: bool, on_device: bool
) -> None:
    """Prompts in chunks with decode rows, random sampling and penalties."""
    config = plain.config(
        tiny_checkpoint,
        max_batch_size=6,
        max_batch_input_tokens=32,
        enable_in_flight_batching=True,
        **values,
    )
    counts = same_with_graphs(config, overlaps=overlaps, on_device=on_device)
    assert counts.prompt_replays >= 10
    assert (counts.eager_decodes, counts.eager_prompts) == (0, 0)


def test_rows_that_do_not_sample_draw_nothing(checkpoint: Path) -> None:
    """A chunk runs in a batch with a penalised row, whose history stays correct."""
    sampling = SamplingParams(temperature=0, presence_penalty=50.0, max_tokens=8, ignore_eos=True)
    found = []
    for use in (use_gathered, use_graphs):
        config = pipeline_config(
            checkpoint,
            max_batch_size=4,
            max_batch_input_tokens=8,
            enable_in_flight_batching=True,
        )
        pipeline = TextGenerationPipeline(config)
        pipeline.runner.sample_on_device()
        use(pipeline.runner)
        engine = assemble_engine(pipeline, config)
        prompts = (tuple(random_ids(5, 96)), tuple(random_ids(40, 96, seed=1)))
        streams = [
            engine.submit(Request(str(n), prompt, sampling)) for n, prompt in enumerate(prompts)
        ]
        engine.start()
        found.append([[t for chunk in stream for t in chunk.token_ids] for stream in streams])
        engine.shutdown()
    assert found[0] == found[1]
    assert all(len(set(tokens)) == len(tokens) == 8 for tokens in found[0])
    assert pipeline.graph_stats() == GraphStats(
        num_shapes=5, replays=7, eager_decodes=0, prompt_replays=7
    )
