"""What requests and families do to the samples: silence trimmed when asked, steady loudness."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from decoder import AudioEncoding, AudioFormat, LoudnessKeeper, SilenceTrimmer
from decoder.ramp import RampDecoder
from tests.tts.ramp import RATE, SEEDED, Heard, RampClient, build, hear, run
from tts.audio import AudioOutput, AudioShape
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
