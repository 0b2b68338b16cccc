"""Sessions: text arrives over time; flush, barge-in, half-close, delays and idleness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from decoder import AudioEncoding
from llm import FinishReason
from tests.tts.engine.virtual_time import run_virtually
from tests.tts.ramp import SEEDED, TEXT, RampClient, build, ramp_of, run
from tts.errors import IdleTimeoutError, InvalidRequestError, SynthesisError
from tts.families.prompt import PromptBuilder
from tts.speech import session
from tts.speech.session import MAX_WAITING_FLUSHES, SessionTimes, StreamingSession
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import (
    AudioChunk,
    Done,
    FlushDone,
    SamplingOverrides,
    SessionEvent,
    SpeechRequest,
    Started,
    UtteranceCancelled,
)
from tts.text.clean import TextError
from tts.text.segmenter import SegmentMode

Script = Callable[[StreamingSession], Coroutine[Any, Any, None]]


def run_session(
    synthesizer: Synthesizer,
    script: Script,
    times: SessionTimes | None = None,
    clock: pytest.MonkeyPatch | None = None,
    **values: Any,
) -> list[SessionEvent]:
    """Run a script of inputs concurrently with the reader; return all events.

    With `clock` the session's time advances only while the event loop is idle.
    """

    async def both() -> list[SessionEvent]:
        request = SpeechRequest(**{"sampling": SEEDED, **values})
        session = synthesizer.open_session(request, times)
        speaking = asyncio.ensure_future(script(session))
        try:
            return [event async for event in session.events()]
        finally:
            await speaking

    return run(both()) if clock is None else run_virtually(both(), session, clock)


def audio(events: list[SessionEvent]) -> bytes:
    return b"".join(event.data for event in events if isinstance(event, AudioChunk))


def kinds(events: list[SessionEvent]) -> list[str]:
    """Return the names of events, with runs of audio as one."""
    names = [type(event).__name__ for event in events]
    return [n for i, n in enumerate(names) if n != "AudioChunk" or names[i - 1] != n]


def done(events: list[SessionEvent]) -> Done:
    assert isinstance(events[-1], Done)
    return events[-1]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_text_in_pieces_gives_the_audio_of_the_whole_text(
    synthesizer: Synthesizer, width: int
) -> None:
    async def script(session: StreamingSession) -> None:
        for start in range(0, len(TEXT), width):
            session.feed(TEXT[start : start + width])
            await asyncio.sleep(0)
        session.close()
        session.close()

    events = run_session(synthesizer, script)
    whole = run(synthesizer.synthesize(SpeechRequest(TEXT, sampling=SEEDED)))
    assert audio(events) == whole.audio
    assert kinds(events) == ["Started", "AudioChunk", "Done"]
    assert done(events).result.usage.input_characters == len(TEXT)
    assert done(events).result.finish_reason is FinishReason.STOP


def test_audio_begins_before_the_text_is_complete(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed("A first sentence. And the sec")
        await until(lambda: len(client.spoken) > 0)
        session.feed("ond.")
        session.close()

    run_session(synthesizer, script)
    texts = [bytes(job.request.prompt_ids[1:-1]).decode() for job in client.jobs]
    assert texts == ["A first sentence.", "And the second."]


def test_clauses_are_synthesized_early(client: RampClient, synthesizer: Synthesizer) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed("When the weather is fine again, we ")
        await until(lambda: len(client.jobs) > 0)
        session.close()

    run_session(synthesizer, script, segment_mode=SegmentMode.CLAUSE)
    assert len(client.jobs) == 2


def test_a_flush_is_acknowledged_after_its_audio(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed("No full stop here")
        session.flush("one")
        session.flush("two")
        session.feed("and more")
        await asyncio.sleep(0.01)
        session.close()

    events = run_session(synthesizer, script, sample_rate=24_000)
    assert kinds(events) == [
        "Started", "AudioChunk", "FlushDone", "FlushDone", "AudioChunk", "Done"
    ]  # fmt: skip
    flushes = [event for event in events if isinstance(event, FlushDone)]
    assert [event.flush_id for event in flushes] == ["one", "two"]
    heard = events[: events.index(flushes[0])]
    samples = sum(e.sample_count for e in heard if isinstance(e, AudioChunk))
    codes = len(client.codes_of(client.jobs[0].request))
    assert flushes[0].sample_offset == samples == codes * 960
    assert [job.streaming.chunk_sizes for job in client.jobs] == [(2, 4, 8), (2, 4, 8)]
    assert client.jobs[1].token_offset == codes
    assert client.jobs[1].carry == tuple(client.codes_of(client.jobs[0].request)[-3:])


def test_a_session_without_text_ends_normally(synthesizer: Synthesizer) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed("")
        session.feed(" \U0001f44d 好")
        session.flush("f")
        session.close()

    events = run_session(synthesizer, script)
    assert events[1:-1] == [FlushDone("f", 0)]
    assert "1 letter(s)" in done(events).result.warnings[0]
    assert done(events).result.finish_reason is FinishReason.STOP


def test_a_barge_in_drops_all_text_and_the_session_continues(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed("A first sentence. A second sentence. An unfinished")
        session.flush("never answered")
        await until(lambda: len(client.spoken) > 0)
        client.gate.clear()
        session.cancel()
        await until(lambda: client.num_open == 0)
        client.gate.set()
        session.feed("Something else.")
        session.close()

    events = run_session(synthesizer, script)
    assert kinds(events) == ["Started", "AudioChunk", "UtteranceCancelled", "AudioChunk", "Done"]
    texts = [bytes(job.request.prompt_ids[1:-1]).decode() for job in client.jobs]
    assert texts == ["A first sentence.", "Something else."]
    second = client.jobs[1]
    assert (second.carry, second.token_offset) == (None, len(client.spoken) - spoken_by(client, 1))
    assert second.streaming.chunk_sizes == (2, 4, 8)
    cancelled = next(e for e in events if isinstance(e, UtteranceCancelled))
    before = events[: events.index(cancelled)]
    sent = sum(e.sample_count for e in before if isinstance(e, AudioChunk))
    assert cancelled.sample_offset == sent
    assert done(events).result.finish_reason is FinishReason.STOP
    usage = done(events).result.usage
    assert usage.output_tokens == len(client.spoken)


def spoken_by(client: RampClient, index: int) -> int:
    return len(client.codes_of(client.jobs[index].request))


def test_text_ranges_count_dropped_text(client: RampClient, synthesizer: Synthesizer) -> None:
    async def script(session: StreamingSession) -> None:
        client.gate.clear()
        session.feed("Dropped text. ")
        await until(lambda: client.num_open == 1)
        session.cancel()
        await until(lambda: client.num_open == 0)
        client.gate.set()
        session.feed("Kept text.")
        session.close()

    events = run_session(synthesizer, script)
    last = [event for event in events if isinstance(event, AudioChunk)][-1]
    assert (last.text_start, last.text_end) == (14, 24)
    assert kinds(events) == ["Started", "UtteranceCancelled", "AudioChunk", "Done"]


def test_a_session_cancelled_last_ends_as_cancelled(synthesizer: Synthesizer) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed("Dropped. And")
        session.cancel()
        session.close()

    events = run_session(synthesizer, script)
    assert kinds(events) == ["Started", "UtteranceCancelled", "Done"]
    assert done(events).result.finish_reason is FinishReason.CANCELLED


def test_a_cancelled_container_still_decodes(
    client: RampClient, synthesizer: Synthesizer, tmp_path: Path
) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed("A first sentence. ")
        await until(lambda: len(client.spoken) > 0)
        session.cancel()
        session.feed("Something else.")
        session.close()

    events = run_session(synthesizer, script, encoding=AudioEncoding.OGG_OPUS, speaking_rate=1.5)
    path = tmp_path / "speech.opus"
    path.write_bytes(audio(events))
    sent = sum(event.sample_count for event in events if isinstance(event, AudioChunk))
    assert soundfile.info(path).frames == sent


def test_text_that_waits_too_long_is_synthesized(
    client: RampClient, synthesizer: Synthesizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed("No full stop")
        await until(lambda: len(client.jobs) == 1)
        session.close()

    events = run_session(synthesizer, script, SessionTimes(max_text_delay_s=0.02), monkeypatch)
    assert np.array_equal(
        np.frombuffer(audio(events), "<i2"),
        (ramp_of(client, client.spoken) * np.float32(32767)).round().astype("<i2"),
    )


def test_an_underrun_restarts_with_a_small_first_chunk(
    client: RampClient, synthesizer: Synthesizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed("One sentence. Another one. ")
        await asyncio.sleep(0.3)
        for fragment in ("A ", "late ", "one."):
            session.feed(fragment)
        session.close()

    run_session(synthesizer, script, clock=monkeypatch)
    assert [job.streaming.chunk_sizes for job in client.jobs] == [(2, 4, 8), (8,), (2, 4, 8)]


def test_an_idle_session_ends(
    client: RampClient, synthesizer: Synthesizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed("One sentence. And half")

    with pytest.raises(IdleTimeoutError, match=r"no text arrived for 0\.05 s"):
        run_session(synthesizer, script, SessionTimes(idle_s=0.05), monkeypatch)
    assert len(client.jobs) == 1


def test_a_session_with_running_synthesis_is_not_idle(
    client: RampClient, synthesizer: Synthesizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(session: StreamingSession) -> None:
        client.gate.clear()
        session.feed("One sentence. ")
        await asyncio.sleep(0.1)
        client.gate.set()
        await until(lambda: client.num_open == 0)
        session.close()

    events = run_session(synthesizer, script, SessionTimes(idle_s=0.05), monkeypatch)
    assert kinds(events) == ["Started", "AudioChunk", "Done"]


def test_closing_a_session_closes_the_iterator_of_the_engine(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    async def leave() -> None:
        session = synthesizer.open_session(SpeechRequest(sampling=SEEDED))
        session.feed(TEXT)
        events = session.events()
        async for event in events:
            if isinstance(event, AudioChunk):
                break
        assert client.num_open == 1
        await events.aclose()
        assert client.num_open == 0

    run(leave())


def test_cancelling_the_reader_closes_the_iterator_of_the_engine(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    async def cancel() -> None:
        client.gate.clear()
        session = synthesizer.open_session(SpeechRequest(sampling=SEEDED))
        session.feed(TEXT)
        events = session.events()
        assert isinstance(await anext(events), Started)
        task = asyncio.ensure_future(anext(events))
        await until(lambda: client.num_open == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.num_open == 0

    run(cancel())


def test_an_engine_error_ends_the_session(client: RampClient, synthesizer: Synthesizer) -> None:
    async def script(session: StreamingSession) -> None:
        client.ends_with = FinishReason.ERROR
        session.feed("One sentence. Two.")

    with pytest.raises(SynthesisError, match="the pages burnt"):
        run_session(synthesizer, script)


def test_the_limit_of_the_request_ends_a_session(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    client.is_endless = True

    async def script(session: StreamingSession) -> None:
        session.feed(TEXT)

    events = run_session(synthesizer, script, sampling=SamplingOverrides(seed=1, max_tokens=100))
    assert len(client.spoken) == 100
    assert done(events).result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("own_s", [None, 5.0])
def test_the_limit_of_the_server_applies_to_sessions(
    client: RampClient, tiny_checkpoint: Path, own_s: float | None
) -> None:
    """All audio of the session counts, for any number of flushes."""

    async def script(session: StreamingSession) -> None:
        for _ in range(20):
            session.feed(TEXT)
            session.flush()

    events = run_session(build(client, tiny_checkpoint, max_audio_s=2.0), script, max_audio_s=own_s)
    result = done(events).result
    assert result.finish_reason is FinishReason.LENGTH
    assert result.usage.audio_s == 2.0
    assert any("hit the audio cap" in warning for warning in result.warnings)


def test_misuse_is_refused(synthesizer: Synthesizer) -> None:
    async def misuse() -> None:
        session = synthesizer.open_session(SpeechRequest())
        with pytest.raises(TextError, match="U\\+0007"):
            session.feed("ring \x07")
        for number in range(MAX_WAITING_FLUSHES):
            session.flush(str(number))
        with pytest.raises(InvalidRequestError, match="256 flushes are waiting"):
            session.flush()
        session.close()
        for call in (lambda: session.feed("late"), session.flush):
            with pytest.raises(InvalidRequestError, match="closed"):
                call()

    run(misuse())


OPEN = "When the weather is fine again"
REST = "we go to the sea."


def test_an_eager_session_begins_before_the_sentence_ends_and_says_each_word_once(
    client: RampClient, synthesizer: Synthesizer, tiny_checkpoint: Path
) -> None:
    """The rest of the sentence continues the codes of its beginning."""

    async def script(session: StreamingSession) -> None:
        session.feed(f"{OPEN}, we ")
        await until(lambda: len(client.spoken) > 0)
        session.feed("go to the sea. And back.")
        session.close()

    events = run_session(synthesizer, script, eager=1)
    first, rest, other = (job.request.prompt_ids for job in client.jobs)
    vocabulary = PromptBuilder.load(tiny_checkpoint, client.codec).vocabulary
    assert vocabulary is not None
    codes = client.codes_of(client.jobs[0].request)
    assert bytes(first[1:-1]).decode() == OPEN
    assert bytes(other[1:-1]).decode() == "And back."
    sentence = rest[: -len(codes)]
    assert bytes(sentence[1:-1]).decode() == f"{OPEN}, {REST}"
    assert rest[-len(codes) :] == vocabulary.token_ids(codes)
    assert client.jobs[1].carry == tuple(codes[-3:])
    assert client.jobs[1].token_offset == len(codes)
    assert done(events).result.spoken_text == f"{OPEN} {REST} And back."
    chunks = [event for event in events if isinstance(event, AudioChunk)]
    assert sorted({(c.text_start, c.text_end) for c in chunks}) == [(0, 31), (31, 49), (49, 59)]


def test_the_beginning_of_a_sentence_has_small_blocks_behind_other_audio_too(
    client: RampClient, synthesizer: Synthesizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed("No full stop here ")
        while len(client.jobs) < 1:  # spoken after the delay
            await asyncio.sleep(0.01)
        session.feed(f"{OPEN}, we ")
        session.close()

    run_session(synthesizer, script, SessionTimes(max_text_delay_s=0.1), monkeypatch, eager=1)
    assert [job.streaming.chunk_sizes for job in client.jobs] == [(2, 4, 8), (2,), (8,)]


@pytest.mark.parametrize("width", [1, 1000])
def test_eager_audio_depends_on_the_text_alone(synthesizer: Synthesizer, width: int) -> None:
    text = f"{OPEN} we go, {REST} And back."

    async def script(session: StreamingSession) -> None:
        for start in range(0, len(text), width):
            session.feed(text[start : start + width])
            await asyncio.sleep(0)
        session.close()

    async def whole(session: StreamingSession) -> None:
        session.feed(text)
        session.close()

    heard = [run_session(synthesizer, with_text, eager=2) for with_text in (script, whole)]
    assert audio(heard[0]) == audio(heard[1])


def test_a_barge_in_forgets_the_beginning_of_a_sentence(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed(f"{OPEN}, we ")
        await until(lambda: len(client.spoken) > 0)
        session.cancel()
        session.feed("Something else is here.")
        session.close()

    events = run_session(synthesizer, script, eager=1)
    texts = [bytes(job.request.prompt_ids[1:-1]).decode() for job in client.jobs]
    assert texts == [OPEN, "Something else is here."]
    assert done(events).result.finish_reason is FinishReason.STOP


def test_a_sentence_without_room_for_its_beginning_ends_by_itself(
    client: RampClient, tiny_checkpoint: Path
) -> None:
    async def script(session: StreamingSession) -> None:
        session.feed(f"{OPEN}, {REST}")
        session.close()

    run_session(build(client, tiny_checkpoint, max_seq_len=120), script, eager=1)
    texts = [bytes(job.request.prompt_ids[1:-1]).decode() for job in client.jobs]
    assert texts == [OPEN, REST]


def test_a_random_speaker_is_kept_with_the_whole_sentence(
    client: RampClient, synthesizer: Synthesizer, tiny_checkpoint: Path
) -> None:
    traits = replace(synthesizer.settings.traits, invents_voices=True)
    inventing = build(client, tiny_checkpoint, traits=traits)
    rest_of_it = "we go to the sea, and from there to the islands."

    async def script(session: StreamingSession) -> None:
        session.feed(f"{OPEN}, {rest_of_it} And back.")
        session.close()

    run_session(inventing, script, eager=1)
    first, rest, other = client.jobs
    codes = (*client.codes_of(first.request), *client.codes_of(rest.request))
    assert (first.prompt_codes, rest.prompt_codes, other.prompt_codes) == ((), (), codes)
    assert f"{OPEN}, {rest_of_it}".encode() in bytes(i for i in other.request.prompt_ids if i < 256)


def test_a_random_speaker_ends_a_sentence_too_long_to_be_continued(
    client: RampClient, synthesizer: Synthesizer, tiny_checkpoint: Path
) -> None:
    traits = replace(synthesizer.settings.traits, invents_voices=True, max_characters=45)
    inventing = build(client, tiny_checkpoint, traits=traits)

    async def script(session: StreamingSession) -> None:
        session.feed(f"{OPEN}, {REST} And back.")
        session.close()

    run_session(inventing, script, eager=1)
    first, rest, other = client.jobs
    codes = tuple(client.codes_of(first.request))
    assert (first.prompt_codes, rest.prompt_codes, other.prompt_codes) == ((), codes, codes)
    assert OPEN.encode() in bytes(i for i in rest.request.prompt_ids if i < 256)
