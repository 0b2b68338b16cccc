"""Text that is spoken while it is generated, without a language model."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.tts.ramp import SEEDED, run
from tts.errors import SynthesisError
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import AudioChunk, Done, SpeechEvent, SpeechRequest, Started
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
    return [event async for event in speak_text(pieces, session)]


def test_every_piece_and_every_event_is_there_in_order(synthesizer: Synthesizer) -> None:
    events = run(spoken(synthesizer, pieces_of(*TEXTS)))
    assert [e.text for e in events if isinstance(e, TextPiece)] == list(TEXTS)
    speech = [e for e in events if not isinstance(e, TextPiece)]
    assert isinstance(speech[0], Started)
    assert isinstance(speech[-1], Done)
    chunks = [e for e in speech if isinstance(e, AudioChunk)]
    assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
    assert chunks[-1].text_end == len("".join(TEXTS))


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
        events = speak_text(endless(), session)
        async for event in events:
            if isinstance(event, AudioChunk):
                break
        await events.aclose()
        assert closed == [True]

    run(scenario())
