"""Dialogues: turns of several voices in one stream, over gRPC's messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from llm import FinishReason
from tests.tts.ramp import RATE, RampClient, build, run
from tests.tts.serving import Serving, config, error_of, fields_of, hum, run_with_server, wav
from tts.engine.client import EncodedClip
from tts.errors import InvalidRequestError, VoiceNotFoundError
from tts.factory import Service
from tts.server.speech_api import SpeechApi
from tts.speech.cloning import CloningLimits
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import SynthesizedSpeech
from tts.text.markup.document import MarkKind
from tts.v1 import speech_pb2 as pb

TURNS = [("hazel", "Did it arrive?"), ("owen", "It did. It is here."), ("hazel", "Good.")]
SOURCE = "Did it arrive?\nIt did. It is here.\nGood."
PAUSE = round(0.4 * RATE)


def turn(voice: Any, text: str) -> pb.DialogueTurn:
    """Return a turn of a named voice, of a selection, or of the request's voice (None)."""
    if isinstance(voice, str):
        voice = pb.VoiceSelection(name=voice)
    return pb.DialogueTurn(voice=voice, text=text)


def request(turns: Any = TURNS, pause: float | None = None, **values: Any) -> pb.SynthesizeRequest:
    talk = pb.Dialogue(turns=[turn(*each) for each in turns])
    if pause is not None:
        talk.pause.FromNanoseconds(round(pause * 1e9))
    settings = config(max_tokens=None, **values)
    return pb.SynthesizeRequest(config=settings, input=pb.SynthesisInput(dialogue=talk))


def spoken(synthesizer: Synthesizer, proto: pb.SynthesizeRequest) -> SynthesizedSpeech:
    return run(synthesizer.synthesize(SpeechApi(synthesizer).check(proto)))


def samples_of(speech: SynthesizedSpeech) -> np.ndarray:
    return np.frombuffer(speech.audio, dtype="<i2")


def test_each_turn_is_spoken_in_its_voice(synthesizer: Synthesizer, client: RampClient) -> None:
    found = spoken(synthesizer, request())
    said = [("hazel", TURNS[0][1]), ("owen", "It did."), ("owen", "It is here."), TURNS[2]]
    prompts = [
        synthesizer._prompts.speech_prompt(text, synthesizer.voices.get(name))
        for name, text in said
    ]
    assert [job.request.prompt_ids for job in client.jobs] == prompts
    assert [job.carry is None for job in client.jobs] == [True, True, False, True]
    assert found.result.spoken_text == " ".join(text for _, text in said)
    assert found.result.usage.input_characters == len(SOURCE)


def test_turns_are_marked_where_they_begin(synthesizer: Synthesizer) -> None:
    found = spoken(synthesizer, request())
    assert [(mark.kind, mark.name) for mark in found.marks] == [
        (MarkKind.TURN, name) for name, _ in TURNS
    ]
    assert [SOURCE[m.text_start : m.text_end] for m in found.marks] == [text for _, text in TURNS]
    begins = [round(mark.time_s * RATE) for mark in found.marks]
    assert begins[0] == 0
    silent = [chunk for chunk in found.chunks if SOURCE[chunk.text_start : chunk.text_end] == "\n"]
    ends = [chunk.sample_offset + chunk.sample_count for chunk in silent]
    assert ends == begins[1:]
    samples = samples_of(found)
    for begin in begins[1:]:
        assert not samples[begin - PAUSE : begin].any()
        assert samples[begin]
        assert samples[begin - PAUSE - 1]


@pytest.mark.parametrize("pause", [0.0, 1.25, 10.0])
def test_the_pause_between_turns(synthesizer: Synthesizer, pause: float) -> None:
    usual, other = spoken(synthesizer, request()), spoken(synthesizer, request(pause=pause))
    more = 2 * (round(pause * RATE) - PAUSE)
    assert len(samples_of(other)) == len(samples_of(usual)) + more
    assert len(other.marks) == len(TURNS)


def test_a_pause_of_zero_joins_no_texts(synthesizer: Synthesizer, client: RampClient) -> None:
    spoken(synthesizer, request([("hazel", "One"), ("hazel", "two"), (None, "three")], pause=0.0))
    assert len(client.jobs) == 3


def test_a_turn_without_a_voice_has_that_of_the_request(synthesizer: Synthesizer) -> None:
    voice = pb.VoiceSelection(name="edith")
    found = spoken(synthesizer, request([(None, "One."), ("owen", "Two.")], voice=voice))
    assert [mark.name for mark in found.marks] == ["edith", "owen"]
    default = spoken(synthesizer, request([(None, "One."), ("owen", "Two.")]))
    assert default.marks[0].name == synthesizer.voices.default.name


def test_voices_of_clips_and_of_speech_tokens(synthesizer: Synthesizer, client: RampClient) -> None:
    clip = pb.VoicePrompt(audio=wav(hum(1.5)), transcript="hello there")
    tokens = pb.SpeechTokens(tokens=[3, 5, 7, 9] * 8)
    turns = [
        (pb.VoiceSelection(prompt=clip), "One."),
        (pb.VoiceSelection(prompt_tokens=tokens), "Two."),
        (pb.VoiceSelection(prompt=clip), "Three."),
    ]
    found = spoken(synthesizer, request(turns))
    first, second, third = (job.prompt_codes for job in client.jobs)
    assert first == third != second == tuple(tokens.tokens)
    assert first
    assert [mark.name for mark in found.marks] == ["prompt"] * 3


def test_a_recording_is_encoded_once_for_all_of_its_turns(tiny_checkpoint: Path) -> None:
    """Even if the recordings of the turns do not fit into the cache together."""

    class CountingClient(RampClient):
        num_encoded = 0

        async def encode_prompt(self, samples: np.ndarray) -> EncodedClip:
            self.num_encoded += 1
            return await super().encode_prompt(samples)

    client = CountingClient()
    synthesizer = build(client, tiny_checkpoint, cloning=CloningLimits(max_cached_codes=1))
    clips = [pb.VoicePrompt(audio=wav(hum(length)), transcript="hello") for length in (1.5, 1.6)]
    turns = [(pb.VoiceSelection(prompt=clips[n % 2]), f"Turn {n}.") for n in range(20)]
    spoken(synthesizer, request(turns))
    assert client.num_encoded == 2
    assert len({job.prompt_codes for job in client.jobs}) == 2


def test_the_rate_and_the_limit_hold_for_a_dialogue(synthesizer: Synthesizer) -> None:
    usual, fast = spoken(synthesizer, request()), spoken(synthesizer, request(speaking_rate=2.0))
    spoken_s = len(samples_of(usual)) - 2 * PAUSE
    assert len(samples_of(fast)) == pytest.approx(spoken_s / 2 + 2 * PAUSE, rel=0.03)
    limit = Duration(seconds=1)
    cut = spoken(synthesizer, request(max_audio_duration=limit))
    assert cut.result.finish_reason is FinishReason.LENGTH
    assert len(samples_of(cut)) <= RATE
    assert len(cut.marks) < len(TURNS)


WRONG: list[tuple[pb.SynthesizeRequest, list[str]]] = [
    (request([]), ["input.dialogue.turns"]),
    (request([("hazel", "a")] * 3 + [("owen", " ")]), ["input.dialogue.turns[3].text"]),
    (
        request([("hazel", ""), ("owen", "a\0b")]),
        [f"input.dialogue.turns[{n}].text" for n in (0, 1)],
    ),
    (request([("hazel", "a")] * 1001), ["input.dialogue.turns"]),
    (
        pb.SynthesizeRequest(
            input=pb.SynthesisInput(dialogue=pb.Dialogue.FromString(b"\x0a\x00" * 1_000_000))
        ),
        ["input.dialogue.turns"],
    ),
    (request([("hazel", "a" * 5_000)] * 3), ["input.dialogue"]),
    (
        request(
            [(pb.VoiceSelection(prompt=pb.VoicePrompt(audio=b"%d" % n)), "a") for n in range(17)]
        ),
        ["input.dialogue.turns"],
    ),
    (request(pause=10.001), ["input.dialogue.pause"]),
    (request(pause=-0.1), ["input.dialogue.pause"]),
    (request([(None, "a"), ("../x", "b")]), ["input.dialogue.turns[1].voice.name"]),
    (
        request([(pb.VoiceSelection(language_code="?"), "a")]),
        ["input.dialogue.turns[0].voice.language_code"],
    ),
    (
        request([(pb.VoiceSelection(prompt_tokens=pb.SpeechTokens(tokens=[64])), "a")]),
        ["input.dialogue.turns[0].voice.prompt_tokens"],
    ),
    (request([("hazel", "")], speaking_rate=9.0), ["input.dialogue.turns[0].text"]),
]


@pytest.mark.parametrize(("proto", "fields"), WRONG, ids=range(len(WRONG)))
def test_wrong_turns_are_named(
    synthesizer: Synthesizer, proto: pb.SynthesizeRequest, fields: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        SpeechApi(synthesizer).check(proto)
    assert [violation.field for violation in raised.value.violations] == fields


def test_a_voice_that_cannot_be_used_is_named(synthesizer: Synthesizer) -> None:
    with pytest.raises(VoiceNotFoundError, match="no voice 'nemo'"):
        spoken(synthesizer, request([("hazel", "a"), ("nemo", "b")]))
    clip = pb.VoiceSelection(prompt=pb.VoicePrompt(audio=b"no audio", transcript="a"))
    with pytest.raises(InvalidRequestError) as raised:
        spoken(synthesizer, request([("hazel", "a"), (clip, "b")]))
    (violation,) = raised.value.violations
    assert violation.field == "input.dialogue.turns[1].voice.prompt.audio"


def test_a_thousand_turns(synthesizer: Synthesizer, client: RampClient) -> None:
    turns = [(("hazel", "owen")[n % 2], "Hi.") for n in range(1000)]
    found = spoken(synthesizer, request(turns, pause=0.0))
    assert len(client.jobs) == len(found.marks) == 1000
    assert found.result.finish_reason is FinishReason.STOP


def test_a_stream_has_the_audio_and_the_marks_of_a_call(service: Service) -> None:
    proto = request([("hazel", "Hi."), ("owen", "Oh.")])

    async def ask(served: Serving) -> None:
        whole = await served.speech.Synthesize(proto)
        streaming = pb.SynthesizeStreamRequest(config=proto.config, input=proto.input)
        responses = [response async for response in served.speech.SynthesizeStream(streaming)]
        assert b"".join(response.audio.data for response in responses) == whole.audio
        marks = [r.mark for r in responses if r.WhichOneof("event") == "mark"]
        assert list(whole.marks) == marks
        assert [(mark.kind, mark.name) for mark in marks] == [
            (pb.MARK_KIND_TURN, "hazel"),
            (pb.MARK_KIND_TURN, "owen"),
        ]
        wrong = request([("hazel", "Hi."), ("owen", "")])
        error = await error_of(served.speech.Synthesize(wrong))
        assert fields_of(error) == ["input.dialogue.turns[1].text"]

    run_with_server(service, ask)
