"""Sample formats, resampling, speaking rate and streaming encoders: independent of the division."""

from __future__ import annotations

import struct
import wave
from collections.abc import Iterator
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.base import AudioFormatError
from decoder.pcm import (
    AudioEncoding,
    AudioFormat,
    Resampler,
    TimeStretcher,
    apply_patches,
    create_encoder,
    decode_samples,
    encode_samples,
    finalize_header,
    finalize_wav_header,
    gain_factor,
    resample,
    supported_encodings,
    to_s16,
)

RATE = 16_000
CONTAINERS = [AudioEncoding.WAV, AudioEncoding.FLAC, AudioEncoding.OGG_OPUS, AudioEncoding.MP3]
WRITABLE = [encoding for encoding in AudioEncoding if encoding in supported_encodings()]


def voiced(seconds: float, rate: int = RATE, seed: int = 0) -> np.ndarray:
    """Return a gliding harmonic tone with noise, as hard to splice as a vowel."""
    time = np.arange(round(seconds * rate)) / rate
    phase = 2 * np.pi * np.cumsum(130 + 40 * np.sin(2 * np.pi * 0.7 * time)) / rate
    tone = sum(np.sin(k * phase) / k for k in range(1, 12))
    noise = np.random.default_rng(seed).standard_normal(len(time))
    return (0.15 * tone + 0.002 * noise).astype(np.float32)


def pieces(samples: np.ndarray, cuts: list[int]) -> Iterator[np.ndarray]:
    """Iterate over the samples, cut into the given piece lengths in turn."""
    start, index = 0, 0
    while start < len(samples):
        end = start + cuts[index % len(cuts)]
        yield samples[start:end]
        start, index = end, index + 1


def encoded(audio_format: AudioFormat, samples: np.ndarray, cuts: list[int]) -> list[bytes]:
    encoder = create_encoder(audio_format)
    return [*(encoder.write(piece) for piece in pieces(samples, cuts)), encoder.finish()]


class ForwardOnly(soundfile.SoundFile):
    """A file without seeking, like a socket: python-soundfile otherwise seeks after every block."""

    def seekable(self) -> bool:
        return False


def decoded(data: bytes) -> np.ndarray:
    """Return all samples of a container, read block by block as by a player."""
    with ForwardOnly(BytesIO(data)) as file:
        parts = [np.zeros(0, np.float32)]
        while len(block := file.read(4096, dtype="float32")):
            parts.append(block)
    return np.concatenate(parts)


# --- formats


def test_s16_clamps_scales_and_rounds_half_to_even() -> None:
    samples = np.array([0, 1, -1, 2, -2, 0.5 / 32767, 1.5 / 32767, 2.5 / 32767], np.float32)
    assert to_s16(samples).tolist() == [0, 32767, -32767, 32767, -32767, 0, 2, 2]


def test_nan_becomes_silence_in_s16() -> None:
    assert to_s16(np.array([np.nan, np.inf, -np.inf], np.float32)).tolist() == [0, 32767, -32767]


def test_s16le_bytes_are_little_endian() -> None:
    assert encode_samples(np.array([1 / 32767], np.float32), AudioEncoding.PCM_S16LE) == b"\1\0"


def test_f32le_keeps_every_bit() -> None:
    samples = voiced(0.1) * 3
    data = encode_samples(samples, AudioEncoding.PCM_F32LE)
    assert np.array_equal(decode_samples(data, AudioEncoding.PCM_F32LE), samples)


@pytest.mark.parametrize(
    ("encoding", "subtype"), [(AudioEncoding.MULAW, "ULAW"), (AudioEncoding.ALAW, "ALAW")]
)
def test_g711_values_are_those_of_libsndfile(encoding: AudioEncoding, subtype: str) -> None:
    codes = bytes(range(256))
    theirs, _ = soundfile.read(
        BytesIO(codes), samplerate=8000, channels=1, format="RAW", subtype=subtype, dtype="int16"
    )
    ours = decode_samples(codes, encoding) * 32768
    assert ours.astype(np.int32).tolist() == theirs.tolist()


@pytest.mark.parametrize(
    ("encoding", "offset"), [(AudioEncoding.MULAW, 132), (AudioEncoding.ALAW, 256)]
)
def test_g711_errs_by_half_a_step_at_most(encoding: AudioEncoding, offset: int) -> None:
    pcm = np.arange(-32635, 32636)
    codes = encode_samples((pcm / 32767).astype(np.float32), encoding)
    values = decode_samples(codes, encoding) * 32768
    assert (np.abs(values - pcm) <= (np.abs(pcm) + offset) / 32 + 1).all()
    assert (np.diff(values) >= 0).all()
    assert len(set(codes)) >= 255  # mu-law has a second zero that no sample needs


@pytest.mark.parametrize(
    ("encoding", "zero", "highest", "lowest"),
    [(AudioEncoding.MULAW, 0xFF, 0x80, 0x00), (AudioEncoding.ALAW, 0xD5, 0xAA, 0x2A)],
)
def test_g711_landmarks(encoding: AudioEncoding, zero: int, highest: int, lowest: int) -> None:
    samples = np.array([0.0, 1.0, -1.0], np.float32)
    assert list(encode_samples(samples, encoding)) == [zero, highest, lowest]


def test_part_of_a_sample_is_refused() -> None:
    with pytest.raises(AudioFormatError, match="whole number of s16le"):
        decode_samples(b"\0\0\0", AudioEncoding.PCM_S16LE)
    with pytest.raises(AudioFormatError, match="container"):
        decode_samples(b"\0\0", AudioEncoding.WAV)


def test_gain_is_in_decibels() -> None:
    assert gain_factor(0.0) == 1.0
    assert gain_factor(20.0) == pytest.approx(10.0)
    assert gain_factor(-6.0206) == pytest.approx(0.5, rel=1e-4)


# --- resampling


@pytest.mark.parametrize("to_rate", [8_000, 11_025, 24_000, 44_100, 48_000])
@given(cuts=st.lists(st.integers(1, 3000), min_size=1, max_size=4))
@settings(max_examples=8)
def test_resampling_does_not_depend_on_the_cuts(to_rate: int, cuts: list[int]) -> None:
    samples = voiced(0.5)
    resampler = Resampler(RATE, to_rate)
    parts = [resampler.process(piece) for piece in pieces(samples, cuts)]
    streamed = np.concatenate([*parts, resampler.finish()])
    assert np.array_equal(streamed, resample(samples, RATE, to_rate))
    assert len(streamed) == int(len(samples) * to_rate / RATE + 0.5)


def test_resampling_keeps_the_tone() -> None:
    tone = np.sin(2 * np.pi * 1000 * np.arange(RATE) / RATE).astype(np.float32)
    there_and_back = resample(resample(tone, RATE, 24_000), 24_000, RATE)
    assert np.abs(there_and_back - tone)[500:-500].max() < 1e-3


def test_equal_rates_pass_through() -> None:
    samples = voiced(0.1)
    resampler = Resampler(RATE, RATE)
    assert resampler.process(samples) is samples
    assert len(resampler.finish()) == 0


def test_a_finished_resampler_can_be_reused() -> None:
    samples = voiced(0.3)
    resampler = Resampler(RATE, 24_000)
    first = np.concatenate([resampler.process(samples), resampler.finish()])
    second = np.concatenate([resampler.process(samples), resampler.finish()])
    assert np.array_equal(first, second)


# --- speaking rate


def stretched(samples: np.ndarray, rate: float, cuts: list[int]) -> np.ndarray:
    stretcher = TimeStretcher(rate, RATE)
    parts = [stretcher.process(piece) for piece in pieces(samples, cuts)]
    return np.concatenate([*parts, stretcher.finish()])


@given(
    rate=st.sampled_from([0.25, 0.7, 0.999, 1.3, 2.0, 4.0]),
    cuts=st.lists(st.integers(1, 2500), min_size=1, max_size=4),
)
@settings(max_examples=20)
def test_stretching_does_not_depend_on_the_cuts(rate: float, cuts: list[int]) -> None:
    samples = voiced(0.4)
    streamed = stretched(samples, rate, cuts)
    assert np.array_equal(streamed, stretched(samples, rate, [len(samples)]))
    assert len(streamed) == round(len(samples) / rate)


def test_rate_one_changes_no_bit() -> None:
    samples = voiced(0.2)
    assert np.array_equal(stretched(samples, 1.0, [333]), samples)


@pytest.mark.parametrize("rate", [0.25, 0.5, 0.8, 1.25, 2.0, 4.0])
def test_stretching_keeps_pitch_loudness_and_smoothness(rate: float) -> None:
    tone = 0.3 * np.sin(2 * np.pi * 200 * np.arange(2 * RATE) / RATE).astype(np.float32)
    fast = stretched(tone, rate, [1000])[400:-400]
    spectrum = np.abs(np.fft.rfft(fast * np.hanning(len(fast)))) ** 2
    frequencies = np.fft.rfftfreq(len(fast), 1 / RATE)
    near = np.abs(frequencies - 200) < 12
    assert spectrum[near].sum() / spectrum.sum() > 0.999
    speech = voiced(2.0)
    other = stretched(speech, rate, [1000])
    assert other.std() == pytest.approx(speech.std(), rel=0.05)
    assert np.abs(np.diff(other)).max() < 1.3 * np.abs(np.diff(speech)).max()


def test_stretching_holds_little_audio_back() -> None:
    stretcher = TimeStretcher(1.5, RATE)
    ready = sum(len(stretcher.process(piece)) for piece in pieces(voiced(3.0), [1600]))
    assert 3.0 / 1.5 - ready / RATE < 0.05


@pytest.mark.parametrize("rate", [0.2, 4.1, float("nan")])
def test_speaking_rates_out_of_range_are_refused(rate: float) -> None:
    with pytest.raises(AudioFormatError, match="speaking rate"):
        TimeStretcher(rate, RATE)


@pytest.mark.parametrize("count", [0, 1, 10, 500])
def test_very_short_audio_is_stretched_to_its_length(count: int) -> None:
    assert len(stretched(voiced(1.0)[:count], 0.5, [max(count, 1)])) == 2 * count


# --- encoders


@pytest.mark.parametrize("encoding", WRITABLE)
@pytest.mark.parametrize("cuts", [[960], [1, 4000, 37], [160]])
def test_chunks_put_together_are_the_one_shot_stream(
    encoding: AudioEncoding, cuts: list[int]
) -> None:
    samples, audio_format = voiced(1.1), AudioFormat(encoding, RATE)
    if encoding is AudioEncoding.OGG_OPUS:  # every stream gets a random serial number
        streamed, whole = encoded(audio_format, samples, cuts), encoded(audio_format, samples, [99])
        assert np.array_equal(decoded(b"".join(streamed)), decoded(b"".join(whole)))
        return
    streamed = encoded(audio_format, samples, cuts)
    assert b"".join(streamed) == b"".join(encoded(audio_format, samples, [len(samples)]))


def test_a_build_with_all_of_libsndfile_writes_everything() -> None:
    assert {*CONTAINERS, AudioEncoding.PCM_S16LE} <= set(supported_encodings())


@pytest.mark.parametrize("encoding", [AudioEncoding.WAV, AudioEncoding.FLAC])
def test_lossless_containers_hold_the_s16_samples(encoding: AudioEncoding) -> None:
    samples = voiced(0.7)
    data = b"".join(encoded(AudioFormat(encoding, RATE), samples, [700]))
    assert np.array_equal(decoded(data), to_s16(samples).astype(np.float32) / 32768)


@pytest.mark.parametrize("encoding", [AudioEncoding.OGG_OPUS, AudioEncoding.MP3])
def test_lossy_containers_sound_alike_and_keep_the_length(encoding: AudioEncoding) -> None:
    samples, encoder = voiced(1.0), create_encoder(AudioFormat(encoding, RATE))
    data = encoder.write(samples) + encoder.finish()
    heard = decoded(apply_patches(data, encoder.patches))
    assert len(heard) == len(samples)
    assert np.corrcoef(heard, samples)[0, 1] > 0.98


@pytest.mark.parametrize("encoding", CONTAINERS)
def test_bytes_leave_while_samples_come_in(encoding: AudioEncoding) -> None:
    chunks = encoded(AudioFormat(encoding, RATE), voiced(3.0), [4000])
    assert len(chunks[0]) > 0
    sizes = [len(chunk) for chunk in chunks[1:-1]]
    assert min(map(sum, pairwise(sizes))) > 0  # no data are held for half a second


@pytest.mark.parametrize("encoding", [e for e in WRITABLE if e.is_raw])
def test_a_raw_stream_without_samples_is_empty(encoding: AudioEncoding) -> None:
    assert create_encoder(AudioFormat(encoding, RATE)).finish() == b""


@pytest.mark.parametrize(("encoding", "count"), [*zip(CONTAINERS, [0, 1, 1, 1], strict=True)])
def test_a_container_without_samples_is_valid(encoding: AudioEncoding, count: int) -> None:
    encoder = create_encoder(AudioFormat(encoding, RATE))
    output = encoder.finish()
    assert len(decoded(apply_patches(output, encoder.patches))) == count


def test_the_wav_header_is_written_once_with_unknown_sizes() -> None:
    chunks = encoded(AudioFormat(AudioEncoding.WAV, 24_000), voiced(0.5), [1000])
    assert chunks[0][:4] == b"RIFF"
    assert struct.unpack("<I", chunks[0][40:44]) == (0xFFFFFFFF,)
    assert [len(chunk) for chunk in chunks[1:-1]] == [2000] * 7
    with wave.open(BytesIO(b"".join(chunks))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        assert len(file.readframes(10_000)) == 16_000


@pytest.mark.parametrize("encoding", CONTAINERS)
def test_patches_make_a_finished_stream_state_its_length(encoding: AudioEncoding) -> None:
    samples, encoder = voiced(0.5), create_encoder(AudioFormat(encoding, RATE))
    output = encoder.write(samples) + encoder.finish()
    info = soundfile.info(BytesIO(apply_patches(output, encoder.patches)))
    assert info.frames == len(samples)


@pytest.mark.parametrize("encoding", [AudioEncoding.WAV, AudioEncoding.FLAC])
def test_a_streamed_file_on_disk_is_finalized(encoding: AudioEncoding, tmp_path: Path) -> None:
    samples, path = voiced(0.5), tmp_path / "speech"
    path.write_bytes(b"".join(encoded(AudioFormat(encoding, RATE), samples, [800])))
    with path.open("r+b") as file:
        finalize_header(file, len(samples))
    heard, rate = soundfile.read(path, dtype="int16")
    assert rate == RATE
    assert np.array_equal(heard, to_s16(samples))


def test_an_interrupted_wav_file_is_finalized(tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    encoder = create_encoder(AudioFormat(AudioEncoding.WAV, RATE))
    path.write_bytes(encoder.write(voiced(0.25)))
    with path.open("r+b") as file:
        finalize_wav_header(file)
    with wave.open(str(path)) as wav:
        assert wav.getnframes() == 4000
    with pytest.raises(AudioFormatError, match="not a RIFF file"):
        finalize_wav_header(BytesIO(b"OggS"))


@pytest.mark.parametrize(
    ("encoding", "rate", "message"),
    [
        (AudioEncoding.OGG_OPUS, 22_050, "8000, 12000, 16000, 24000, 48000"),
        (AudioEncoding.MP3, 96_000, "mp3 has no 96000 Hz"),
        (AudioEncoding.WAV, 0, "outside 8000..192000"),
        (AudioEncoding.PCM_S16LE, 400_000, "outside 8000..192000"),
    ],
)
def test_rates_that_cannot_be_written_name_those_that_can(
    encoding: AudioEncoding, rate: int, message: str
) -> None:
    with pytest.raises(AudioFormatError, match=message):
        create_encoder(AudioFormat(encoding, rate))


def test_output_is_mono() -> None:
    with pytest.raises(AudioFormatError, match="mono"):
        create_encoder(AudioFormat(AudioEncoding.WAV, RATE, channels=2))


@pytest.mark.parametrize("rate", [8_000, 12_000, 16_000, 24_000, 48_000])
def test_opus_at_all_its_rates(rate: int) -> None:
    samples = voiced(0.4, rate)
    data = b"".join(encoded(AudioFormat(AudioEncoding.OGG_OPUS, rate), samples, [1000]))
    assert soundfile.info(BytesIO(data)).samplerate == rate
    assert len(decoded(data)) == len(samples)
