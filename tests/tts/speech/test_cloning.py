"""Voices from recordings and from codes."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import soundfile

from decoder import (
    AudioEncoding,
    AudioFormat,
    encode_samples,
)
from llm import RequestError
from tests.tts.ramp import (
    RATE,
    RampClient,
    build,
    collect_speech,
    run,
)
from tests.vocabulary import ANY_VOICE, END_OF_SPEECH, FIRST_CODE, START_OF_SPEECH
from tts.errors import (
    InvalidRequestError,
    PreconditionError,
    PromptTimeoutError,
)
from tts.families.base import FamilyTraits
from tts.families.prompt import PromptBuilder
from tts.speech.cloning import CloningLimits, VoiceCloner
from tts.speech.synthesizer import (
    Synthesizer,
)
from tts.voices.types import Voice, VoiceClip, VoicePrompt


def clip(seconds: float = 2.0, rate: int = RATE) -> bytes:
    tone = 0.5 * np.sin(2 * np.pi * 200 * np.arange(round(seconds * rate)) / rate)
    file = BytesIO()
    soundfile.write(file, tone, rate, format="WAV")
    return file.getvalue()


def test_a_clip_becomes_a_voice(client: RampClient, synthesizer: Synthesizer) -> None:
    prompt = run(synthesizer.cloner.from_clip(clip(), None, "I said 2 things."))
    assert len(prompt.codes) == 50
    assert prompt.transcript == "I said two things."
    collect_speech(synthesizer, "Hi.", voice=Voice("me", prompt=prompt))
    job = client.jobs[0]
    assert job.prompt_codes == prompt.codes
    assert job.request.prompt_ids[:4] == (ANY_VOICE, *b"I s")
    assert job.request.prompt_ids[-5:] == (END_OF_SPEECH, *b"Hi.", START_OF_SPEECH)


def test_a_recording_of_the_checkpoint_is_read_in_its_language(
    client: RampClient, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "anna.wav").write_bytes(clip())
    prompts = PromptBuilder.load(tiny_checkpoint, client.codec)
    assert prompts.family is not None
    prompts.family.traits = FamilyTraits()
    cloner = VoiceCloner(client, prompts)
    recording = VoiceClip(tmp_path / "anna.wav", "Ich habe 2.")
    voice = Voice("anna", language_codes=("de",), clip=recording)
    asked = [run(cloner.ready(replace(voice, language=code))) for code in ("de-AT", "")]
    assert [one.language for one in asked] == ["de-AT", ""]  # encoded once, not the same voice
    assert [one.prompt.transcript for one in asked if one.prompt] == ["Ich habe zwei."] * 2


def test_headerless_clips_come_with_their_format(synthesizer: Synthesizer) -> None:
    samples = 0.5 * np.sin(np.arange(8_000) / 5).astype(np.float32)
    data = encode_samples(samples, AudioEncoding.MULAW)
    form = AudioFormat(AudioEncoding.MULAW, 8_000)
    prompt = run(synthesizer.cloner.from_clip(data, form, "One second."))
    assert len(prompt.codes) == 25


@pytest.mark.parametrize(
    ("audio", "transcript", "message"),
    [
        (b"no audio at all", "words", r"prompt\.audio: not a WAV"),
        (clip(0.2), "words", r"prompt\.audio: the clip lasts 0\.20 s"),
        (clip(), "", r"prompt\.transcript: must say"),
        (clip(), "\U0001f389", r"prompt\.transcript: must say"),
        (clip(), "x" * 2001, r"prompt\.transcript: has more than 2000"),
    ],
)
def test_clips_that_cannot_be_used_name_the_field(
    synthesizer: Synthesizer, audio: bytes, transcript: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        run(synthesizer.cloner.from_clip(audio, None, transcript))


def test_a_voice_prompt_must_leave_context_for_speech(
    client: RampClient, tiny_checkpoint: Path
) -> None:
    synthesizer = build(client, tiny_checkpoint, max_seq_len=800)
    with pytest.raises(InvalidRequestError, match="110 tokens of the model's context, 99 are"):
        run(synthesizer.cloner.from_clip(clip(4.0), None, "Words."))


def test_reading_a_clip_has_a_time_limit(client: RampClient, tiny_checkpoint: Path) -> None:
    synthesizer = build(client, tiny_checkpoint, cloning=CloningLimits(read_timeout_s=0.0))
    with pytest.raises(PromptTimeoutError, match="took more than 0 s"):
        run(synthesizer.cloner.from_clip(clip(), None, "Words."))


def test_a_codec_without_an_encoder_cannot_clone(client: RampClient, tiny_checkpoint: Path) -> None:
    client.decoder.spec = replace(client.decoder.spec, can_encode=False)
    with pytest.raises(PreconditionError, match="from a recording"):
        run(build(client, tiny_checkpoint).cloner.from_clip(clip(), None, "Words."))


def test_codes_may_be_sent_instead_of_a_clip(client: RampClient, synthesizer: Synthesizer) -> None:
    prompt = synthesizer.cloner.from_codes([3, 1, 2])
    assert prompt == VoicePrompt((3, 1, 2))
    collect_speech(synthesizer, "Hi.", voice=Voice("me", prompt=prompt))
    assert client.jobs[0].request.prompt_ids[1:6] == (
        START_OF_SPEECH,
        *(FIRST_CODE + code for code in (3, 1, 2)),
        END_OF_SPEECH,
    )
    with pytest.raises(RequestError, match=r"0\.\.63"):
        synthesizer.cloner.from_codes([64])
    with pytest.raises(InvalidRequestError, match="no speech tokens"):
        synthesizer.cloner.from_codes([])
