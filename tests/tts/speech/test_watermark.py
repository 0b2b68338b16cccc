"""A watermark of all audio: what it leaves as it is, and what is reported without its packages.

The function here stands for the library, which `tests/clients/test_watermark.py` runs.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from decoder import AudioEncoding, Watermark
from llm import ConfigError
from tests.tts.ramp import SEEDED, TEXT, RampClient, build, collect_speech, run
from tts import serve
from tts.config.pipeline import AudioGenerationConfig
from tts.factory import Service
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import (
    AudioChunk,
    SamplingOverrides,
    SpeechRequest,
    SynthesizedSpeech,
    TimestampGranularity,
)
from tts.speech.watermark import load_watermark


def louder(clip: np.ndarray) -> np.ndarray:
    """Return the clip by a tenth louder, in whole hops; at the end of a clip by two tenths."""
    clip = clip[: len(clip) // 320 * 320]
    gain = np.full(len(clip), 1.1, dtype=np.float32)
    gain[-4_800:] = 1.2
    return clip * gain


MARK = Watermark(louder, 32_000)


@pytest.fixture
def plain(client: RampClient, tiny_checkpoint: Path) -> Synthesizer:
    return build(client, tiny_checkpoint)


@pytest.fixture
def marked(client: RampClient, tiny_checkpoint: Path) -> Synthesizer:
    return build(client, tiny_checkpoint, watermark=MARK)


@pytest.mark.parametrize("encoding", [AudioEncoding.PCM_S16LE, AudioEncoding.PCM_F32LE])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"sample_rate": 8_000},
        {"speaking_rate": 0.5, "gain_db": -6.0},
        {"trim_silence": True},
    ],
)
def test_numbers_of_samples_and_times_are_as_without(
    plain: Synthesizer, marked: Synthesizer, encoding: AudioEncoding, values: dict[str, float]
) -> None:
    request = SpeechRequest(
        TEXT,
        sampling=SEEDED,
        encoding=encoding,
        timestamps=TimestampGranularity.SEGMENT,
        **values,
    )
    without, found = run(plain.synthesize(request)), run(marked.synthesize(request))
    assert found.audio != without.audio
    assert len(found.audio) == len(without.audio)
    assert found.segments == without.segments
    assert total(found) == total(without)
    for chunk, last in zip(found.chunks[1:], found.chunks, strict=False):
        assert chunk.sample_offset == last.sample_offset + last.sample_count


def total(speech: SynthesizedSpeech) -> int:
    return sum(chunk.sample_count for chunk in speech.chunks)


def test_the_first_audio_has_as_many_samples(plain: Synthesizer, marked: Synthesizer) -> None:
    """Nothing is held back."""
    values = {"encoding": AudioEncoding.PCM_F32LE}
    first, without = (collect_speech(s, TEXT, **values).chunks[0] for s in (marked, plain))
    assert first.sample_count == without.sample_count > 0
    assert len(first.data) == len(without.data)


def test_a_level_is_changed_in_all_audio(plain: Synthesizer, marked: Synthesizer) -> None:
    values = {"encoding": AudioEncoding.PCM_F32LE}
    samples, without = (
        np.frombuffer(collect_speech(s, TEXT, **values).data, "<f4") for s in (marked, plain)
    )
    half = len(samples) // 2
    for part in (slice(half), slice(half, None)):
        ratio = np.linalg.norm(samples[part]) / np.linalg.norm(without[part])
        assert 1.02 < ratio < 1.2


def test_the_same_bytes_streamed_unary_in_a_session_and_among_others(
    tiny_service: Service,
) -> None:
    own = tiny_service.synthesizer
    assert own is not None
    marked = Synthesizer(
        tiny_service.client,
        tiny_service.prompts,
        own.voices,
        replace(own.settings, watermark=MARK),
    )

    def request(seed: int) -> SpeechRequest:
        return SpeechRequest(TEXT, sampling=SamplingOverrides(seed=seed, max_tokens=120))

    async def streamed(seed: int) -> bytes:
        events = marked.stream(request(seed))
        return b"".join([event.data async for event in events if isinstance(event, AudioChunk)])

    async def fed(seed: int) -> bytes:
        session = marked.open_session(replace(request(seed), text=""))
        session.feed(TEXT)
        session.close()
        events = session.events()
        return b"".join([event.data async for event in events if isinstance(event, AudioChunk)])

    async def all_ways() -> None:
        alone = [(await marked.synthesize(request(seed))).audio for seed in range(4)]
        together = await asyncio.gather(*map(streamed, range(4)), *map(fed, range(4)))
        assert together == alone + alone
        assert len(set(alone)) == 4
        assert alone[0] != (await own.synthesize(request(0))).audio

    run(all_ways())


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "perth"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perth", None)


@pytest.mark.usefixtures("without_packages")
def test_missing_packages_are_named_with_their_extra() -> None:
    extra = r"pip install 'sonant\[watermark\]'"
    with pytest.raises(ConfigError, match=f"^watermark needs the packages perth.*{extra}$"):
        AudioGenerationConfig(audio_decoder="embedded", watermark=True)
    with pytest.raises(ConfigError, match=f"^watermark cannot be loaded: .*{extra}$"):
        load_watermark()


@pytest.mark.usefixtures("without_packages")
def test_a_server_without_the_packages_ends_with_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert serve.main(["--watermark", "--port", "0"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("serve: watermark needs the packages perth")
