"""Conversion of a request's dialogue: its turns as a document, its voices as the cast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tts.errors import InvalidRequestError
from tts.server.wire.common import Violations, optional
from tts.server.wire.speech import read_voice
from tts.speech.synthesizer import Synthesizer
from tts.text.markup.dialogue import (
    BETWEEN,
    DialogueTurn,
    check_number,
    read_dialogue,
    voice_of_turn,
)
from tts.text.markup.document import Document
from tts.v1 import speech_pb2 as pb
from tts.voices.types import Voice

FIELD = "input.dialogue"
MAX_CLIPS = 16  # recordings of one dialogue, all of which are encoded before it begins


def read_turns(
    proto: pb.Dialogue, max_characters: int, wrong: Violations
) -> tuple[str, Document | None]:
    """Return the whole text of a dialogue and its document; "" and None when it is too long.

    Raises InvalidRequestError for wrong turns.
    """
    check_number(len(proto.turns), FIELD)  # a message has room for millions of empty turns
    for index, turn in enumerate(proto.turns):
        if turn.voice.language_code:
            path = f"{FIELD}.turns[{index}].voice.language_code"
            wrong.language(turn.voice.language_code, path)
    length = sum(len(turn.text) + len(BETWEEN) for turn in proto.turns) - len(BETWEEN)
    limit = f"has {length} characters, the limit is {max_characters}"
    if not wrong.require(length <= max_characters, FIELD, limit):
        return "", None
    turns = [
        DialogueTurn(voice_of_turn(index) if _has_own_voice(turn) else "", turn.text)
        for index, turn in enumerate(proto.turns)
    ]
    document = read_dialogue(turns, optional(proto, "pause"), field=FIELD)
    return document.source, document


def read_cast(proto: pb.Dialogue, synthesizer: Synthesizer, default: Voice) -> Mapping[str, Voice]:
    """Return the voices that the document of `read_turns` names; `default` is the request's.

    Raises as `read_voice` and `Synthesizer.check_instructions` do, and InvalidRequestError for more
    than `MAX_CLIPS` recordings.
    """
    voices: dict[bytes, Voice] = {}
    cast = {}
    for index, turn in enumerate(proto.turns):
        if not _has_own_voice(turn):
            continue
        path, voice = f"{FIELD}.turns[{index}]", default
        if turn.HasField("voice"):
            chosen = turn.voice.SerializeToString()
            if chosen not in voices:
                voices[chosen] = read_voice(turn.voice, synthesizer, f"{path}.voice")
            voice = voices[chosen]
        if turn.instructions:
            synthesizer.check_instructions(turn.instructions, f"{path}.instructions")
            voice = replace(voice, instructions=turn.instructions)
        cast[voice_of_turn(index)] = voice
    clips = [voice.clip for voice in voices.values() if voice.clip is not None]
    if sum(isinstance(clip.audio, bytes) for clip in clips) > MAX_CLIPS:
        raise InvalidRequestError.of(f"{FIELD}.turns", f"has more than {MAX_CLIPS} recordings")
    return cast


def _has_own_voice(turn: pb.DialogueTurn) -> bool:
    """Return whether a turn has a voice, or speaks in another way than the request."""
    return turn.HasField("voice") or bool(turn.instructions)
