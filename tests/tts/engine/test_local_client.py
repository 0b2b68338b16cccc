"""The engine client on real parts: a tiny model, a tiny codec, one engine thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from decoder import CodeRangeError, MaskPolicy, StreamingOptions
from llm import FinishReason, RequestError
from tests.closeness import error
from tests.fakes import StepLog, create_client
from tests.tts.engine.jobs import HOP, NUM_CODES, STREAMED, listen, read, run, samples, speech, text
from tests.vocabulary import FIRST_CODE
from tts.engine.client import SpeechJob
from tts.engine.local_client import LocalEngineClient
from tts.errors import PreconditionError


def test_blocks_are_contiguous_and_the_last_has_the_finish_reason(
    engine_client: LocalEngineClient,
) -> None:
    async def scenario() -> None:
        job = speech("numbers", exactly=21)
        blocks = await listen(engine_client, job)
        assert [block.num_codes for block in blocks] == [2, 4, 8, 7]
        assert [block.first_code for block in blocks] == [0, 2, 6, 14]
        assert [block.first_sample for block in blocks] == [0, 2 * HOP, 6 * HOP, 14 * HOP]
        assert len(samples(blocks)) == 21 * HOP
        assert np.isfinite(samples(blocks)).all()
        assert np.abs(samples(blocks)).max() > 0.01
        assert [block.finish_reason for block in blocks] == [None, None, None, FinishReason.LENGTH]
        last = blocks[-1]
        assert (last.prompt_tokens, last.output_tokens) == (len(job.request.prompt_ids), 21)
        assert last.total_s > 0
        assert len(last.carry) == 8

    run(scenario)


def test_same_seed_alone_and_among_eight(engine_client: LocalEngineClient) -> None:
    jobs = [
        speech(f"voice-{n}", f"sentence number {n}" * (1 + n % 3), voice=n % 3, seed=n)
        for n in range(8)
    ]

    async def scenario() -> None:
        alone = [samples(await listen(engine_client, job)) for job in jobs]
        together = await asyncio.gather(
            *(listen(engine_client, job) for job in jobs),
            *(read(engine_client, text(f"text-{n}", seed=n)) for n in range(4)),
        )
        for expected, blocks in zip(alone, together[:8], strict=True):
            np.testing.assert_array_equal(expected, samples(blocks))
        assert len({audio.tobytes() for audio in alone}) == 8

    run(scenario)


def test_another_seed_gives_other_audio(engine_client: LocalEngineClient) -> None:
    async def scenario() -> None:
        one = await listen(engine_client, speech("one", seed=1, exactly=40))
        two = await listen(engine_client, speech("two", seed=2, exactly=40))
        assert not np.array_equal(samples(one), samples(two))

    run(scenario)


def test_audio_does_not_depend_on_steps_per_turn_or_pages(
    engine_client: LocalEngineClient, own_client: Callable[..., LocalEngineClient]
) -> None:
    """Turns have several decode forwards, and a small pool causes preemption."""
    several = own_client(max_num_steps=5)
    scarce = own_client(
        model={"kv_cache": {"kv_cache_page_size": 8, "num_pages": 16}}, max_batch_size=8
    )
    jobs = [speech(f"steps-{n}", seed=n, exactly=45) for n in range(4)]

    async def scenario() -> None:
        results = []
        for client in (engine_client, several, scarce):
            streams = await asyncio.gather(*(listen(client, job) for job in jobs))
            results.append([samples(blocks) for blocks in streams])
        for expected, multi, tight in zip(*results, strict=True):
            np.testing.assert_array_equal(expected, multi)
            np.testing.assert_array_equal(expected, tight)
        assert (await scarce.status()).preemptions > 0

    run(scenario)


def test_text_and_speech_share_batches(own_client: Callable[..., LocalEngineClient]) -> None:
    log = StepLog()
    client = own_client(step_log=log)

    async def scenario() -> None:
        await asyncio.gather(
            listen(client, speech("s1", exactly=40)),
            listen(client, speech("s2", exactly=40)),
            read(client, text("t1", exactly=24)),
        )
        mixed = [row for row in log.steps if {"s1", "s2", "t1"} <= set(row)]
        assert len(mixed) >= 10

    run(scenario)


def test_generate_streams_tokens_once_each(engine_client: LocalEngineClient) -> None:
    async def scenario() -> None:
        chunks = await read(engine_client, text("text", exactly=12))
        assert sum(len(chunk.token_ids) for chunk in chunks) <= 12
        assert chunks[-1].output_tokens == 12
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason is FinishReason.LENGTH

    run(scenario)


def test_a_continued_stream_equals_one_long_stream(engine_client: LocalEngineClient) -> None:
    """Greedy codes 0..15 in one job equal 0..7 in one job and 8..15 in a second with a carry."""
    cut = StreamingOptions(
        (4,),
        buffer=8,
        masks=MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True),
    )
    greedy = {"temperature": 0.0, "streaming": cut}

    async def scenario() -> None:
        whole = await listen(engine_client, speech("whole", exactly=16, **greedy))
        first_job = speech("first", exactly=8, **greedy)
        first = await listen(engine_client, first_job)
        carry = first[-1].carry
        assert carry == whole[1].carry
        prompt = first_job.request.prompt_ids + tuple(FIRST_CODE + code for code in carry)
        rest = speech("rest", exactly=8, prompt_ids=prompt, **greedy)
        rest = SpeechJob(rest.request, cut, carry=carry, token_offset=8)
        second = await listen(engine_client, rest)
        assert second[-1].carry == whole[-1].carry
        joined = np.concatenate([samples(first), samples(second)])
        assert error(joined, samples(whole)) < 1e-5  # windows of other sizes, in float32

    run(scenario)


def test_refusals_come_before_any_audio(engine_client: LocalEngineClient) -> None:
    async def scenario() -> None:
        job = speech("bad-carry")
        with pytest.raises(CodeRangeError):
            await listen(engine_client, SpeechJob(job.request, STREAMED, carry=(NUM_CODES,)))
        with pytest.raises(RequestError):
            await listen(engine_client, speech("too-long", text="x" * 2000))
        stream = engine_client.speak(speech("twice", exactly=300))
        await anext(stream)
        with pytest.raises(RequestError, match="twice"):
            await listen(engine_client, speech("twice"))
        assert len(samples([block async for block in stream])) == 298 * HOP

    run(scenario)


def test_a_clip_becomes_codes_off_the_engine_thread(engine_client: LocalEngineClient) -> None:
    async def scenario() -> None:
        clip = np.sin(np.arange(20 * HOP) / 20).astype(np.float32)
        encoded, again = await asyncio.gather(
            engine_client.encode_prompt(clip), engine_client.encode_prompt(clip)
        )
        assert encoded == again
        codes, vector = encoded
        assert (len(codes), vector) == (20, b"")
        assert all(0 <= code < NUM_CODES for code in codes)

    run(scenario)


def test_a_text_model_refuses_speech_jobs(text_checkpoint: Path) -> None:
    client = create_client(text_checkpoint)

    async def scenario() -> None:
        assert client.codec is None
        assert (await read(client, text("text", max_tokens=5)))[-1].finish_reason is not None
        with pytest.raises(PreconditionError):
            await listen(client, speech("speech"))
        with pytest.raises(PreconditionError):
            await client.encode_prompt(np.zeros(HOP, dtype=np.float32))
        await client.close()

    run(scenario)
