"""Segment times for clients: unary, streamed, in a session; the effect of rate and trimming."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.tts.ramp import RATE, TEXT, RampClient, run
from tests.tts.serving import (
    CANCEL,
    Serving,
    flush,
    run_conversation,
    run_with_server,
    say,
    session_config,
    stream_request,
    unary_request,
)
from tts.factory import Service
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import (
    AudioChunk,
    SamplingOverrides,
    SegmentTime,
    SpeechRequest,
    TimestampGranularity,
)
from tts.v1 import speech_pb2 as pb

SEGMENTS = [
    "The first sentence is here.",
    "A second one follows it!",
    "And is there a third?",
    "Yes.",
]
SEGMENT = TimestampGranularity.SEGMENT
ASKED = {"timestamps": pb.TIMESTAMP_GRANULARITY_SEGMENT}


def events_of(synthesizer: Synthesizer, **values: Any) -> list[Any]:
    sampling = SamplingOverrides(seed=7)
    request = SpeechRequest(TEXT, sampling=sampling, **{"timestamps": SEGMENT, **values})

    async def collect() -> list[Any]:
        return [event async for event in synthesizer.stream(request)]

    return run(collect())


def segments_in(events: list[Any]) -> list[SegmentTime]:
    return [event for event in events if isinstance(event, SegmentTime)]


def audio_s(events: list[Any]) -> float:
    return sum(e.sample_count for e in events if isinstance(e, AudioChunk)) / RATE


def test_segments_follow_one_another_to_the_end(synthesizer: Synthesizer) -> None:
    events = events_of(synthesizer)
    segments = segments_in(events)
    assert [TEXT[s.text_start : s.text_end].strip() for s in segments] == SEGMENTS
    assert [segment.index for segment in segments] == [0, 1, 2, 3]
    assert segments[0].start_s == 0
    assert all(a.end_s == pytest.approx(b.start_s) for a, b in pairwise(segments))
    assert segments[-1].end_s == pytest.approx(audio_s(events))


def test_a_segments_time_is_that_of_its_chunks(synthesizer: Synthesizer) -> None:
    events = events_of(synthesizer)
    for segment in segments_in(events):
        own = [e for e in events if isinstance(e, AudioChunk) and e.segment_index == segment.index]
        assert own[0].sample_offset / RATE == pytest.approx(segment.start_s)
        ends = (own[-1].sample_offset + own[-1].sample_count) / RATE
        assert ends == pytest.approx(segment.end_s)


def test_a_segment_is_reported_when_it_has_ended(synthesizer: Synthesizer) -> None:
    events = events_of(synthesizer)
    first = events.index(segments_in(events)[0])
    assert {e.segment_index for e in events[:first] if isinstance(e, AudioChunk)} == {0}
    assert any(isinstance(e, AudioChunk) for e in events[first:])


def test_the_rate_moves_the_times(synthesizer: Synthesizer) -> None:
    plain, fast = (events_of(synthesizer, speaking_rate=rate) for rate in (1.0, 2.0))
    halves = [segment.end_s / 2 for segment in segments_in(plain)]
    assert [segment.end_s for segment in segments_in(fast)] == pytest.approx(halves)


def test_trimmed_silence_does_not_count(client: RampClient, synthesizer: Synthesizer) -> None:
    events = events_of(synthesizer, trim_silence=True)
    segments = segments_in(events)
    assert [segment.index for segment in segments] == [0, 1, 2, 3]
    assert segments[-1].end_s == pytest.approx(audio_s(events))
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(segments))


def test_segment_times_are_sent_on_request_only(synthesizer: Synthesizer) -> None:
    assert not segments_in(events_of(synthesizer, timestamps=TimestampGranularity.NONE))


def test_every_call_reports_the_same_times(service: Service) -> None:
    text = "Hello there. This is a short test."

    async def ask(served: Serving) -> None:
        whole = (await served.speech.Synthesize(unary_request(text, **ASKED))).segments
        call = served.speech.SynthesizeStream(stream_request(text, **ASKED))
        streamed = [r.segment async for r in call if r.WhichOneof("event") == "segment"]
        answers = await run_conversation(served, session_config(**ASKED), say(text))
        typed = [r.segment for r in answers if r.WhichOneof("event") == "segment"]
        assert list(whole) == streamed == typed
        assert [s.segment_index for s in streamed] == list(range(len(streamed)))
        assert streamed
        assert not (await served.speech.Synthesize(unary_request(text))).segments

    run_with_server(service, ask)


def test_times_hold_after_a_flush_and_a_cancellation(service: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.StreamingSynthesize()
        await call.write(session_config(max_tokens=2000, **ASKED))
        await call.write(say("This one is cut off in the middle of its audio. And on. And on."))
        cancelled = None
        samples, segments = 0, []
        async for response in call:
            samples += response.audio.sample_count
            match response.WhichOneof("event"):
                case "audio" if samples and cancelled is None:
                    cancelled = False
                    for message in (CANCEL, say("Hello there."), flush(), say("Good bye.")):
                        await call.write(message)
                    await call.done_writing()
                case "cancelled":
                    cancelled = response.cancelled.sample_offset / RATE
                    segments.clear()
                case "segment":
                    segments.append(response.segment)
        first, last = segments
        assert first.start.ToTimedelta().total_seconds() == pytest.approx(cancelled, abs=1e-4)
        ended = last.end.ToTimedelta().total_seconds()
        assert ended == pytest.approx(samples / RATE, abs=1e-4)

    run_with_server(service, ask)
