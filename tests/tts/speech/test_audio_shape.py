"""Sample processing of requests and families: trimmed silence, steady loudness."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder import AudioEncoding, AudioFormat, LoudnessNormalizer, SilenceTrimmer, to_s16
from decoder.codecs.ramp import RampDecoder
from tests.tts.ramp import RATE, SEEDED, RampClient, SpeechEvents, build, collect_speech, run
from tts.engine.client import AudioBlock, SpeechJob
from tts.speech.output import AudioOutput, Loudness
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import FlushDone, SpeechRequest

FLOAT = AudioFormat(AudioEncoding.PCM_F32LE, RATE)
TEXT = "The first sentence is here. A second one follows it! Yes."


class PausingDecoder(RampDecoder):
    """A ramp decoder for which half of the codes are silent."""

    def _code(self, code: int, position: int) -> np.ndarray:
        samples = super()._code(code, position)
        return samples * np.float32(code >= self.spec.codebook_size // 2)


@pytest.fixture
def pausing(client: RampClient, tiny_checkpoint: Path) -> Synthesizer:
    client.decoder = PausingDecoder(client.decoder.spec)
    return build(client, tiny_checkpoint)


def samples_of(heard: SpeechEvents) -> np.ndarray:
    return np.frombuffer(heard.data, "<f4")


def trimmed(samples: np.ndarray) -> np.ndarray:
    trimmer = SilenceTrimmer(RATE)
    return np.concatenate([trimmer.process(samples), trimmer.finish()])


def test_silence_is_trimmed_on_request(pausing: Synthesizer) -> None:
    lost = []
    for seed in range(4):
        values = {"encoding": FLOAT.encoding, "sampling": replace(SEEDED, seed=seed)}
        plain = samples_of(collect_speech(pausing, TEXT, **values))
        cut = collect_speech(pausing, TEXT, trim_silence=True, **values)
        np.testing.assert_array_equal(samples_of(cut), trimmed(plain))
        assert cut.num_samples == len(samples_of(cut))
        lost.append(len(plain) - cut.num_samples)
    assert max(lost) > 0


def test_every_flush_ends_an_utterance(pausing: Synthesizer) -> None:
    """In a session the silence of each utterance is trimmed, and a flush emits all samples."""
    request = SpeechRequest(sampling=SEEDED, encoding=FLOAT.encoding, trim_silence=True)

    async def run_session(values: SpeechRequest) -> list[np.ndarray]:
        session = pausing.open_session(values)
        for text in ("One is here.", "Two is there."):
            session.feed(text)
            session.flush()
        session.close()
        utterances, data = [], b""
        async for event in session.events():
            data += getattr(event, "data", b"")
            if isinstance(event, FlushDone):
                utterances.append(np.frombuffer(data, "<f4"))
                data = b""
        return utterances

    plain = run(run_session(replace(request, trim_silence=False)))
    for expected, found in zip(plain, run(run_session(request)), strict=True):
        np.testing.assert_array_equal(found, trimmed(expected))


def test_a_family_may_keep_the_loudness_steady(client: RampClient, tiny_checkpoint: Path) -> None:
    plain = build(client, tiny_checkpoint)
    steady = build(
        client, tiny_checkpoint, traits=replace(plain.settings.traits, steady_loudness=True)
    )
    before = collect_speech(plain, TEXT, encoding=FLOAT.encoding)
    after = collect_speech(steady, TEXT, encoding=FLOAT.encoding)
    keeper, expected = LoudnessNormalizer(RATE), []
    for index in range(3):
        keeper.begin_segment()
        data = b"".join(chunk.data for chunk in before.chunks if chunk.segment_index == index)
        expected.append(keeper.process(np.frombuffer(data, "<f4")))
    np.testing.assert_array_equal(samples_of(after), np.concatenate(expected))
    assert not np.array_equal(samples_of(after), samples_of(before))


def test_dropped_audio_does_not_affect_later_audio() -> None:
    output = AudioOutput(RATE, FLOAT, trim_silence=True)
    sound, quiet = np.full(1600, 0.5, np.float32), np.zeros(3200, np.float32)
    first = b"".join(output.write(np.concatenate([sound, quiet])))
    assert len(first) == 4 * 1600
    output.drop()
    rest = [*output.write(sound), *output.finish()]
    assert b"".join(rest) == sound.tobytes()


@pytest.mark.parametrize("encoding", [AudioEncoding.PCM_S16LE, AudioEncoding.WAV])
def test_16_bit_samples_equal_converted_floats(encoding: AudioEncoding) -> None:
    made = np.random.default_rng(0)
    blocks = [made.uniform(-1.2, 1.2, count).astype(np.float32) for count in (1600, 1, 80_000)]
    sent = []
    for convert in (lambda block: block, to_s16):
        output = AudioOutput(RATE, AudioFormat(encoding, RATE))
        assert output.takes_s16
        pieces = [piece for block in blocks for piece in output.write(convert(block))]
        sent.append([*pieces, *output.finish()])
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("audio_format", "shape"),
    [
        (FLOAT, {}),
        (AudioFormat(AudioEncoding.MULAW, RATE), {}),
        (AudioFormat(AudioEncoding.PCM_S16LE, 2 * RATE), {}),
        (AudioFormat(AudioEncoding.PCM_S16LE, RATE), {"gain_db": -3.0}),
        (AudioFormat(AudioEncoding.PCM_S16LE, RATE), {"trim_silence": True}),
        (AudioFormat(AudioEncoding.PCM_S16LE, RATE), {"loudness": Loudness.STEADY}),
        (AudioFormat(AudioEncoding.PCM_S16LE, RATE), {"loudness": Loudness.MATCHED}),
        (AudioFormat(AudioEncoding.PCM_S16LE, RATE), {"speaking_rate": 1.1}),
    ],
)
def test_processing_that_needs_floats_requests_floats(
    audio_format: AudioFormat, shape: dict[str, Any]
) -> None:
    output = AudioOutput(RATE, audio_format, **shape)
    assert not output.takes_s16
    with pytest.raises(ValueError, match="16-bit"):
        list(output.write(np.zeros(10, np.int16)))


class ShortClient(RampClient):
    """Makes 16-bit samples where a job allows it, as a GPU does."""

    async def speak(self, job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        async for block in super().speak(job):
            yield block._replace(samples=to_s16(block.samples)) if job.as_s16 else block


def test_a_request_without_processing_allows_16_bits(tiny_checkpoint: Path) -> None:
    plain, short = RampClient(), ShortClient()
    for values in (
        {"encoding": AudioEncoding.PCM_S16LE},
        {"encoding": AudioEncoding.WAV},
        {"encoding": AudioEncoding.PCM_S16LE, "gain_db": -6.0},
        {"encoding": AudioEncoding.PCM_F32LE},
    ):
        expected, got = (
            collect_speech(build(client, tiny_checkpoint), TEXT, **values)
            for client in (plain, short)
        )
        assert got.data == expected.data
    steps = len(short.jobs) // 4
    assert [job.as_s16 for job in short.jobs[::steps]] == [True, True, False, False]
