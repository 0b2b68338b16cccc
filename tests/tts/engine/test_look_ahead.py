"""A codec with frames and look-ahead in the audio worker: a small SNAC."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from decoder import AudioDecoder, StreamingOptions, create_decoder
from decoder.cuda.state_graphs import StateGraphs
from llm import FinishReason, Request, TokenChunk
from tests.decoder.cuda.test_graphs import repeat
from tests.decoder.small_codecs import audio_of, random_codes, write_mimi, write_snac
from tests.fakes import OffsetCodes
from tests.tts.engine.audio_bench import OFFSET, EngineLog, in_loop, numbers, read, tokens
from tts.engine.client import AudioBlock, SpeechJob
from tts.engine.decode_loop import DecodeLoop
from tts.engine.queue import StreamQueue
from tts.engine.streams import SpeechSetup, SpeechStream

OPTIONS = StreamingOptions((7, 14), buffer=21, look_ahead=21)
FRAME = 2048


@pytest.fixture(scope="module")
def snac(tmp_path_factory: pytest.TempPathFactory) -> AudioDecoder:
    folder: Path = tmp_path_factory.mktemp("snac")
    write_snac(folder)
    return create_decoder(folder, allow_pickle=True)


class Speaking:
    """One worker whose streams the test feeds."""

    def __init__(self, decoder: AudioDecoder) -> None:
        self.decoder = decoder
        self.worker = DecodeLoop(EngineLog(), decoder)

    def start(self, request_id: str, options: StreamingOptions, capacity: int = 50) -> SpeechStream:
        setup = SpeechSetup(self.decoder.spec, OffsetCodes(OFFSET), max_codes_ahead=1000)
        job = SpeechJob(Request(request_id, (1,)), options)
        task = SpeechStream(job, setup, StreamQueue(capacity))
        self.worker.add(task)
        return task

    def run(self) -> None:
        while self.worker.after_step():
            pass


def joined(blocks: Sequence[AudioBlock]) -> np.ndarray:
    return np.concatenate([block.samples for block in blocks])


def test_a_block_waits_for_its_look_ahead_and_the_end_keeps_all_samples(snac) -> None:
    async def scenario() -> None:
        codes = random_codes(snac, 8)
        speaking = Speaking(snac)
        task = speaking.start("a", OPTIONS)
        tokens(task, *codes[:27])
        speaking.run()
        assert await read(task) == []
        tokens(task, *codes[27:28])
        speaking.run()
        blocks = await read(task)
        assert numbers(blocks) == [(0, 7, 0, FRAME)]
        tokens(task, *codes[28:], end=FinishReason.STOP)
        speaking.run()
        blocks += await read(task)
        assert numbers(blocks)[1:] == [
            (7, 14, FRAME, 2 * FRAME),
            (21, 14, 3 * FRAME, 2 * FRAME),
            (35, 14, 5 * FRAME, 2 * FRAME),
            (49, 7, 7 * FRAME, FRAME),
        ]
        assert [block.finish_reason for block in blocks[-2:]] == [None, FinishReason.STOP]
        assert np.abs(joined(blocks) - audio_of(snac, codes)).max() < 2e-6

    in_loop(scenario)


def test_an_incomplete_frame_gives_no_samples(snac) -> None:
    async def scenario() -> None:
        codes = random_codes(snac, 3)
        speaking = Speaking(snac)
        task = speaking.start("a", OPTIONS)
        tokens(task, *codes[:17], end=FinishReason.LENGTH)
        speaking.run()
        blocks = await read(task)
        assert numbers(blocks) == [(0, 7, 0, FRAME), (7, 7, FRAME, FRAME)]
        assert np.abs(joined(blocks) - audio_of(snac, codes[:14])).max() < 2e-6
        short = speaking.start("b", OPTIONS)
        tokens(short, *codes[:6], end=FinishReason.STOP)
        speaking.run()
        (last,) = await read(short)
        assert (len(last.samples), last.finish_reason) == (0, FinishReason.STOP)

    in_loop(scenario)


def test_streams_with_kept_states_do_not_mix(tmp_path) -> None:
    """Three concurrent streams, one of them fed at once, give the audio of single streams."""
    write_mimi(tmp_path)
    decoder = create_decoder(tmp_path, options={"stateful": True})

    async def scenario() -> None:
        rows = {name: random_codes(decoder, 8, seed) for seed, name in enumerate("abc")}
        speaking = Speaking(decoder)
        options = StreamingOptions((4, 8), buffer=4)
        tasks = {name: speaking.start(name, options) for name in rows}
        tokens(tasks["c"], *rows["c"], end=FinishReason.STOP)
        for start in range(0, 32, 4):
            for name in "ab":
                end = FinishReason.STOP if start == 28 else None
                tokens(tasks[name], *rows[name][start : start + 4], end=end)
            speaking.worker.after_step()
        speaking.run()
        for name, codes in rows.items():
            got, alone = joined(await read(tasks[name])), audio_of(decoder, codes)
            assert np.abs(got - alone).max() < 5e-6 * np.abs(alone).max()

    in_loop(scenario)


@pytest.mark.parametrize("end", [FinishReason.STOP, FinishReason.CANCELLED, FinishReason.ERROR])
def test_a_streams_state_is_given_back_before_its_audio_is_read(
    tmp_path: Path, end: FinishReason
) -> None:
    write_mimi(tmp_path)
    network = create_decoder(tmp_path, options={"stateful": True})
    decoder = StateGraphs(network, repeat, num_states=4)
    options = StreamingOptions((4, 8))

    async def scenario() -> None:
        speaking = Speaking(decoder)
        task, other = (speaking.start(name, options) for name in "ab")
        for each in (task, other):
            tokens(each, *random_codes(decoder, 2))
        speaking.run()
        assert decoder.pool.num_free == 2
        if end is FinishReason.ERROR:  # a code that the codec does not have
            bad = (OFFSET + decoder.spec.codebook_size,)
            speaking.worker.on_tokens(task, TokenChunk("a", bad * 8, output_tokens=16))
        else:
            tokens(task, *random_codes(decoder, 1), end=end)
        speaking.run()
        assert decoder.pool.num_free == 3
        assert (await read(task))[-1].finish_reason is end

    in_loop(scenario)


def test_the_state_of_a_stream_without_a_reader_is_given_back(tmp_path: Path) -> None:
    """Also when its tokens have ended and blocks still wait for room in its queue."""
    write_mimi(tmp_path)
    decoder = StateGraphs(create_decoder(tmp_path, options={"stateful": True}), repeat, 4)

    async def scenario() -> None:
        speaking = Speaking(decoder)
        task = speaking.start("a", StreamingOptions((4,)), capacity=2)
        task.queue.on_room = partial(speaking.worker.mark_dirty, task)
        tokens(task, *random_codes(decoder, 8), end=FinishReason.STOP)
        for _ in range(10):
            speaking.worker.after_step()
        assert decoder.pool.num_free == 3
        assert task.queue.is_full
        task.queue.close()
        speaking.worker.cancel(task)
        speaking.run()
        assert decoder.pool.num_free == 4

    in_loop(scenario)
