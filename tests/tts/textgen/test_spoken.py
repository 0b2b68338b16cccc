"""Text that is spoken while it is generated, without a language model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tests.tts.ramp import SEEDED, run
from tts.engine.client import Hold
from tts.errors import SynthesisError
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import AudioChunk, Done, SessionEvent, SpeechEvent, SpeechRequest, Started
from tts.textgen import spoken as spoken_module
from tts.textgen.generator import TextPiece
from tts.textgen.spoken import speak_text

TEXTS = ("One sen", "tence. And ", "", "another one.")


async def pieces_of(*texts: str) -> AsyncGenerator[TextPiece, None]:
    for text in texts:
        yield TextPiece(text)


async def spoken(
    synthesizer: Synthesizer, pieces: AsyncGenerator[TextPiece, None]
) -> list[TextPiece | SpeechEvent]:
    session = synthesizer.open_session(SpeechRequest(sampling=SEEDED))
    return [event async for event in speak_text(pieces, session, Hold())]


def test_every_piece_and_every_event_is_there_in_order(synthesizer: Synthesizer) -> None:
    events = run(spoken(synthesizer, pieces_of(*TEXTS)))
    assert [e.text for e in events if isinstance(e, TextPiece)] == list(TEXTS)
    speech = [e for e in events if not isinstance(e, TextPiece)]
    assert isinstance(speech[0], Started)
    assert isinstance(speech[-1], Done)
    chunks = [e for e in speech if isinstance(e, AudioChunk)]
    assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
    assert chunks[-1].text_end == len("".join(TEXTS))


def test_the_text_is_held_from_its_first_clause_to_the_first_audio(
    synthesizer: Synthesizer,
) -> None:
    hold, changes = Hold(), list[tuple[bool, int]]()
    texts = ("One", " sentence. ", "Two more. ", "Three more. ")
    seen: list[TextPiece | SpeechEvent] = []
    hold.on_change = lambda: changes.append((hold.is_set, len(seen)))

    async def scenario() -> None:
        session = synthesizer.open_session(SpeechRequest(sampling=SEEDED))
        async for event in speak_text(pieces_of(*texts), session, hold):
            seen.append(event)

    run(scenario())
    first = next(n for n, event in enumerate(seen) if isinstance(event, AudioChunk))
    (is_set, before), (is_set_again, after) = changes
    assert (is_set, is_set_again) == (True, False)
    assert before <= seen.index(TextPiece(texts[2]))
    assert after <= first


def test_a_hold_ends_without_audio(
    synthesizer: Synthesizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that gives no sound for the first sentence, or is busy, does not stop the text."""
    monkeypatch.setattr(spoken_module, "HOLD_S", 0.02)
    hold, released = Hold(), asyncio.Event()
    hold.on_change = lambda: None if hold.is_set else released.set()

    async def waits_for_its_release() -> AsyncGenerator[TextPiece, None]:
        yield TextPiece("One sentence. ")
        yield TextPiece("And ")
        await released.wait()
        yield TextPiece("another one.")

    async def scenario() -> None:
        session = _SilentSession()
        pieces = waits_for_its_release()
        texts = [
            e.text async for e in speak_text(pieces, session, hold) if isinstance(e, TextPiece)
        ]
        assert "".join(texts) == "One sentence. And another one."

    run(scenario())


class _SilentSession:
    """A session that never sounds."""

    awaits_first_audio = True

    def __init__(self) -> None:
        self._closed = asyncio.Event()

    def feed(self, text: str) -> None:
        pass

    def close(self) -> None:
        self._closed.set()

    async def events(self) -> AsyncGenerator[SessionEvent, None]:
        await self._closed.wait()
        return
        yield


def test_control_characters_are_not_spoken_and_keep_their_place(synthesizer: Synthesizer) -> None:
    text = "One\0 \x1b[1msentence. And\x07 another one."
    events = run(spoken(synthesizer, pieces_of(text)))
    assert events[0] == TextPiece(text) or events[1] == TextPiece(text)
    chunks = [e for e in events if isinstance(e, AudioChunk)]
    assert chunks[-1].text_end == len(text)


def test_an_error_of_the_text_ends_both(synthesizer: Synthesizer) -> None:
    async def broken() -> AsyncGenerator[TextPiece, None]:
        yield TextPiece("A sentence that is spoken. ")
        raise SynthesisError("the text failed")

    with pytest.raises(SynthesisError, match="the text failed"):
        run(spoken(synthesizer, broken()))


def test_closing_it_closes_the_text(synthesizer: Synthesizer) -> None:
    closed = []

    async def endless() -> AsyncGenerator[TextPiece, None]:
        try:
            while True:
                yield TextPiece("And a sentence. ")
        finally:
            closed.append(True)

    async def scenario() -> None:
        session = synthesizer.open_session(SpeechRequest(sampling=SEEDED))
        events = speak_text(endless(), session, Hold())
        async for event in events:
            if isinstance(event, AudioChunk):
                break
        await events.aclose()
        assert closed == [True]

    run(scenario())
