"""Captured forwards on a GPU: the eager logits, no allocation, no waiting, the same tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from llm.batch import ForwardMode, ScheduledBatch, ScheduledRow
from llm.config import PipelineConfig
from llm.engine.engine import Engine, assemble_engine
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.registry import create_pipeline
from llm.request import Request, SamplingParams, as_ids
from llm.runner.graphs.capture import CudaCapture
from llm.runner.graphs.input_buffers import InputBuffers, InputSizes
from llm.runner.model_runner import ModelRunner
from llm.sequence import FUTURE_TOKEN
from tests.gpu.flashinfer_runner import initialized
from tests.llm.llama_checkpoints import batch, random_ids, row, write_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE_SIZE = 16
VOCAB = 512
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}  # of the largest logit
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), **SHAPE)


def config(checkpoint: Path, encoding: str = "float32", **values: Any) -> PipelineConfig:
    model = {
        "model_path": str(checkpoint),
        "device_specs": ["cuda"],
        "quantization_encoding": encoding,
        "kv_cache": {"kv_cache_page_size": PAGE_SIZE, "num_pages": 256},
        **values.pop("model", {}),
    }
    return PipelineConfig(model=model, **({"max_batch_size": 12, "max_num_steps": 1} | values))


def create_runner(
    checkpoint: Path, encoding: str, backend: str = "flashinfer", *, replays: bool
) -> ModelRunner:
    model = {"disable_cuda_graph": True, "attention_backend": backend}
    runner = initialized(ModelRunner(config(checkpoint, encoding, model=model)))
    if replays:
        runner.use_graphs(CudaCapture(runner.device))
    return runner


def prompts(count: int) -> list[ScheduledRow]:
    return [
        row(random_ids(5 + 7 * n, VOCAB, seed=n), pages_of(n), request_id=str(n))
        for n in range(count)
    ]


def pages_of(place: int) -> list[int]:
    return [255 - 10 * place - step for step in range(10)]


def decode_rows(places: list[int]) -> list[ScheduledRow]:
    return [
        row([31 * place % VOCAB], pages_of(place), 5 + 7 * place, request_id=str(place))
        for place in places
    ]


@pytest.mark.parametrize(
    ("encoding", "backend"),
    [("float32", "gathered"), ("bfloat16", "gathered"), ("bfloat16", "flashinfer")],
)
def test_a_replay_is_the_eager_forward(checkpoint: Path, encoding: str, backend: str) -> None:
    eager = create_runner(checkpoint, encoding, backend, replays=False)
    replayed = create_runner(checkpoint, encoding, backend, replays=True)
    for runner in (eager, replayed):
        runner.forward(runner.prepare(batch(*prompts(14))))
    steps = [
        [0],
        [0, 1],
        [3, 1, 2],
        [5, 4, 8, 7, 6],
        list(range(12)),
        list(range(13)),
        [11],
        [2, 9],
    ]
    for places in steps:
        step = batch(*decode_rows(places))
        expected = eager.forward(eager.prepare(step)).logits
        found = replayed.forward(replayed.prepare(step)).logits
        assert found.shape == expected.shape
        limit = TOLERANCE[encoding] * float(expected.abs().max())
        assert float((found - expected).abs().max()) < limit, places
    assert replayed.graph_runner is not None
    counts = replayed.graph_runner.stats()
    assert (counts.replays, counts.eager_decodes) == (len(steps) - 1, 1)


@pytest.mark.parametrize("places", [[0, 1], [0, 1, 2, 3, 4, 5]], ids=len)
def test_rows_with_long_outputs(checkpoint: Path, places: list[int]) -> None:
    """Across the ends of pages, with other batches planned in between."""
    eager = create_runner(checkpoint, "bfloat16", replays=False)
    replayed = create_runner(checkpoint, "bfloat16", replays=True)
    for runner in (eager, replayed):
        runner.forward(runner.prepare(batch(*prompts(6))))
    for step in range(40):
        rows = [
            r._replace(start=r.start + step, token_ids=((as_ids(r.token_ids)[0] + step) % VOCAB,))
            for r in decode_rows(places)
        ]
        expected = eager.forward(eager.prepare(batch(*rows))).logits
        found = replayed.forward(replayed.prepare(batch(*rows))).logits
        limit = TOLERANCE["bfloat16"] * float(expected.abs().max())
        assert float((found - expected).abs().max()) < limit, step
        if step % 7 == 0:  # another bucket in between
            replayed.prepare(batch(*decode_rows(list(range(12)))))


def test_rows_that_pad_change_nothing(checkpoint: Path) -> None:
    runner = create_runner(checkpoint, "bfloat16", replays=True)
    runner.forward(runner.prepare(batch(*prompts(5))))
    pool = runner.token_to_kv_pool
    assert pool is not None
    before = [pool.keys(0).clone(), pool.values(0).clone()]
    rows = decode_rows([0, 1, 2, 3, 4])  # in a bucket of 8
    runner.forward(runner.prepare(batch(*rows)))
    own = {(r.pages[r.start // PAGE_SIZE], r.start % PAGE_SIZE) for r in rows}
    for then, now in zip(before, (pool.keys(0), pool.values(0)), strict=True):
        changed = (then != now).flatten(2).any(2).nonzero().tolist()
        assert {tuple(place) for place in changed if place[0] != 0} <= own
        assert len(own & {tuple(place) for place in changed}) == 5


def test_a_replay_takes_no_memory(checkpoint: Path) -> None:
    runner = create_runner(checkpoint, "bfloat16", replays=True)
    runner.forward(runner.prepare(batch(*prompts(12))))
    graphs = runner.graph_runner
    assert graphs is not None
    steps = [decode_rows(places) for places in ([0], [1, 2, 3], list(range(12)))]
    steps += [prompts(1), prompts(3), [*decode_rows([3, 4, 5, 6]), *prompts(2)]]
    for step in steps:
        inputs = graphs.prepare(batch(*step))
        assert inputs is not None
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()
        graphs.replay(inputs)
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        for key in ("allocation.all.allocated", "segment.all.allocated"):
            assert after[key] == before[key]


def test_graphs_take_what_was_planned(checkpoint: Path) -> None:
    runner = create_runner(checkpoint, "bfloat16", replays=False)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    runner.use_graphs(CudaCapture(runner.device))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = free - torch.cuda.mem_get_info()[0]
    planned = ModelRunner(config(checkpoint, "bfloat16")).graph_bytes(12)
    assert taken <= planned, f"{taken / 2**20:.1f} MiB taken, {planned / 2**20:.1f} MiB planned"


def test_the_host_never_writes_what_a_copy_still_reads() -> None:
    """Five loads while the device is busy: the work behind each reads its values."""
    device = torch.device("cuda")
    sizes = InputSizes(record_words=52, num_tokens=64, num_sampled=0, table_words=500)
    buffers = InputBuffers(sizes.num_bytes, device)
    inputs = buffers.inputs(sizes)
    matrix = torch.randn(4096, 4096, device=device)
    seen = []
    for step in range(5):
        for _ in range(20):
            matrix = (matrix @ matrix).clamp_(-1, 1)
        buffers.begin()
        for section in inputs:
            section.take()[:] = step
        buffers.send()
        seen.append(torch.cat([section.device.long() for section in inputs]))
    assert [set(numbers.tolist()) for numbers in seen] == [{step} for step in range(5)]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fail if the host waits for the device inside, except for events."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning about a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "everything": SamplingParams(
        seed=3, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.1
    ),
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_steady_decoding_never_waits(checkpoint: Path, sampling: SamplingParams) -> None:
    pipeline = OverlapTextGenerationPipeline(config(checkpoint, "bfloat16"))
    asked = [r._replace(sampling=sampling) for r in prompts(6)]
    pipeline.execute(batch(*asked))
    tokens: dict[str, list[int]] = {r.request_id: [] for r in asked}
    for step in range(12):
        follow = [
            r._replace(
                token_ids=(FUTURE_TOKEN,),
                start=r.start + len(r.token_ids) + step,
                is_extend=False,
                output_ids=(*tokens[r.request_id], FUTURE_TOKEN),
            )
            for r in asked
        ]
        with no_waiting():
            output = pipeline.execute(batch(*follow))
        for name, sampled in output.token_ids.items():
            tokens[name] += as_ids(sampled)
    pipeline.execute(ScheduledBatch((), ForwardMode.IDLE))
    counts = pipeline.graph_stats()
    assert counts is not None
    assert (counts.replays, counts.eager_decodes) == (12, 0)
    assert (counts.prompt_replays, counts.eager_prompts) == (1, 0)
    assert all(0 <= token < VOCAB for found in tokens.values() for token in found)


def generate(engine: Engine, sampling: SamplingParams, count: int = 20) -> dict[str, list[int]]:
    asked = [
        Request(f"r{n}", tuple(random_ids(4 + 5 * n, VOCAB, seed=n)), sampling)
        for n in range(count)
    ]
    streams = [engine.submit(request) for request in asked]
    engine.start()
    try:
        return {
            stream.request_id: [token for chunk in stream for token in as_ids(chunk.token_ids)]
            for stream in streams
        }
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(seed=7, repetition_penalty=1.2, max_tokens=40, ignore_eos=True),
    ],
    ids=["greedy", "random with penalties"],
)
@pytest.mark.parametrize("values", [{"enable_overlap_scheduler": True}, {"max_num_steps": 7}, {}])
def test_the_same_tokens_as_launch_by_launch(
    checkpoint: Path, sampling: SamplingParams, values: dict[str, Any]
) -> None:
    """Twenty requests on twelve rows; float32, so that all kernels agree on the best token."""
    found = []
    for disable_cuda_graph in (True, False):
        model = {"disable_cuda_graph": disable_cuda_graph}
        settings = config(checkpoint, model=model, **({} if disable_cuda_graph else values))
        engine = assemble_engine(create_pipeline(settings), settings)
        found.append(generate(engine, sampling))
    counts = engine.stats().graphs
    assert counts is not None
    assert counts.replays > 60
    assert counts.prompt_replays >= 2
    assert (counts.eager_decodes, counts.eager_prompts) == (0, 0)
    assert found[0] == found[1]
