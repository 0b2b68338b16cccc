"""`SpeechStream`: blocks fire with the token that completes them, though codes come late."""

from __future__ import annotations

import asyncio
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from decoder import CodecSpec, DecoderStream, DecodeWindow, StreamingOptions
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


@given(sizes, st.integers(0, 4), st.lists(st.integers(0, 40), min_size=1, max_size=60))
@settings(max_examples=60)
def test_tokens_that_wait_for_their_block_make_the_same_one(
    chunk_sizes: tuple[int, ...], look_ahead: int, token_ids: list[int]
) -> None:
    """The engine's side of a buffer against a chunk for each token, also for what is due."""
    asyncio.run(compare_buffered(chunk_sizes, look_ahead, token_ids))


def windows(stream: SpeechStream) -> list[DecodeWindow]:
    return [request.window for request in stream.requests()]


async def compare_buffered(
    chunk_sizes: tuple[int, ...], look_ahead: int, token_ids: list[int]
) -> None:
    options = StreamingOptions(chunk_sizes=chunk_sizes, look_ahead=look_ahead)
    setup = SpeechSetup(SPEC, OffsetCodes(FIRST_CODE), 1000)
    job = SpeechJob(Request("a", (1,)), options)
    single, buffered = (SpeechStream(job, setup, StreamQueue(1000)) for _ in range(2))
    single.plays_until_s = buffered.plays_until_s = 5.0
    num_chunks = 0
    for count, token in enumerate(token_ids, 1):
        single.on_tokens(TokenChunk("a", (token,), output_tokens=count))
        buffered.buffer.ids.append(token)
        is_first = count == 1
        if is_first or len(buffered.buffer.ids) >= buffered.buffer.limit:
            chunk = TokenChunk("a", buffered.buffer.take(), output_tokens=count)
            buffered.on_tokens(chunk)
            num_chunks += 1
        assert windows(buffered) == windows(single)
        assert buffered.due_s(7.0) == single.due_s(7.0)
        assert buffered.nears_first_audio == single.nears_first_audio
    if min(token_ids) >= FIRST_CODE:  # each is a code
        assert num_chunks <= 1 + len(windows(single)), "the first token and each block"
    for stream, left in ((single, ()), (buffered, buffered.buffer.take())):
        reason, count = FinishReason.STOP, len(token_ids)
        stream.on_tokens(TokenChunk("a", left, finish_reason=reason, output_tokens=count))
    assert windows(buffered) == windows(single)
    assert repr(buffered) == repr(single)


def test_a_stream_that_fails_counts_the_tokens_that_wait() -> None:
    async def failed() -> int:
        options = StreamingOptions(chunk_sizes=(5,))
        job = SpeechJob(Request("a", (1,)), options)
        setup = SpeechSetup(SPEC, OffsetCodes(FIRST_CODE), 1000)
        task = SpeechStream(job, setup, StreamQueue(1000))
        task.on_tokens(TokenChunk("a", (20,), output_tokens=1))
        task.buffer.ids += (21, 22)
        task.end(FinishReason.ERROR, "no sound")
        return (await task.queue.get()).output_tokens

    assert asyncio.run(failed()) == 3
