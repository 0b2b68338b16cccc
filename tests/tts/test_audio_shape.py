"""What requests and families do to the samples: silence trimmed when asked, steady loudness."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from decoder import AudioEncoding, AudioFormat, LoudnessKeeper, SilenceTrimmer, to_s16
from decoder.ramp import RampDecoder
from tests.tts.ramp import RATE, SEEDED, Heard, RampClient, build, hear, run
from tts.audio import AudioOutput, AudioShape
from tts.engine_client import AudioBlock, SpeechJob
from tts.speech import SpeechRequest
from tts.synthesizer import FlushDone, Synthesizer

FLOAT = AudioFormat(AudioEncoding.PCM_F32LE, RATE)
TEXT = "The first sentence is here. A second one follows it! Yes."


class PausingDecoder(RampDecoder):
    """Half of the codes are silent."""

    def _code(self, code: int, position: int) -> np.ndarray:
        samples = super()._code(code, position)
        return samples * np.float32(code >= self.spec.codebook_size // 2)


@pytest.fixture
def pausing(client: RampClient, tiny_checkpoint: Path) -> Synthesizer:
    client.decoder = PausingDecoder(client.decoder.spec)
    return build(client, tiny_checkpoint)


def samples_of(heard: Heard) -> np.ndarray:
    return np.frombuffer(heard.data, "<f4")


def trimmed(samples: np.ndarray) -> np.ndarray:
    trimmer = SilenceTrimmer(RATE)
    return np.concatenate([trimmer.process(samples), trimmer.finish()])


def test_silence_is_trimmed_when_asked(pausing: Synthesizer) -> None:
    lost = []
    for seed in range(4):
        values = {"encoding": FLOAT.encoding, "sampling": replace(SEEDED, seed=seed)}
        plain = samples_of(hear(pausing, TEXT, **values))
        cut = hear(pausing, TEXT, trim_silence=True, **values)
        np.testing.assert_array_equal(samples_of(cut), trimmed(plain))
        assert cut.num_samples == len(samples_of(cut))
        lost.append(len(plain) - cut.num_samples)
    assert max(lost) > 0


def test_every_flush_ends_an_utterance(pausing: Synthesizer) -> None:
    """In a session each utterance loses its own ends, and nothing is left behind at a flush."""
    request = SpeechRequest(sampling=SEEDED, encoding=FLOAT.encoding, trim_silence=True)

    async def converse(values: SpeechRequest) -> list[np.ndarray]:
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

    plain = run(converse(replace(request, trim_silence=False)))
    for expected, found in zip(plain, run(converse(request)), strict=True):
        np.testing.assert_array_equal(found, trimmed(expected))


def test_a_family_may_keep_the_loudness_steady(client: RampClient, tiny_checkpoint: Path) -> None:
    plain = build(client, tiny_checkpoint)
    steady = build(
        client, tiny_checkpoint, traits=replace(plain.settings.traits, steady_loudness=True)
    )
    before = hear(plain, TEXT, encoding=FLOAT.encoding)
    after = hear(steady, TEXT, encoding=FLOAT.encoding)
    keeper, expected = LoudnessKeeper(RATE), []
    for index in range(3):
        keeper.begin_segment()
        data = b"".join(chunk.data for chunk in before.chunks if chunk.segment_index == index)
        expected.append(keeper.process(np.frombuffer(data, "<f4")))
    np.testing.assert_array_equal(samples_of(after), np.concatenate(expected))
    assert not np.array_equal(samples_of(after), samples_of(before))


def test_what_is_dropped_is_not_heard_later() -> None:
    output = AudioOutput(RATE, FLOAT, AudioShape(trim_silence=True))
    sound, quiet = np.full(1600, 0.5, np.float32), np.zeros(3200, np.float32)
    first = b"".join(piece.data for piece in output.write(np.concatenate([sound, quiet])))
    assert len(first) == 4 * 1600
    output.drop()
    rest = [*output.write(sound), *output.finish()]
    assert b"".join(piece.data for piece in rest) == sound.tobytes()


@pytest.mark.parametrize("encoding", [AudioEncoding.PCM_S16LE, AudioEncoding.WAV])
def test_sixteen_bit_samples_go_out_as_the_floats_would(encoding: AudioEncoding) -> None:
    made = np.random.default_rng(0)
    blocks = [made.uniform(-1.2, 1.2, count).astype(np.float32) for count in (1600, 1, 80_000)]
    sent = []
    for convert in (lambda block: block, to_s16):
        output = AudioOutput(RATE, AudioFormat(encoding, RATE), AudioShape())
        assert output.takes_s16
        pieces = [piece for block in blocks for piece in output.write(convert(block))]
        sent.append([piece.data for piece in (*pieces, *output.finish())])
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("audio_format", "shape"),
    [
        (FLOAT, AudioShape()),
        (AudioFormat(AudioEncoding.MULAW, RATE), AudioShape()),
        (AudioFormat(AudioEncoding.PCM_S16LE, 2 * RATE), AudioShape()),
        (AudioFormat(AudioEncoding.PCM_S16LE, RATE), AudioShape(gain_db=-3.0)),
        (AudioFormat(AudioEncoding.PCM_S16LE, RATE), AudioShape(trim_silence=True)),
        (AudioFormat(AudioEncoding.PCM_S16LE, RATE), AudioShape(steady_loudness=True)),
        (AudioFormat(AudioEncoding.PCM_S16LE, RATE), AudioShape(speaking_rate=1.1)),
    ],
)
def test_what_needs_more_than_sixteen_bits_asks_for_floats(
    audio_format: AudioFormat, shape: AudioShape
) -> None:
    output = AudioOutput(RATE, audio_format, shape)
    assert not output.takes_s16
    with pytest.raises(ValueError, match="16-bit"):
        list(output.write(np.zeros(10, np.int16)))


class ShortClient(RampClient):
    """Makes 16-bit samples where a job allows it, as a GPU does."""

    async def speak(self, job: SpeechJob) -> AsyncIterator[AudioBlock]:
        async for block in super().speak(job):
            yield block._replace(samples=to_s16(block.samples)) if job.as_s16 else block


def test_a_request_allows_sixteen_bits_where_nothing_else_is_done(tiny_checkpoint: Path) -> None:
    plain, short = RampClient(), ShortClient()
    for values in (
        {"encoding": AudioEncoding.PCM_S16LE},
        {"encoding": AudioEncoding.WAV},
        {"encoding": AudioEncoding.PCM_S16LE, "gain_db": -6.0},
        {"encoding": AudioEncoding.PCM_F32LE},
    ):
        expected, got = (
            hear(build(client, tiny_checkpoint), TEXT, **values) for client in (plain, short)
        )
        assert got.data == expected.data
    steps = len(short.jobs) // 4
    assert [job.as_s16 for job in short.jobs[::steps]] == [True, True, False, False]
