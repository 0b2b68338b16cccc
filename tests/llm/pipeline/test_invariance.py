"""The same request with the same seed gives the same tokens in any batch.

Alone, in a batch of 32, in multi-step turns, with any prompt chunks, after preemption and
recomputation, from a cached prefix: not only the tokens, the logits are equal bit for bit.
`Streams` replaces the scheduler: it feeds rows and allocates pages.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from llm.batch import ScheduledRow
from llm.engine.engine import create_engine
from llm.kv_cache.state_slots import FIRST_STATE, StatePages
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import Request, SamplingParams, TokenChunk, TokenLogprob
from tests.fakes import LlamaShape, build_text_checkpoint
from tests.llm.gguf_files import quantised
from tests.llm.lfm2_checkpoints import write_lfm2
from tests.llm.llama_checkpoints import batch, pipeline_config, random_ids, row, write_llama
from tests.llm.lora.test_lora import run
from tests.llm.qwen3_moe_checkpoints import write_qwen3_moe
from tests.llm.qwen3_next_checkpoints import write_qwen3_next

SHIPPED = LlamaShape(hidden=512, layers=2, heads=8, kv_heads=4, intermediate=1536)

SPEECH = {"allowed_ranges": ((320, 4416),), "stop_token_ids": (258,), "ignore_eos": True}


@dataclass
class Stream:
    """One request as the scheduler would keep it."""

    name: str
    prompt: list[int]
    sampling: SamplingParams
    pages: MutableSequence[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    processed: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs

    def next_row(self, limit: int) -> ScheduledRow:
        """Return a row with up to `limit` tokens without KV."""
        tokens = self.tokens
        end = min(len(tokens), self.processed + limit)
        return row(
            tokens[self.processed : end],
            self.pages,
            self.processed,
            request_id=self.name,
            sampling=self.sampling,
            samples=end == len(tokens),
            output_ids=self.outputs,
        )


class Streams:
    """Rows and pages for a pipeline."""

    def __init__(self, pipeline: TextGenerationPipeline, seed: int = 0) -> None:
        self.pipeline = pipeline
        self.page_size = pipeline.kv_manager.page_size
        self.random = random.Random(seed)
        self.free = list(range(1, pipeline.kv_manager.num_pages))
        self.random.shuffle(self.free)
        self.free_states = list(range(FIRST_STATE, FIRST_STATE + 32))
        self.random.shuffle(self.free_states)

    def step(self, streams: Sequence[Stream], limits: Sequence[int]) -> None:
        """Feed up to a limit of tokens of each stream in one batch."""
        for stream, limit in zip(streams, limits, strict=True):
            if self.has_states and not stream.pages:
                stream.pages = StatePages.of((), self.free_states.pop())
            end = min(len(stream.tokens), stream.processed + limit)
            while len(stream.pages) * self.page_size < end:
                stream.pages.append(self.free.pop())
        rows = [s.next_row(limit) for s, limit in zip(streams, limits, strict=True)]
        sampled = self.pipeline.execute(batch(*rows)).token_ids
        for stream, fed in zip(streams, rows, strict=True):
            stream.processed += len(fed.token_ids)
            stream.outputs += sampled.get(stream.name, ())

    @property
    def has_states(self) -> bool:
        return self.pipeline.runner.gdn_pool is not None

    def preempt(self, stream: Stream) -> None:
        """Drop the pages; their ids are reused in another order."""
        self.free = self.random.sample(
            [*self.free, *stream.pages], len(self.free) + len(stream.pages)
        )
        if isinstance(stream.pages, StatePages):
            self.free_states.insert(0, stream.pages.state)
        stream.pages, stream.processed = [], 0

    def run_alone(self, stream: Stream, num_tokens: int) -> list[int]:
        while len(stream.outputs) < num_tokens:
            self.step([stream], [10_000])
        self.preempt(stream)
        return stream.outputs


@pytest.fixture(scope="module", params=["int8", "float32", "float8_e4m3fn"])
def shipped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TextGenerationPipeline:
    """Return a pipeline with layers of the shipped model's shape."""
    folder = build_text_checkpoint(
        tmp_path_factory.mktemp("shipped"), shape=SHIPPED, codebook_size=4096
    )
    return TextGenerationPipeline(
        pipeline_config(folder, num_pages=200, page_size=32, encoding=request.param)
    )


@pytest.fixture(scope="module", params=["int8", "float32", "bfloat16", "float8_e4m3fn", "q4_0"])
def small(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TextGenerationPipeline:
    folder = tmp_path_factory.mktemp("small")
    if request.param == "q4_0":
        _, folder = quantised(folder, lambda name: "Q4_0", intermediate_size=128)
    else:
        build_text_checkpoint(folder)
    return TextGenerationPipeline(pipeline_config(folder, num_pages=500, encoding=request.param))


OTHERS: dict[str, Callable[[Path], Path]] = {
    "short convolutions": write_lfm2,
    "delta nets": write_qwen3_next,
    "experts": write_qwen3_moe,
}


@pytest.fixture(
    scope="module",
    params=[
        *(("short convolutions", e) for e in ("int8", "float32", "bfloat16", "float8_e4m3fn")),
        ("delta nets", "float32"),
        *(("experts", encoding) for encoding in ("int8", "float32")),
    ],
    ids="-".join,
)
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TextGenerationPipeline:
    """Return a pipeline with recurrent states next to the pages, or with experts."""
    kind, encoding = request.param
    folder = OTHERS[kind](tmp_path_factory.mktemp("other"))
    return TextGenerationPipeline(pipeline_config(folder, num_pages=500, encoding=encoding))


def speech(index: int, length: int = 40) -> Stream:
    """Return a request whose distribution is flat enough to reveal any difference in the logits."""
    sampling = SamplingParams(temperature=1.5, top_k=200, seed=100 + index, **SPEECH)
    return Stream(f"s{index}", random_ids(length, 256, seed=index), sampling)


def test_a_stream_of_the_shipped_shape_is_the_same_alone_and_among_others(
    shipped: TextGenerationPipeline,
) -> None:
    streams = Streams(shipped)
    alone = streams.run_alone(speech(0, length=70), 24)
    assert len(set(alone)) > 15
    among = speech(0, length=70)
    others = [speech(n, length=10 + n) for n in range(1, 32)]
    # a chunk of it in a batch with whole prompts
    streams.step([*others, among], [*[10_000] * 31, 33])
    while among.processed < 70:
        streams.step([others[0], among, *others[1:9]], [1, 17, *[1] * 8])
    while len(among.outputs) < 16:
        streams.step([*others[9:31], among], [1] * 23)
    streams.preempt(among)
    streams.step([others[0], among], [1, 50])  # computed again, in chunks of another size
    while len(among.outputs) < 24:
        streams.step([among, *others[:3]], [40, 1, 1, 1])
    assert among.outputs == alone


def test_logits_do_not_change_a_bit(shipped: TextGenerationPipeline) -> None:
    """Prompt whole, in chunks, recomputed, token by token; one row and 32; 1, 2 and 3 threads.

    Threads of torch may change how attention is computed, but equally for all rows.
    """
    runner = shipped.runner
    ids = random_ids(70, 256, seed=9)

    def logits(pages: list[int], cuts: list[int], neighbours: int = 0) -> torch.Tensor:
        for start, end in itertools.pairwise(cuts):
            rows = [row(ids[start:end], pages, start)]
            if neighbours:
                beside = [row([5 + n], [100 + n], request_id=str(n)) for n in range(neighbours)]
                rows = [*beside, *rows]
            outputs = runner.forward(runner.prepare(batch(*rows)))
        return outputs.logits[-1]

    whole = logits([3, 4, 5], [0, 70])
    assert torch.equal(logits([9, 2, 14], [0, 58, *range(59, 71)]), whole)
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            whole = logits([3, 4, 5], [0, 70])
            assert torch.equal(logits([9, 2, 14], [0, 31, 64, 70]), whole)
            assert torch.equal(logits([7, 8, 9], [0, 69, 70], neighbours=31), whole)
    finally:
        torch.set_num_threads(threads)


REQUESTS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.8, top_k=40),
    SamplingParams(seed=3, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0),
    SamplingParams(seed=4, repetition_penalty=1.3, presence_penalty=0.5, penalty_window=6),
    SamplingParams(seed=5, allowed_ranges=((10, 60),), stop_token_ids=(3,), ignore_eos=True),
    SamplingParams(
        seed=6,
        allowed_cycle=(((10, 30),), ((30, 50),), ((5, 9), (50, 70))),
        stop_token_ids=(3,),
        ignore_eos=True,
    ),
]


def test_any_schedule_gives_the_same_tokens(small: TextGenerationPipeline) -> None:
    check_any_schedule(Streams(small), 32)


def test_any_schedule_gives_the_same_tokens_of_other_models(other: TextGenerationPipeline) -> None:
    check_any_schedule(Streams(other), 16)


def check_any_schedule(streams: Streams, count: int) -> None:
    """Run random batches, chunks and preemptions, until all requests have their tokens."""
    num_tokens = 8

    def request(index: int) -> Stream:
        prompt = random_ids(5 + 2 * index, 96, seed=index)
        return Stream(f"r{index}", prompt, REQUESTS[index % len(REQUESTS)])

    expected = [streams.run_alone(request(index), num_tokens) for index in range(count)]
    waiting = [request(index) for index in range(count)]
    chance = random.Random(0)
    while live := [stream for stream in waiting if len(stream.outputs) < num_tokens]:
        running = chance.sample(live, chance.randint(1, len(live)))
        streams.step(running, [chance.choice([1, 3, 16, 50, 1000]) for _ in running])
        if chance.random() < 0.2:
            streams.preempt(chance.choice(live))
    assert [stream.outputs for stream in waiting] == expected


def test_a_cached_prefix_changes_nothing(small: TextGenerationPipeline) -> None:
    """Pages that another request has filled, then shared."""
    streams = Streams(small)
    prompt = random_ids(40, 96)
    first = Stream("first", prompt, SamplingParams(seed=3))
    expected = Stream("alone", prompt, SamplingParams(seed=8))
    tokens = streams.run_alone(expected, 12)
    streams.step([first], [1000])
    sharing = Stream("sharing", prompt, SamplingParams(seed=8), first.pages[:2], [], 32)
    while len(sharing.outputs) < 12:
        streams.step([sharing], [1000])
    assert sharing.outputs == tokens


def test_seeds_matter(small: TextGenerationPipeline) -> None:
    streams = Streams(small)
    prompt = random_ids(8, 96)
    outputs = [
        streams.run_alone(Stream("a", prompt, SamplingParams(seed=seed)), 12) for seed in (1, 2, 1)
    ]
    assert outputs[0] != outputs[1]
    assert outputs[0] == outputs[2]


def test_checkpoints_are_read_into_the_same_model_twice(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    outputs = [
        Streams(TextGenerationPipeline(pipeline_config(folder, encoding="int8"))).run_alone(
            Stream("a", [1, 2, 3], SamplingParams(seed=4)), 15
        )
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1]


def test_log_probabilities_do_not_change_a_bit(tmp_path: Path) -> None:
    """Alone and in a batch, all digits of those of the chosen token and of the likeliest five."""
    engine = create_engine(pipeline_config(build_text_checkpoint(tmp_path)))
    requests = [
        Request(
            f"r{index}",
            tuple(random_ids(10 + 7 * index, 96, seed=index)),
            SamplingParams(seed=index, max_tokens=8, top_logprobs=5, allowed_ranges=((0, 200),)),
        )
        for index in range(6)
    ]

    def entries(chunks: list[TokenChunk]) -> list[TokenLogprob]:
        return [entry for chunk in chunks for entry in chunk.logprobs]

    alone = {request.request_id: run(engine, request) for request in requests}
    together = run(engine, *requests)
    engine.shutdown()
    for name, chunks in alone.items():
        assert len(entries(chunks[name])) == 8
        assert entries(chunks[name]) == entries(together[name])
