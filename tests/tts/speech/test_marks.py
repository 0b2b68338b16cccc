"""Marks and sentences of documents: their times in the audio, and when they are reported."""

from __future__ import annotations

from typing import Any

import pytest

from llm import FinishReason
from tests.tts.ramp import RATE, SEEDED, RampClient, run
from tests.tts.serving import Serving, config, run_with_server
from tts.factory import Service
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import AudioChunk, Done, MarkTime, SpeechRequest
from tts.text.markup.document import MarkKind
from tts.text.markup.ssml import read_ssml
from tts.v1 import speech_pb2 as pb

SOURCE = (
    "<speak><mark name='first'/><mark name='same'/>The first is here. <mark name='second'/>"
    "<s>A second follows.</s><mark name='before'/><break time='300ms'/><mark name='behind'/>"
    "<prosody rate='2'>The <mark name='inside'/> last.</prosody><mark name='end'/></speak>"
)
NAMES = ["first", "same", "second", "", "before", "behind", "inside", "end"]


def request(inside: str = SOURCE, **values: Any) -> SpeechRequest:
    source = inside if inside.startswith("<speak>") else f"<speak>{inside}</speak>"
    return SpeechRequest(source, markup=read_ssml(source), **{"sampling": SEEDED, **values})


def events_of(synthesizer: Synthesizer, speech: SpeechRequest) -> list[Any]:
    async def collect() -> list[Any]:
        return [event async for event in synthesizer.stream(speech)]

    return run(collect())


def marks_in(events: list[Any]) -> list[MarkTime]:
    return [event for event in events if isinstance(event, MarkTime)]


def samples_in(events: list[Any]) -> int:
    return sum(event.sample_count for event in events if isinstance(event, AudioChunk))


@pytest.mark.parametrize("rate", [RATE, 44_100])
@pytest.mark.parametrize("trims", [False, True])
def test_a_mark_is_where_the_audio_behind_it_begins(
    synthesizer: Synthesizer, rate: int, trims: bool
) -> None:
    events = events_of(synthesizer, request(sample_rate=rate, trim_silence=trims))
    marks = marks_in(events)
    assert [mark.name for mark in marks] == NAMES
    samples = [mark.time_s * rate for mark in marks]
    at = dict(zip(NAMES, samples, strict=True))
    assert samples[:2] == [0, 0]
    assert at["second"] == at[""]
    assert at["behind"] - at["before"] == pytest.approx(0.3 * rate, abs=0.01)
    assert at["end"] == pytest.approx(samples_in(events), abs=0.01)
    starts = {  # of the chunks with a text
        SOURCE[e.text_start : e.text_end].strip(): e.sample_offset
        for e in reversed(events)
        if isinstance(e, AudioChunk) and e.sample_count
    }
    # A converter of rates holds samples back, so that a segment's first chunk has some before it.
    assert starts["<break time='300ms'/>"] <= at["before"] + 1
    if rate == RATE and not trims:
        assert starts["A second follows."] == at["second"]
        assert starts["The"] == at["behind"]
        assert starts["last."] == pytest.approx(at["inside"], abs=0.02 * rate)


def test_marks_come_in_front_of_the_audio_behind_them(synthesizer: Synthesizer) -> None:
    events = events_of(synthesizer, request())
    for mark in marks_in(events):
        index = events.index(mark)
        assert samples_in(events[:index]) <= round(mark.time_s * RATE) + 1
    assert isinstance(events[-1], Done)
    times = [mark.time_s for mark in marks_in(events)]
    assert times == sorted(times)


def test_a_mark_has_its_kind_and_its_place_in_the_text(synthesizer: Synthesizer) -> None:
    marks = marks_in(events_of(synthesizer, request()))
    texts = [SOURCE[mark.text_start : mark.text_end] for mark in marks]
    assert texts == [f"<mark name='{name}'/>" if name else "A second follows." for name in NAMES]
    kinds = [mark.kind for mark in marks]
    assert kinds == [MarkKind.MARK if name else MarkKind.SENTENCE for name in NAMES]


def test_the_whole_synthesis_has_the_marks_of_the_stream(synthesizer: Synthesizer) -> None:
    streamed = marks_in(events_of(synthesizer, request()))
    assert list(run(synthesizer.synthesize(request())).marks) == streamed


def test_without_word_times_a_mark_ends_its_segment(
    synthesizer: Synthesizer, client: RampClient
) -> None:
    marked = run(synthesizer.synthesize(request("One two<mark name='a'/> three.")))
    apart = run(synthesizer.synthesize(request("<s>One two</s><s>three.</s>")))
    assert len(client.jobs) == 4
    assert marked.audio == apart.audio
    assert marked.marks[0].time_s == apart.marks[1].time_s > 0


def test_marks_that_are_not_reached_are_not_reported(
    synthesizer: Synthesizer, client: RampClient
) -> None:
    source = "<mark name='a'/>One.<mark name='b'/><break time='9s'/><mark name='c'/>Two."
    cut = events_of(synthesizer, request(source, max_audio_s=2.0))
    assert [mark.name for mark in marks_in(cut)] == ["a", "b"]
    assert cut[-1].result.finish_reason is FinishReason.LENGTH
    client.ends_with = FinishReason.CANCELLED
    cancelled = events_of(synthesizer, request(source))
    assert [mark.name for mark in marks_in(cancelled)] == ["a"]


def test_a_document_of_marks_alone(synthesizer: Synthesizer) -> None:
    events = events_of(synthesizer, request("<mark name='a'/><mark name='b'/>"))
    assert [(mark.name, mark.time_s) for mark in marks_in(events)] == [("a", 0), ("b", 0)]


def test_ten_thousand_marks_are_reported(synthesizer: Synthesizer, client: RampClient) -> None:
    events = events_of(synthesizer, request("One. " + "<mark name='m'/>" * 9_999 + "Two."))
    assert len(marks_in(events)) == 9_999
    assert len(client.jobs) == 2


def test_a_call_and_a_stream_report_the_same_marks(service: Service) -> None:
    words = pb.SynthesisInput(
        ssml="<speak><mark name='a'/><s>Hi.</s><break time='1s'/><mark name='b'/></speak>"
    )
    unlimited = config(max_tokens=None)

    async def ask(served: Serving) -> None:
        whole = await served.speech.Synthesize(pb.SynthesizeRequest(config=unlimited, input=words))
        streaming = pb.SynthesizeStreamRequest(config=unlimited, input=words)
        responses = [response async for response in served.speech.SynthesizeStream(streaming)]
        streamed = [r.mark for r in responses if r.WhichOneof("event") == "mark"]
        assert list(whole.marks) == streamed
        assert [mark.name for mark in streamed] == ["a", "", "b"]
        assert [mark.kind for mark in streamed] == [
            pb.MARK_KIND_MARK,
            pb.MARK_KIND_SENTENCE,
            pb.MARK_KIND_MARK,
        ]
        num_samples = sum(response.audio.sample_count for response in responses)
        end_s = streamed[-1].time.ToNanoseconds() / 1e9
        assert end_s * RATE == pytest.approx(num_samples, abs=0.01)

    run_with_server(service, ask)
