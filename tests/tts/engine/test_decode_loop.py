"""The decode loop: blocks of a stream, their fields, and how a stream ends."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from decoder import CodeRangeError
from llm import FinishReason, Profiler, RequestError, TokenChunk
from tests.tts.engine.audio_bench import HOP, OFFSET, Bench, in_loop, numbers, read, tokens
from tts.engine import decode_loop
from tts.engine.pacer import DecodePacer


def test_blocks_follow_the_sizes_and_the_sample_grid() -> None:
    async def scenario() -> None:
        bench = Bench()
        task = bench.speak()
        for code in range(11):
            tokens(task, code)
            bench.turns()
        tokens(task, end=FinishReason.STOP)
        bench.turns()
        blocks = await read(task)
        assert numbers(blocks) == [
            (0, 2, 0, 2 * HOP),
            (2, 3, 2 * HOP, 3 * HOP),
            (5, 4, 5 * HOP, 4 * HOP),
            (9, 2, 9 * HOP, 2 * HOP),
        ]
        reasons = [block.finish_reason for block in blocks]
        assert reasons == [None, None, None, FinishReason.STOP]
        assert bench.worker.num_audio_streams == 0

    in_loop(scenario)


def test_tokens_in_one_step_equal_tokens_one_by_one() -> None:
    async def scenario() -> None:
        bench = Bench()
        one_by_one, at_once = bench.speak("a"), bench.speak("b")
        for code in range(11):
            tokens(one_by_one, code)
        tokens(at_once, *range(11))
        for task in (one_by_one, at_once):
            tokens(task, end=FinishReason.STOP)
        bench.turns()
        for left, right in zip(await read(one_by_one), await read(at_once), strict=True):
            np.testing.assert_array_equal(left.samples, right.samples)
            assert left.finish_reason == right.finish_reason

    in_loop(scenario)


@pytest.mark.parametrize("end_apart", [True, False])
def test_final_flag_on_a_block_boundary(end_apart: bool) -> None:
    """The last block has the flag if the end came in its step; else an empty message follows."""

    async def scenario() -> None:
        bench = Bench()
        task = bench.speak()
        tokens(task, 1, 2, end=None if end_apart else FinishReason.LENGTH)
        if end_apart:
            tokens(task, end=FinishReason.LENGTH)
        bench.turns()
        blocks = await read(task)
        sizes = [(block.num_codes, block.finish_reason) for block in blocks]
        if end_apart:
            assert sizes == [(2, None), (0, FinishReason.LENGTH)]
            assert numbers(blocks)[1] == (2, 0, 2 * HOP, 0)
        else:
            assert sizes == [(2, FinishReason.LENGTH)]

    in_loop(scenario)


def test_a_stream_without_codes_is_one_empty_message() -> None:
    async def scenario() -> None:
        bench = Bench()
        task = bench.speak()
        tokens(task, end=FinishReason.STOP)
        bench.turns()
        (block,) = await read(task)
        assert numbers([block]) == [(0, 0, 0, 0)]
        assert block.samples.dtype == np.float32
        assert block.finish_reason is FinishReason.STOP

    in_loop(scenario)


def test_without_sizes_one_block_comes_at_the_end() -> None:
    async def scenario() -> None:
        bench = Bench()
        task = bench.speak(sizes=None)
        tokens(task, *range(30))
        assert bench.turns() == 0
        tokens(task, 30, end=FinishReason.LENGTH)
        bench.turns()
        (block,) = await read(task)
        assert (block.num_codes, len(block.samples)) == (31, 31 * HOP)

    in_loop(scenario)


def test_ids_that_are_not_speech_are_skipped() -> None:
    async def scenario() -> None:
        bench = Bench()
        task = bench.speak(sizes=(2,))
        task.on_tokens(TokenChunk("a", (7, OFFSET + 1, 8, OFFSET + 2), output_tokens=4))
        bench.turns()
        (block,) = await read(task)
        assert (block.num_codes, block.output_tokens) == (2, 4)

    in_loop(scenario)


def test_carry_is_the_last_buffer_of_codes() -> None:
    async def scenario() -> None:
        bench = Bench()
        task = bench.speak(buffer=4, carry=(50, 51))
        tokens(task, *range(11))
        tokens(task, end=FinishReason.STOP)
        bench.turns()
        carries = [block.carry for block in await read(task)]
        assert carries == [(50, 51, 0, 1), (1, 2, 3, 4), (5, 6, 7, 8), (7, 8, 9, 10)]

    in_loop(scenario)


def test_codes_outside_the_codebook_are_refused_before_anything_starts() -> None:
    async def scenario() -> None:
        bench = Bench()
        with pytest.raises(CodeRangeError, match="carried code 4096"):
            bench.speak(carry=(4096,))
        assert bench.worker.num_audio_streams == 0

    in_loop(scenario)


def test_an_id_in_use_is_refused_and_the_first_stream_continues() -> None:
    async def scenario() -> None:
        bench = Bench()
        first = bench.speak("same")
        with pytest.raises(RequestError, match="'same' is in use"):
            bench.speak("same")
        tokens(first, 1, 2)
        bench.turns()
        assert len(await read(first)) == 1

    in_loop(scenario)


@pytest.mark.parametrize("level", ["off", "on"])
def test_decoding_is_a_range_for_a_profiler(level: str) -> None:
    async def scenario() -> None:
        bench = Bench(profiler=Profiler(level))
        tokens(bench.speak(sizes=(2,)), 1, 2, 3)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
        ) as run:
            bench.worker.after_step()
        assert bench.decoder.batches == [1]
        names = [event.name for event in run.events()]
        assert ("sonant.decode_audio" in names) == (level == "on")

    in_loop(scenario)


def test_a_caller_waits_for_the_first_step_of_the_only_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until a turn ends, at most for the limit, and neither with two streams nor on a CPU."""

    def waited_s(bench: Bench) -> float:
        started_s = time.monotonic()
        bench.worker.let_start()
        return time.monotonic() - started_s

    async def scenario() -> None:
        monkeypatch.setattr(decode_loop, "START_S", 0.2)
        gpu, cpu = Bench(pacer=DecodePacer()), Bench()
        first, _ = gpu.speak("a"), cpu.speak("a")
        assert waited_s(gpu) > 0.15
        monkeypatch.setattr(decode_loop, "START_S", 60)
        step = threading.Timer(0.05, gpu.worker.after_step)
        step.start()
        assert waited_s(gpu) < 30
        step.join()
        assert waited_s(gpu) < 30  # that turn was its first
        assert waited_s(cpu) < 30
        second = gpu.speak("b")
        assert waited_s(gpu) < 30
        for task in (first, second):
            gpu.worker.remove(task)
        gpu.speak("c")
        monkeypatch.setattr(decode_loop, "START_S", 0.2)
        assert waited_s(gpu) > 0.15  # no turn has ended since

    in_loop(scenario)
