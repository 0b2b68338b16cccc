"""4,096 requests at once on a pool for a few: they take turns, and all of them end well."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

from llm.engine import create_engine
from llm.request import FinishReason, Request, SamplingParams, TokenChunk
from tests.llm.llama_checkpoints import pipeline_config, write_llama

NUM_REQUESTS = 4096
NUM_PAGES, PAGE_SIZE = 80, 4


def test_a_flood_on_a_small_pool(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    config = pipeline_config(
        folder, num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_length=24, max_batch_size=64
    )
    engine = create_engine(config)
    ends: Counter[FinishReason] = Counter()
    num_tokens: dict[str, int] = {}

    def sink(chunk: TokenChunk) -> None:
        if chunk.finish_reason is not None:
            ends[chunk.finish_reason] += 1
            num_tokens[chunk.request_id] = chunk.output_tokens

    draw, wanted = Random(4), {}
    for number in range(NUM_REQUESTS):
        prompt = tuple(draw.randrange(4, 96) for _ in range(draw.randint(1, 6)))
        sampling = SamplingParams(seed=number, max_tokens=draw.randint(1, 9), ignore_eos=True)
        request = Request(f"r{number}", prompt, sampling)
        wanted[request.request_id] = sampling.max_tokens
        engine.submit(request, sink)
    engine.start()
    try:
        assert engine.drain(120)
        stats = engine.stats()
        assert ends == {FinishReason.LENGTH: NUM_REQUESTS}
        assert num_tokens == wanted
        assert stats.preemptions > 0
        assert (stats.failed_steps, stats.used_pages) == (0, 0)
        engine.run_on_engine(engine.pipeline.kv_manager.check_integrity).result(10)
    finally:
        engine.shutdown()
