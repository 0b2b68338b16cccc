"""Tokens and audio do not depend on scheduling: any knob, any mixture of knobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoder import create_decoder
from llm.engine.engine import Engine, assemble_engine
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.registry import create_pipeline
from tests.deadlines import HANG_S
from tests.fakes import OffsetCodes, tiny_config, wait_until_idle
from tests.llm.runner.late_stream import LateStream
from tests.tts.engine.jobs import listen, read, samples, speech, text
from tts.engine.local_client import LocalEngineClient

Outcome = dict[str, tuple[object, ...]]

JOBS = [
    speech("short", "hello", seed=9, max_tokens=9, temperature=1.3),
    speech("long", "a lamp by the window flickered twice and went out", seed=2, exactly=33),
    speech("same start", "a lamp by the window flickered and stayed", seed=3, exactly=21),
]
TEXTS = [
    text("greedy", "once upon a time there was a ", temperature=0.0, exactly=20),
    text("sampled", "x", seed=5, temperature=1.2, repetition_penalty=1.2, exactly=30),
]

TOO_FEW = 8  # pages, so that requests lose theirs to others

NOT_FIELDS = {"page_size", "pages", "swap", "overlap"}  # pages count as such of 16 tokens

KNOBS: list[dict[str, Any]] = [
    {"enable_in_flight_batching": True},
    {"enable_in_flight_batching": True, "max_batch_input_tokens": 16},
    {"max_num_steps": 10},
    {"max_num_steps": 3, "max_batch_size": 2, "max_queue_size_tg": 5},
    {"min_batch_size_tg": 0, "enable_chunked_prefill": False},
    {"min_batch_size_tg": 99, "max_queue_size_tg": 2, "enable_prioritize_first_decode": True},
    {"enable_prioritize_first_decode": True, "enable_in_flight_batching": True},
    {"ce_delay_ms": 3.0, "max_batch_size": 4},
    {"max_batch_size": 1},
    {"execute_empty_batches": True},
    {"max_length": 128, "max_batch_total_tokens": 128},
    {"kvcache_ce_watermark": 0.2, "pages": 12},
    {"kvcache_ce_watermark": 1.0, "pages": TOO_FEW},
    {"kvcache_ce_watermark": 1.0, "pages": TOO_FEW, "swap": True, "max_num_steps": 4},
    {"page_size": 1},
    {"page_size": 64},
    {"overlap": True},
    {"overlap": True, "pages": TOO_FEW, "kvcache_ce_watermark": 1.0, "swap": True},
]


def create_engine(checkpoint: Path, values: dict[str, Any]) -> Engine:
    """Create an engine from the values; in-flight batching is off unless they enable it."""
    page_size = values.get("page_size", 16)
    num_pages = values.get("pages", 256) * 16 // page_size
    cache = {"kv_cache_page_size": page_size, "num_pages": num_pages}
    if values.get("swap"):
        cache |= {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 0.01}
    own = {k: v for k, v in values.items() if k not in NOT_FIELDS}
    model = {"model_path": str(checkpoint), "kv_cache": cache}
    config = tiny_config(checkpoint, **({"enable_in_flight_batching": False} | own), model=model)
    if values.get("overlap"):
        return assemble_engine(OverlapTextGenerationPipeline(config, stream=LateStream()), config)
    return assemble_engine(create_pipeline(config), config)


async def outcomes(checkpoint: Path, values: dict[str, Any], *, together: bool) -> Outcome:
    """Return the samples or tokens, counts and finish reason of each request."""
    decoder = create_decoder(checkpoint / "codec")
    client = LocalEngineClient(create_engine(checkpoint, values), decoder, OffsetCodes())
    found: Outcome = {}

    async def say(index: int) -> None:
        job = JOBS[index]
        blocks = await listen(client, job)
        last = blocks[-1]
        codes = sum(block.num_codes for block in blocks)
        audio = samples(blocks).tobytes()
        found[job.request.request_id] = (audio, codes, last.output_tokens, last.finish_reason)

    async def write(index: int) -> None:
        chunks = await read(client, TEXTS[index])
        tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
        found[TEXTS[index].request_id] = (tokens, chunks[-1].finish_reason)

    work = [say(0), say(1), write(0), say(2), write(1)]
    try:
        if together:
            await asyncio.gather(*work)
        else:
            for one in work:
                await one
        await wait_until_idle(client)
        status = await client.status()
    finally:
        await client.close()
    assert status.preemptions > 0 or values.get("pages") != TOO_FEW or not together
    return found


def run(checkpoint: Path, values: dict[str, Any], *, together: bool = True) -> Outcome:
    async def bounded() -> Outcome:
        return await asyncio.wait_for(outcomes(checkpoint, values, together=together), HANG_S)

    return asyncio.run(bounded())


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path) -> Outcome:
    """Outcomes of the requests, run one after the other."""
    found = run(tiny_checkpoint, {}, together=False)
    assert len(found) == len(JOBS) + len(TEXTS)
    assert all(len(audio) > 8000 for audio, *_ in found.values() if isinstance(audio, bytes))
    return found


@pytest.mark.parametrize("values", KNOBS, ids=str)
def test_one_knob_changes_no_output(
    tiny_checkpoint: Path, alone: Outcome, values: dict[str, Any]
) -> None:
    assert run(tiny_checkpoint, values) == alone


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.integers(1, 6))
    return {
        "max_batch_size": size,
        "max_queue_size_tg": draw(st.integers(1, 8)),
        "min_batch_size_tg": draw(st.integers(0, 9)),
        "ce_delay_ms": draw(st.sampled_from([0.0, 1.0])),
        "enable_prioritize_first_decode": draw(st.booleans()),
        "enable_chunked_prefill": draw(st.booleans()),
        "enable_in_flight_batching": draw(st.booleans()),
        "max_num_steps": draw(st.sampled_from([1, 2, 10])),
        "max_batch_input_tokens": draw(st.integers(size, 60)),
        "kvcache_ce_watermark": draw(st.sampled_from([0.3, 0.95, 1.0])),
        "pages": draw(st.sampled_from([9, 12, 256])),
        "page_size": draw(st.sampled_from([2, 16])),
        "swap": draw(st.booleans()),
    }


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=mixtures())
def test_mixtures_of_knobs_change_no_output(
    tiny_checkpoint: Path, alone: Outcome, values: dict[str, Any]
) -> None:
    assert run(tiny_checkpoint, values) == alone
