"""`SpeechStream`: blocks fire with the token that completes them, though codes come late."""

from __future__ import annotations

import asyncio
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from decoder import CodecSpec, DecoderStream, StreamingOptions
from llm import FinishReason, Request, TokenChunk
from tests.fakes import OffsetCodes
from tts.engine.client import SpeechJob
from tts.engine.queue import StreamQueue
from tts.engine.streams import SpeechSetup, SpeechStream

FIRST_CODE = 10
SPEC = CodecSpec("none", 16_000, Fraction(320), codebook_size=90)
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
steps = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=30)


@given(sizes, st.integers(0, 4), steps)
@settings(max_examples=60)
def test_blocks_are_those_of_a_stream_that_gets_each_token_at_once(
    chunk_sizes: tuple[int, ...], look_ahead: int, steps: list[tuple[int, ...]]
) -> None:
    asyncio.run(compare(chunk_sizes, look_ahead, steps))


async def compare(
    chunk_sizes: tuple[int, ...], look_ahead: int, steps: list[tuple[int, ...]]
) -> None:
    code_map = OffsetCodes(FIRST_CODE)
    options = StreamingOptions(chunk_sizes=chunk_sizes, look_ahead=look_ahead)
    job = SpeechJob(Request("a", (1,)), options)
    told: list[SpeechStream] = []
    task = SpeechStream(job, SpeechSetup(SPEC, code_map, 1000), StreamQueue(1000))
    task.notify = lambda changed: told.append(task)
    reference = DecoderStream(SPEC, options)
    count = num_tokens = 0
    for number, token_ids in enumerate((*steps, ())):
        is_last = number == len(steps)
        num_tokens += len(token_ids)
        reason = FinishReason.STOP if is_last else None
        fired = reference.push(code_map.codes(token_ids))
        fired += reference.finish() if is_last else []
        count += len(fired)
        told.clear()
        task.on_tokens(TokenChunk("a", token_ids, finish_reason=reason, output_tokens=num_tokens))
        assert task.num_ready == len(task.requests()) == count
        assert told or not fired
