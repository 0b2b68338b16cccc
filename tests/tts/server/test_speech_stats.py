"""Seconds of silence of a player, at times that the test sets."""

from __future__ import annotations

import pytest

from decoder import AudioEncoding, AudioFormat
from tests.tts.serving import Serving, collect_speech, run_with_server
from tts.factory import Service
from tts.observe.metrics import Metrics
from tts.server.call import Call, note_event
from tts.speech.types import AudioChunk, Started

RATE = 1000


async def _sent(_: object) -> None:
    pass


class Stream:
    """A call whose chunks are sent at given times; each write takes `write_s`."""

    def __init__(self, *, has_streamed_text: bool = False) -> None:
        first_input = 0.0 if has_streamed_text else None
        self.call = Call("s", "m", "c", _sent, 1.0, first_input=first_input)
        self._metrics = Metrics()
        audio_format = AudioFormat(AudioEncoding.PCM_S16LE, RATE, 1)
        note_event(self.call, self._metrics, Started("r", "m", audio_format, 0))

    def send(self, at_s: float, audio_s: float, segment: int = 0, write_s: float = 0.0) -> None:
        samples = round(audio_s * RATE)
        chunk = AudioChunk(b"", 0, 0, samples, segment, 0, 0, 0, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tts.server.call.time.monotonic", lambda: at_s)
            note_event(self.call, self._metrics, chunk)
        self.call.last_write = at_s + write_s

    @property
    def underrun_s(self) -> float:
        return self.call.underrun_s


def test_audio_in_time_leaves_no_silence() -> None:
    stream = Stream()
    for number in range(5):
        stream.send(10.0 + number, 1.0)
    assert stream.underrun_s == 0.0


def test_each_late_chunk_is_counted_once() -> None:
    stream = Stream()
    stream.send(10.0, 1.0)
    stream.send(11.5, 1.0)  # .5 s late; the player plays it until 12.5
    stream.send(12.4, 1.0)
    stream.send(13.75, 1.0)  # .25 s after 13.5
    assert stream.underrun_s == pytest.approx(0.75)


def test_the_wait_for_the_first_audio_is_none() -> None:
    stream = Stream()
    stream.send(99.0, 1.0)
    assert stream.underrun_s == 0.0


def test_the_time_of_a_slow_reader_is_not_counted() -> None:
    stream = Stream()
    stream.send(10.0, 1.0, write_s=30.0)
    stream.send(40.0, 1.0)
    stream.send(40.1, 1.0, write_s=5.0)
    stream.send(45.2, 1.0)
    assert stream.underrun_s == pytest.approx(0.1)


@pytest.mark.parametrize(("has_streamed_text", "expected"), [(True, 0.5), (False, 9.5)])
def test_a_pause_between_segments_counts_where_the_text_was_there(
    has_streamed_text: bool, expected: float
) -> None:
    stream = Stream(has_streamed_text=has_streamed_text)
    stream.send(10.0, 1.0)
    stream.send(20.0, 1.0, segment=1)
    stream.send(21.5, 1.0, segment=1)
    assert stream.underrun_s == pytest.approx(expected)


def test_each_stream_that_ends_is_observed(service: Service) -> None:
    async def ask(served: Serving) -> None:
        await collect_speech(served)
        await collect_speech(served)
        assert served.metric("sonant_stream_underrun_seconds_count") == 2

    run_with_server(service, ask)
