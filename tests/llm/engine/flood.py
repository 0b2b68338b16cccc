"""Many requests at once on an engine of any device: they take turns, and all of them end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from llm.config import PipelineConfig
from llm.engine.engine import create_engine
from llm.engine.types import EngineStats
from llm.request import FinishReason, Request, SamplingParams, TokenChunk
from tests.deadlines import HANG_S


@dataclass(frozen=True, slots=True)
class Flood:
    """The number of requests, and the maximum lengths; each request has its own."""

    requests: int
    prompt: int
    output: int


def throw(config: PipelineConfig, flood: Flood) -> EngineStats:
    """Run the requests; return the statistics once all have ended and nothing is held."""
    engine = create_engine(config)
    ends: Counter[FinishReason] = Counter()
    num_tokens: dict[str, int] = {}

    def sink(chunk: TokenChunk) -> None:
        if chunk.finish_reason is not None:
            ends[chunk.finish_reason] += 1
            num_tokens[chunk.request_id] = chunk.output_tokens

    requests = requests_of(flood)
    for request in requests:
        engine.submit(request, sink)
    engine.start()
    try:
        assert engine.drain(HANG_S)
        stats = engine.stats()
        assert ends == {FinishReason.LENGTH: flood.requests}
        assert num_tokens == {r.request_id: r.sampling.max_tokens for r in requests}
        assert stats.preemptions > 0
        assert (stats.failed_steps, stats.used_pages) == (0, 0)
        engine.run_on_engine(engine.pipeline.kv_manager.check_integrity).result(60)
        return stats
    finally:
        engine.shutdown()


def requests_of(flood: Flood) -> list[Request]:
    """Return the same requests each time, of tokens 4 to 95."""
    draw, made = Random(4), []
    for number in range(flood.requests):
        prompt = tuple(draw.randrange(4, 96) for _ in range(draw.randint(1, flood.prompt)))
        count = draw.randint(1, flood.output)
        sampling = SamplingParams(seed=number, max_tokens=count, ignore_eos=True)
        made.append(Request(f"r{number}", prompt, sampling))
    return made
