"""Captured decoding on the CPU: the selection of replays, and equality with eager forwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.batch import (
    ForwardMode,
    ModelOutputs,
    ReturnHiddenStates,
    ScheduledBatch,
    ScheduledRow,
)
from llm.config import ModelConfig, PipelineConfig
from llm.engine.engine import assemble_engine
from llm.models.auto import AutoModel
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import Request, SamplingParams
from llm.runner.graphs.cuda_graphs import GraphRunner
from llm.runner.graphs.input_buffers import MAX_VIEWS, InputBuffers, InputSizes, TokenViews
from llm.runner.graphs.shapes import GraphLimits
from llm.runner.graphs.stats import GraphStats
from llm.runner.model_runner import ModelRunner
from tests.llm.config import test_architectures as architectures
from tests.llm.engine import test_create_engine as plain
from tests.llm.llama_checkpoints import (
    batch,
    create_runner,
    pipeline_config,
    random_ids,
    row,
    write_llama,
)
from tests.llm.lora.adapters import write_adapter
from tests.llm.lora.test_lora import lora
from tests.llm.models.test_embeddings import write_modules
from tests.llm.runner.host_graphs import HostCapture, create_pair, use_gathered, use_graphs
from tests.llm.runner.late_stream import LateStream
from tests.llm.runner.test_tensor_interface import Client

PAGE_SIZE = 16
NUM_ROWS = 9
MODELS = {
    "llama": write_llama,
    "qwen2": lambda folder: architectures.write(folder, "qwen2"),
    "qwen3 with windows": lambda folder: architectures.write(folder, "qwen3 with biases"),
    "mistral with a window": lambda folder: architectures.write(folder, "mistral with a window"),
}


class Decoding:
    """Requests on a pair of runners that get the same inputs, and must compute the same."""

    def __init__(self, eager: ModelRunner, replayed: ModelRunner) -> None:
        self.eager, self.replayed = eager, replayed
        rng = np.random.default_rng(5)
        pages = (1 + rng.permutation(4 * NUM_ROWS)).tolist()
        self.pages = [pages[4 * n : 4 * n + 4] for n in range(NUM_ROWS)]
        self.lengths = [3 + 5 * n for n in range(NUM_ROWS)]
        prompts = [random_ids(length, 96, seed=length) for length in self.lengths]
        self.run(
            *(
                row(ids, pages, request_id=str(n))
                for n, (ids, pages) in enumerate(zip(prompts, self.pages, strict=True))
            )
        )

    def run(self, *rows: ScheduledRow) -> ModelOutputs:
        expected = self.eager.forward(self.eager.prepare(batch(*rows)))
        found = self.replayed.forward(self.replayed.prepare(batch(*rows)))
        assert torch.equal(found.next_token_logits, expected.next_token_logits)
        assert torch.equal(found.logits, expected.logits)
        assert found.logit_offsets == expected.logit_offsets
        return found

    def decode(self, places: list[int], tokens: list[int]) -> None:
        self.run(*(self.row(place, token) for place, token in zip(places, tokens, strict=True)))
        for place in places:
            self.lengths[place] += 1

    def row(self, place: int, token: int) -> ScheduledRow:
        return row([token], self.pages[place], self.lengths[place], request_id=str(place))

    def slot(self, place: int) -> int:
        """Return the slot of a row's next token."""
        page, offset = divmod(self.lengths[place], PAGE_SIZE)
        return self.pages[place][page] * PAGE_SIZE + offset

    def check_pages(self) -> None:
        """Check that keys and values of all layers are the same, except in the padding page."""
        assert self.eager.token_to_kv_pool is not None
        assert self.replayed.token_to_kv_pool is not None
        for expected, found in zip(
            self.eager.token_to_kv_pool.storage, self.replayed.token_to_kv_pool.storage, strict=True
        ):
            assert torch.equal(expected[:, PAGE_SIZE:], found[:, PAGE_SIZE:])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("write", MODELS.values(), ids=MODELS)
def test_a_replay_is_the_eager_forward(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    decoding = Decoding(*create_pair(write(tmp_path), max_batch_size=8))
    for count in (1, 2, 3, 8, 5, 1):
        decoding.decode(list(range(count)), random_ids(count, 96, seed=count))
    decoding.check_pages()
    graphs = decoding.replayed.graph_runner
    assert graphs is not None
    assert graphs.stats() == GraphStats(len(graphs.shapes), 6, 0, eager_prompts=1)


some_rows = st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, unique=True)


@given(st.lists(some_rows, max_size=6))
@settings(max_examples=15)
def test_any_sequence_of_batches(checkpoint: Path, steps: list[list[int]]) -> None:
    """Rows start, end and change places; batches above the largest bucket run between replays."""
    decoding = Decoding(*create_pair(checkpoint, max_batch_size=6))
    for seed, places in enumerate(steps):
        decoding.decode(places, random_ids(len(places), 96, seed=seed))
    decoding.check_pages()
    graphs = decoding.replayed.graph_runner
    assert graphs is not None
    sizes = [len(places) for places in steps]
    assert graphs.num_replays == sum(size <= 6 for size in sizes)
    assert graphs.num_eager_decodes == sum(size > 6 for size in sizes)


def test_rows_that_pad_change_nothing(checkpoint: Path) -> None:
    """Three rows in a bucket of four: only their own slots are written."""
    decoding = Decoding(*create_pair(checkpoint, max_batch_size=4))
    pool = decoding.replayed.token_to_kv_pool
    assert pool is not None
    before = pool.storage[0].clone()
    slots = [decoding.slot(n) for n in range(3)]
    decoding.decode([0, 1, 2], [7, 8, 9])
    changed = (pool.storage[0] != before).any(2).any(0).nonzero().flatten().tolist()
    assert set(changed) <= {0, *slots}
    assert set(slots) <= set(changed)


def test_larger_batches_run_eagerly_with_one_warning(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoding = Decoding(*create_pair(checkpoint, max_batch_size=2))
    with caplog.at_level(logging.WARNING):
        decoding.decode([0, 1, 2], [7, 8, 9])
        decoding.decode([0, 1, 2], [7, 8, 9])
    assert caplog.text.count("more than 2 rows (this one has 9) run without CUDA graphs") == 1


def test_other_than_plain_decode_batches_run_eagerly(checkpoint: Path) -> None:
    decoding = Decoding(*create_pair(checkpoint, max_batch_size=6))
    graphs = decoding.replayed.graph_runner
    assert graphs is not None
    plain_row = decoding.row(0, 7)
    assert graphs.prepare(batch(plain_row)) is not None
    prompt = row([1, 2], [40], request_id="new")
    decodes = [batch(plain_row._replace(lora="french"))]
    prompts = [
        batch(prompt._replace(lora="french"), plain_row),
        batch(prompt._replace(embeds=True), plain_row),
        batch(prompt._replace(sampling=SamplingParams(echo=True, top_logprobs=0)), plain_row),
        batch(row([0] * 49, [40, 41, 42, 43])),  # too many tokens
        batch(*[prompt._replace(request_id=str(n)) for n in range(5)]),  # too many prompts
    ]
    for other in (*decodes, *prompts, ScheduledBatch((), ForwardMode.IDLE)):
        assert graphs.prepare(other) is None
    counts = graphs.stats()
    assert (counts.eager_decodes, counts.eager_prompts) == (len(decodes), 1 + len(prompts))


def test_nothing_is_replayed_before_it_is_captured(checkpoint: Path) -> None:
    runner = ModelRunner(pipeline_config(checkpoint, max_batch_size=3))
    runner.initialize()
    use_gathered(runner)
    capture = HostCapture()
    assert runner.attn_backend is not None
    parts = (runner.loaded_model, runner.attn_backend)
    graphs = GraphRunner(*parts, capture, GraphLimits(3, 16, 64))
    assert graphs.prepare(batch(row([1], [1]))) is None
    graphs.capture()
    graphs.capture()
    assert capture.num_captured == len(graphs.shapes) == 5
    assert graphs.prepare(batch(row([1], [1]))) is not None


def test_parts_that_cannot_be_captured(checkpoint: Path) -> None:
    runner = ModelRunner(pipeline_config(checkpoint))
    with pytest.raises(RuntimeError, match="make the attention backend"):
        runner.use_graphs(HostCapture())
    runner.initialize()
    with pytest.raises(RuntimeError, match="SdpaBackend cannot be captured"):
        runner.use_graphs(HostCapture())
    use_gathered(runner)
    assert runner.attn_backend is not None
    model = object.__new__(AutoModel)
    with pytest.raises(RuntimeError, match="AutoModel cannot be captured"):
        GraphRunner(model, runner.attn_backend, HostCapture(), GraphLimits(1, 1, 1))
    states = create_runner(
        pipeline_config(checkpoint), return_hidden_states=ReturnHiddenStates.LAST
    ).loaded_model
    with pytest.raises(RuntimeError, match="return no hidden states"):
        GraphRunner(states, runner.attn_backend, HostCapture(), GraphLimits(1, 1, 1))


def on_gpu(checkpoint: Path, **model: Any) -> ModelRunner:
    """Return a runner for a GPU that is never used."""
    values = {"device_specs": ["cuda"], "quantization_encoding": "float32", **model}
    return ModelRunner(PipelineConfig(model=ModelConfig(model_path=str(checkpoint), **values)))


def test_runners_that_capture_decoding(checkpoint: Path, tmp_path: Path) -> None:
    on_cpu = ModelRunner(pipeline_config(checkpoint))
    assert (on_cpu.captures_decoding, on_cpu.graph_bytes(256)) == (False, 0)
    runner = on_gpu(checkpoint)
    assert runner.captures_decoding
    assert runner.graph_bytes(256) > 256 * runner.vocab_size * 4
    assert not on_gpu(checkpoint, disable_cuda_graph=True).captures_decoding
    assert not on_gpu(write_modules(write_llama(tmp_path), "mean_tokens")).captures_decoding
    drafting = PipelineConfig(
        model=ModelConfig(model_path=str(checkpoint), device_specs=["cuda"]),
        draft_model=ModelConfig(model_path=str(checkpoint)),
    )
    assert not ModelRunner(drafting).captures_decoding


@pytest.mark.parametrize("kind", [TextGenerationPipeline, OverlapTextGenerationPipeline])
def test_warming_up(checkpoint: Path, kind: Any) -> None:
    options = {"stream": LateStream()} if kind is OverlapTextGenerationPipeline else {}
    pipeline = kind(pipeline_config(checkpoint, max_batch_size=2), **options)
    assert pipeline.graph_stats() is None
    with pytest.raises(RuntimeError, match="decoding cannot be captured: CUDA graphs need a GPU"):
        pipeline.warmup_graph_capture()
    capture = use_graphs(pipeline.runner)
    pipeline.warmup_graph_capture()
    assert capture.num_captured == 8
    assert pipeline.graph_stats() == GraphStats(num_shapes=8, replays=0, eager_decodes=0)


def test_several_steps_of_a_turn_are_replayed(checkpoint: Path) -> None:
    prompts = [row(random_ids(n + 4, 96), [n + 1, n + 20], request_id=str(n)) for n in range(3)]
    rows = [row([5], [n + 1, n + 20], n + 4, request_id=str(n)) for n in range(3)]
    found = []
    for use in (use_gathered, use_graphs):
        pipeline = TextGenerationPipeline(pipeline_config(checkpoint, max_batch_size=4))
        use(pipeline.runner)
        pipeline.execute(batch(*prompts))
        found.append(pipeline.execute(batch(*rows, num_steps=6)).token_ids)
    assert found[0] == found[1]
    assert pipeline.graph_stats() == GraphStats(9, 6, 0, prompt_replays=1)


@pytest.mark.parametrize("num_pages", [256, 14])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_an_engine_delivers_the_same_tokens(
    tiny_checkpoint: Path, num_pages: int, overlaps: bool, on_device: bool
) -> None:
    """In full batches and preempted, greedy and random, with penalties; six rows at most.

    `on_device`: tokens are sampled by the program for a GPU.
    """
    config = plain.config(tiny_checkpoint, num_pages=num_pages, max_batch_size=6)
    counts = same_with_graphs(config, overlaps=overlaps, on_device=on_device)
    assert counts.replays > 20
    assert counts.eager_decodes == 0


def same_with_graphs(
    config: PipelineConfig, *, overlaps: bool, on_device: bool = False
) -> GraphStats:
    """Compare engines with and without graphs; return the statistics of the former."""
    results = []
    for use in (use_gathered, use_graphs):
        pipeline = (
            OverlapTextGenerationPipeline(config, stream=LateStream())
            if overlaps
            else TextGenerationPipeline(config)
        )
        if on_device:
            pipeline.runner.sample_on_device()
        use(pipeline.runner)
        engine = assemble_engine(pipeline, config)
        engine.start()
        results.append(plain.run(engine, together=True))
        engine.shutdown()
    assert results[0] == results[1]
    counts = engine.stats().graphs
    assert counts is not None
    return counts


def test_graphs_that_something_refers_to_are_freed(checkpoint: Path) -> None:
    runner = ModelRunner(pipeline_config(checkpoint, max_batch_size=2))
    runner.initialize()
    capture = use_graphs(runner)
    assert capture.captured
    runner.shutdown()
    for work in capture.captured:
        with pytest.raises(RuntimeError, match="freed"):
            work.replay()


def test_a_runner_driven_by_tensors_replays(checkpoint: Path) -> None:
    eager, replayed = create_pair(checkpoint, max_batch_size=2)
    kept = []
    for runner in (eager, replayed):
        client, found = Client(runner), []
        runner.forward(client.extend(random_ids(20, 96)))
        for token in (4, 5, 6):
            found.append(runner.forward(client.decode(token, return_logprob=True)))
        deltas = client.decode(7, mrope_position_deltas=[3])
        found.append(runner.forward(deltas))
        kept.append(found)
    for expected, got in zip(*kept, strict=True):
        assert torch.equal(got.next_token_logits, expected.next_token_logits)
    assert torch.equal(kept[0][0].next_token_logprobs, kept[1][0].next_token_logprobs)
    assert replayed.graph_runner is not None
    assert replayed.graph_runner.num_replays == 4


def test_input_buffers_stay_where_they_are() -> None:
    sizes = InputSizes(record_words=5, num_tokens=3, num_sampled=1, table_words=400, num_states=2)
    buffers = InputBuffers(sizes.num_bytes, torch.device("cpu"))
    inputs, counterpart = buffers.inputs(sizes), buffers.inputs(sizes)
    assert len(buffers.device) >= sizes.num_bytes >= 4 * 5 + 8 * (3 * 3 + 1) + 4 * 400
    for step in range(5):
        buffers.begin()
        for place, section in enumerate(inputs):
            section.take()[:] = 100 * step + place
        buffers.send()
        for place, (section, same) in enumerate(zip(inputs, counterpart, strict=True)):
            assert set(section.device.tolist()) == {100 * step + place}
            assert section.device.data_ptr() == same.device.data_ptr()
            assert section.device.data_ptr() % 16 == buffers.device.data_ptr() % 16
    assert [len(section.device) for section in inputs] == [5, 3, 3, 3, 1, 4, 2, 400]
    smaller = InputSizes(record_words=0, num_tokens=1, num_sampled=0, table_words=1)
    assert buffers.inputs(smaller).ids.device.data_ptr() == inputs.records.device.data_ptr()


def test_views_of_tokens_are_kept_but_not_for_ever() -> None:
    sizes = InputSizes(record_words=0, num_tokens=60, num_sampled=0, table_words=0)
    buffers = InputBuffers(sizes.num_bytes, torch.device("cpu"))
    inputs, ids = buffers.inputs(sizes), torch.arange(60)
    inputs.slots.device.copy_(ids + 100)
    views = TokenViews(ids, inputs)
    assert views.of(3, 5) is views.of(3, 5)
    for first in range(60):
        for last in range(first, 60):
            found, _, slots = views.of(first, last)
            assert torch.equal(found, ids[first:last])
            assert torch.equal(slots, ids[first:last] + 100)
    assert len(views._kept) <= MAX_VIEWS < 60 * 61 // 2


def test_input_buffers_are_written_between_two_sends() -> None:
    sizes = InputSizes(record_words=1, num_tokens=2, num_sampled=0, table_words=9000)
    buffers = InputBuffers(sizes.num_bytes, torch.device("cpu"))
    inputs = buffers.inputs(sizes)
    with pytest.raises(RuntimeError, match="call begin before writing"):
        inputs.ids.take()
    for _ in range(2):
        buffers.begin()
        inputs.ids.take()[:] = 7
        inputs.tables.take()[:] = 7
    buffers.begin()  # numbers that were not sent are discarded
    inputs.ids.take(1)[:] = 8
    buffers.send()
    assert inputs.ids.device[0] == 8
    assert not inputs.tables.device[1000:].any()  # the rest is not copied
    with pytest.raises(RuntimeError, match="send them once"):
        buffers.send()
    buffers.begin()
    with pytest.raises(ValueError, match="3 numbers in a section of 2"):
        inputs.ids.take(3)


def test_rows_with_an_adapter_run_eagerly(checkpoint: Path, tmp_path: Path) -> None:
    """Batches without an adapter are replayed in between."""
    adapter = write_adapter(tmp_path / "red", checkpoint)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    results = []
    for use in (use_gathered, use_graphs):
        config = pipeline_config(checkpoint, max_batch_size=4, lora=lora([str(adapter)]))
        pipeline = TextGenerationPipeline(config)
        use(pipeline.runner)
        engine = assemble_engine(pipeline, config)
        engine.start()
        found = []
        for names in (("",), ("red", ""), ("", "")):
            streams = [
                engine.submit(Request(str(n), (5, 6 + n, 7), sampling, lora=name))
                for n, name in enumerate(names)
            ]
            found += [[t for chunk in stream for t in chunk.token_ids] for stream in streams]
        engine.shutdown()
        results.append(found)
    assert results[0] == results[1]
    assert results[0][1] != results[0][0]
    counts = pipeline.graph_stats()
    assert counts is not None
    assert counts.replays >= 14
    assert counts.eager_decodes >= 7
