"""Turns of an audio worker: batches, urgency, credit, failures, ends."""

from __future__ import annotations

import math
import time

import numpy as np

from decoder import DecodeResult
from llm import FinishReason, TokenChunk
from tests.tts.engine.audio_bench import (
    BAD_CODE,
    HOP,
    OFFSET,
    Bench,
    in_loop,
    numbers,
    read,
    tokens,
)
from tts.engine.decode_loop import InFlightBatch


def test_equal_shapes_are_rendered_together_one_call_per_turn() -> None:
    async def scenario() -> None:
        bench = Bench()
        tasks = [bench.speak(name) for name in "abcd"]
        other = bench.speak("other", sizes=(5,))
        for task in (*tasks, other):
            tokens(task, 1, 2, 3, 4, 5)
        assert bench.worker.after_step()
        assert bench.decoder.batches == [4]  # blocks of 2; the block of 3 has another shape
        bench.turns()
        assert sorted(bench.decoder.batches) == [1, 4, 4]
        for task in tasks:
            assert [block.num_codes for block in await read(task)] == [2, 3]
        assert [block.num_codes for block in await read(other)] == [5]

    in_loop(scenario)


class NeverRendered(DecodeResult):
    """Result of a device that hangs."""

    is_ready = False
    took_s = math.nan

    def samples(self) -> list[np.ndarray]:
        raise AssertionError("the result is not ready")


def test_rendering_s_is_the_time_since_the_launch() -> None:
    bench = Bench()
    assert bench.worker.rendering_s == 0
    started_s = time.monotonic() - 5
    bench.worker._launched.append(InFlightBatch((), NeverRendered(), started_s))
    assert bench.worker.after_step()
    assert 5 <= bench.worker.rendering_s < 60


def test_a_batch_has_the_decoders_limit() -> None:
    async def scenario() -> None:
        bench = Bench()
        tasks = [bench.speak(str(n)) for n in range(11)]
        for task in tasks:
            tokens(task, 1, 2)
        bench.turns()
        assert bench.decoder.batches == [8, 3]
        assert all(len(task.queue) == 1 for task in tasks)

    in_loop(scenario)


def test_first_blocks_are_decoded_first_then_the_nearest_underrun() -> None:
    async def scenario() -> None:
        bench = Bench()
        rich, poor = bench.speak("rich", sizes=(8, 9)), bench.speak("poor", sizes=(2, 7))
        new = bench.speak("new", sizes=(3,))
        tokens(rich, *range(8))
        tokens(poor, *range(2))
        bench.turns()
        tasks = {rich: 9, poor: 7, new: 3}  # three shapes, so three turns
        for task, num_codes in tasks.items():
            await read(task)
            tokens(task, *range(num_codes))
        order = []
        for _ in tasks:
            bench.worker.after_step()
            order += [task for task in tasks if task not in order and len(task.queue)]
        assert order == [new, poor, rich]

    in_loop(scenario)


def test_streams_with_enough_audio_wait_for_first_blocks() -> None:
    async def scenario() -> None:
        bench = Bench()
        rich, new = bench.speak("rich", sizes=(50,)), bench.speak("new", sizes=(3,))
        tokens(rich, *range(50))  # two seconds
        bench.turns()
        tokens(rich, *range(50))
        tokens(new, 1, 2)
        assert bench.worker.after_step()  # work is left, so the engine must not sleep
        assert (len(rich.queue), bench.decoder.batches) == (1, [1])
        tokens(new, 3)
        bench.turns()
        assert (len(rich.queue), len(new.queue)) == (2, 1)

    in_loop(scenario)


def test_a_full_queue_delays_blocks_and_pauses_the_sequence() -> None:
    async def scenario() -> None:
        bench = Bench(capacity=2, max_codes_ahead=6)
        slow, fast = bench.speak("slow", sizes=(2,)), bench.speak("fast", sizes=(2,))
        for _ in range(4):  # 8 codes each: 2 blocks queued, 2 kept back
            tokens(slow, 1, 2)
            tokens(fast, 3, 4)
            bench.turns()
            await read(fast)
        assert bench.engine.calls == []
        tokens(slow, 1, 2)
        bench.turns()
        assert bench.engine.calls == [("pause", "slow")]
        assert (len(slow.queue), len(fast.queue)) == (2, 0)
        seen = []
        while len(slow.queue):
            seen += await read(slow)
            bench.turns()
        assert [block.first_code for block in seen] == [0, 2, 4, 6, 8]
        assert bench.engine.calls == [("pause", "slow"), ("resume", "slow")]

    in_loop(scenario)


def test_a_lagging_decoder_pauses_the_language_model() -> None:
    """Six streams get codes in every turn, and no two of them can share a decoder call."""
    most_ahead, num_codes, per_turn = 8, 60, 5

    async def scenario() -> None:
        bench = Bench(max_codes_ahead=most_ahead)
        sizes = {bench.speak(str(n), sizes=(n,)): n for n in range(1, 7)}
        fed, heard = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0)
        num_turns = 0
        while any(heard[task] < num_codes for task in sizes):
            for task, size in sizes.items():
                if not task.is_paused and fed[task] < num_codes:
                    tokens(task, *range(per_turn))
                    fed[task] += per_turn
                assert fed[task] - heard[task] < most_ahead + per_turn + size
            bench.worker.after_step()
            for task in sizes:
                heard[task] += sum(block.num_codes for block in await read(task))
            num_turns += 1
            assert num_turns < 10 * num_codes
        assert {("pause", str(n)) for n in range(1, 4)} <= set(bench.engine.calls)
        assert fed == heard == dict.fromkeys(sizes, num_codes)

    in_loop(scenario)


def test_a_full_queue_pauses_text_requests() -> None:
    async def scenario() -> None:
        bench = Bench(capacity=2)
        task = bench.write()
        for _ in range(2):
            tokens(task, 1)
        bench.turns()
        assert bench.engine.calls == [("pause", "t")]
        await task.queue.get()
        bench.turns()
        assert bench.engine.calls == [("pause", "t"), ("resume", "t")]
        tokens(task, end=FinishReason.STOP)
        bench.turns()
        assert bench.worker.wait_idle(0)
        assert bench.worker.num_audio_streams == 0

    in_loop(scenario)


def test_only_the_stream_whose_codes_break_the_decoder_fails() -> None:
    async def scenario() -> None:
        bench = Bench()
        tasks = [bench.speak(name, sizes=(2,)) for name in "abc"]
        for task, code in zip(tasks, (1, BAD_CODE, 2), strict=True):
            tokens(task, 0, code)
        bench.turns()
        results = [await read(task) for task in tasks]
        assert [len(blocks[0].samples) for blocks in results] == [2 * HOP, 0, 2 * HOP]
        (failed,) = results[1]
        assert failed.finish_reason is FinishReason.ERROR
        assert "no such sound" in failed.error
        assert bench.engine.calls == [("cancel", "b")]
        assert bench.worker.num_audio_streams == 2
        tokens(tasks[1], 3, 4, end=FinishReason.CANCELLED)  # the engine's answer: no second end
        assert len(tasks[1].queue) == 0

    in_loop(scenario)


def test_a_token_outside_the_codebook_ends_its_stream() -> None:
    """Otherwise the reader would wait for ever."""

    async def scenario() -> None:
        bench = Bench()
        task = bench.speak(sizes=(2,))
        bench.worker.on_tokens(task, TokenChunk("a", (OFFSET + 1, OFFSET + 4096), output_tokens=2))
        (block,) = await read(task)
        assert block.finish_reason is FinishReason.ERROR
        assert "code 4096 is outside" in block.error
        assert bench.engine.calls == [("cancel", "a")]

    in_loop(scenario)


def test_cancellation_by_the_engine_ends_the_audio() -> None:
    async def scenario() -> None:
        bench = Bench(capacity=1)
        task = bench.speak(sizes=(2,), buffer=2)
        tokens(task, 1, 2, 3, 4)
        bench.turns()
        tokens(task, end=FinishReason.CANCELLED)
        first, last = await read(task)
        assert numbers([first, last]) == [(0, 2, 0, 2 * HOP), (2, 0, 2 * HOP, 0)]
        assert last.finish_reason is FinishReason.CANCELLED
        assert last.carry == (1, 2)  # the codes of delivered audio, not all generated ones

    in_loop(scenario)


def test_a_closed_reader_frees_the_stream_at_the_next_turn() -> None:
    async def scenario() -> None:
        bench = Bench()
        task = bench.speak()
        tokens(task, 1, 2, 3, 4, 5)
        bench.worker.cancel(task)
        assert bench.engine.calls == [("cancel", "a")]
        assert not bench.worker.after_step()
        assert bench.worker.num_audio_streams == 0
        assert bench.decoder.batches == []
        bench.worker.cancel(task)  # again: nothing
        assert len(bench.engine.calls) == 1

    in_loop(scenario)


def test_stopping_ends_every_stream_once() -> None:
    async def scenario() -> None:
        bench = Bench()
        speech, text = bench.speak(), bench.write()
        bench.worker.on_stop()
        bench.worker.on_stop()
        (block,) = await read(speech)
        assert block.finish_reason is FinishReason.CANCELLED
        assert (await text.queue.get()).finish_reason is FinishReason.CANCELLED
        assert len(text.queue) == 0
        assert bench.worker.wait_idle(0)

    in_loop(scenario)
