"""Untrusted reference clips: accepted formats, and error messages."""

from __future__ import annotations

import struct
from io import BytesIO

import numpy as np
import pytest
import soundfile

from decoder.base import AudioFormatError
from decoder.pcm import (
    AudioEncoding,
    AudioFormat,
    PromptAudioLimits,
    encode_samples,
    read_prompt_audio,
)

RATE = 16_000


def tone(seconds: float, rate: int = RATE) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * 220 * np.arange(round(seconds * rate)) / rate)).astype("f4")


def packed(
    samples: np.ndarray, rate: int = RATE, container: str = "WAV", subtype: str | None = None
) -> bytes:
    file = BytesIO()
    soundfile.write(file, samples, rate, format=container, subtype=subtype)
    return file.getvalue()


def flac_that_states(num_samples: int, seconds: float = 2.0) -> bytes:
    data = bytearray(packed(tone(seconds), container="FLAC"))
    fields = int.from_bytes(data[18:26], "big") >> 36 << 36
    data[18:26] = (fields | num_samples).to_bytes(8, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("container", "subtype"),
    [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "ULAW"), ("WAVEX", "PCM_24"), ("FLAC", None)],
)
def test_containers_are_read_to_the_target_rate(container: str, subtype: str | None) -> None:
    clip = read_prompt_audio(packed(tone(2.0, 24_000), 24_000, container, subtype), RATE)
    assert clip.dtype == np.float32
    assert clip.shape == (32_000,)
    assert np.abs(clip - tone(2.0))[500:-500].max() < 0.02


@pytest.mark.parametrize("subtype", ["OPUS", "VORBIS"])
def test_ogg_is_read(subtype: str) -> None:
    clip = read_prompt_audio(packed(tone(1.5), RATE, "OGG", subtype), RATE)
    assert len(clip) == 24_000
    assert np.corrcoef(clip, tone(1.5))[0, 1] > 0.95


def test_stereo_becomes_mono_and_too_loud_is_scaled_down() -> None:
    stereo = np.stack([tone(1.0) * 8, np.zeros(RATE, np.float32)], axis=1)
    clip = read_prompt_audio(packed(stereo, subtype="FLOAT"), RATE)
    assert clip.shape == (RATE,)
    assert np.abs(clip).max() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "encoding", [AudioEncoding.PCM_S16LE, AudioEncoding.PCM_F32LE, AudioEncoding.MULAW]
)
def test_headerless_samples_need_their_format(encoding: AudioEncoding) -> None:
    data = encode_samples(tone(1.2, 8_000), encoding)
    clip = read_prompt_audio(data, RATE, AudioFormat(encoding, 8_000))
    assert len(clip) == 19_200
    with pytest.raises(AudioFormatError, match="not a WAV, FLAC or Ogg file"):
        read_prompt_audio(data, RATE)


def test_a_container_may_come_with_its_format_stated() -> None:
    clip = read_prompt_audio(packed(tone(1.0)), RATE, AudioFormat(AudioEncoding.WAV, RATE))
    assert len(clip) == RATE


def test_a_streamed_wav_of_unknown_length_is_read() -> None:
    data = bytearray(packed(tone(1.0)))
    data[4:8] = data[40:44] = b"\xff\xff\xff\xff"
    assert len(read_prompt_audio(bytes(data), RATE)) == RATE


def test_a_flac_of_unknown_length_is_read() -> None:
    assert len(read_prompt_audio(flac_that_states(0), RATE)) == 2 * RATE


def test_a_flac_of_unknown_length_is_read_no_further_than_the_cap() -> None:
    with pytest.raises(AudioFormatError, match="more than 1 s"):
        read_prompt_audio(flac_that_states(0), RATE, limits=PromptAudioLimits(max_s=1.0))


def test_ten_minutes_are_refused_by_the_header_alone() -> None:
    header = packed(np.zeros(600 * 8_000, np.float32), 8_000, "FLAC")[:200]
    with pytest.raises(AudioFormatError, match="lasts more than 30 s"):
        read_prompt_audio(header, RATE)


def wav_of(rate: int, channels: int, frames: int = RATE) -> bytes:
    body = b"\x01\x10" * channels * frames
    fmt = struct.pack("<IHHIIHH", 16, 1, channels, rate, rate * 2, 2 * channels, 16)
    data = b"WAVEfmt " + fmt + b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(data)) + data


def with_nan() -> bytes:
    samples = tone(1.0)
    samples[77] = np.nan
    return packed(samples, subtype="FLOAT")


BAD_CLIPS = {
    "empty": (b"", "empty"),
    "not audio": (b"hello, this is text" * 100, "not a WAV, FLAC or Ogg file"),
    "too many bytes": (bytes(11 * 1024 * 1024), "a clip may have 10485760"),
    "only a header": (wav_of(RATE, 1, 0), "no samples"),
    "too short": (packed(tone(0.5)), "lasts 0.50 s; at least 1 s"),
    "too long": (packed(tone(31.0, 8_000), 8_000), "more than 30 s"),
    "low rate": (wav_of(4_000, 1), "sample rate 4000 Hz"),
    "high rate": (wav_of(400_000, 1, 800_000), "sample rate 400000 Hz"),
    "six channels": (wav_of(RATE, 6), "6 channels"),
    "a forged length": (flac_that_states(10**10), "more than 30 s"),
    "a length that is not there": (flac_that_states(5 * RATE), "header states 80000 samples"),
    "adpcm": (packed(tone(2.0), subtype="IMA_ADPCM"), "IMA_ADPCM samples is not accepted"),
    "nan": (with_nan(), "not finite"),
    "silence": (packed(np.zeros(RATE, np.float32)), "silent"),
    "damaged": (b"fLaC" + b"\x80" * 500, "cannot be read"),
    "ogg of nothing": (b"OggS" + bytes(500), "cannot be read"),
}


@pytest.mark.parametrize("name", BAD_CLIPS)
def test_bad_clips_are_refused_with_the_reason(name: str) -> None:
    data, message = BAD_CLIPS[name]
    with pytest.raises(AudioFormatError, match=message):
        read_prompt_audio(data, RATE)


@pytest.mark.parametrize(
    ("audio_format", "message"),
    [
        (AudioFormat(AudioEncoding.PCM_S16LE, 0), "sample rate 0 Hz"),
        (AudioFormat(AudioEncoding.PCM_S16LE, RATE, channels=3), "3 channels"),
        (AudioFormat(AudioEncoding.PCM_F32LE, RATE), "not whole f32le"),
        (AudioFormat(AudioEncoding.PCM_S16LE, RATE), "at least 1 s"),
    ],
)
def test_bad_headerless_clips_are_refused(audio_format: AudioFormat, message: str) -> None:
    with pytest.raises(AudioFormatError, match=message):
        read_prompt_audio(b"\1\2" * 4001, RATE, audio_format)


def test_an_mp3_is_not_among_the_accepted_containers() -> None:
    if not soundfile.check_format("MP3", "MPEG_LAYER_III"):
        pytest.skip("this libsndfile writes no MP3")
    with pytest.raises(AudioFormatError, match="not a WAV, FLAC or Ogg file"):
        read_prompt_audio(packed(tone(2.0), container="MP3"), RATE)


def test_the_loudest_samples_are_read() -> None:
    """Their sum over the channels exceeds float32."""
    loud = np.full((2 * RATE, 2), np.finfo("f4").max, "f4")
    loud[::2] *= -0.5
    clip = read_prompt_audio(packed(loud, subtype="FLOAT"), RATE)
    assert np.abs(clip).max() == 1.0
    assert clip[0] == -0.5
