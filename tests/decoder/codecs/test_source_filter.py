"""The source-filter codec: streams against the whole network, batches, voices, files, errors."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from decoder import (
    AttentionKind,
    AudioFormatError,
    CodeRangeError,
    DecoderConfigError,
    DecodeRequest,
    DecoderStream,
    DecodeWindow,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
    StreamState,
    create_decoder,
    render,
    validate_streaming,
    with_graphs,
)
from decoder.codecs.source_filter.decoder import SourceFilterDecoder
from decoder.codecs.source_filter.modules import SpeechCodec
from tests.decoder.small_codecs import SMALL_SOURCE_FILTER, write_source_filter
from tests.decoder.toys import windows_of

VOICE = (1, 20, 63, 7)
ROLLING = PrependPromptSpeechTokens.ROLLING
AT_ONCE = StreamingOptions(prepend=ROLLING)
MAX_ERROR = 1e-4
"""Error of full scale: float32 pitches of a block and of the whole differ in the last digit, and
the phase of the pulses adds them up."""


def close(got: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether samples are the same but for rounding.

    The number of a pulse's harmonics is whole: where rounding changes it, by 1 and for one sample,
    the window of a spectrum differs by some thousandths. One such window is more than the mean of
    three codes may be, so that the error is limited over at least a second.
    """
    off = np.abs(got - expected)
    limit = MAX_ERROR / 4 * max(off.size, SMALL_SOURCE_FILTER.sample_rate)
    return got.shape == expected.shape and bool(off.max() < 5e-3 and off.sum() < limit)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SpeechCodec]:
    folder = tmp_path_factory.mktemp("codec")
    return folder, write_source_filter(folder)


@pytest.fixture(scope="module")
def written(checkpoint: tuple[Path, SpeechCodec]) -> Path:
    return checkpoint[0]


@pytest.fixture(scope="module")
def network(checkpoint: tuple[Path, SpeechCodec]) -> SpeechCodec:
    return checkpoint[1]


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may modify."""
    return Path(shutil.copytree(written, tmp_path / "codec"))


@pytest.fixture(scope="module")
def decoder(written: Path) -> SourceFilterDecoder:
    found = create_decoder(written)
    assert isinstance(found, SourceFilterDecoder)
    return found


def some_codes(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, count).tolist()


@torch.inference_mode()
def whole(network: SpeechCodec, codes: Sequence[int], voice: Sequence[int] = VOICE) -> np.ndarray:
    return network.decode(torch.tensor([codes]), torch.tensor([voice]))[0].numpy()


def blocks_of(decoder: SourceFilterDecoder, windows: Sequence[DecodeWindow]) -> list[np.ndarray]:
    """Render a stream block by block."""
    state = StreamState()
    return [render(decoder, [DecodeRequest(window, state)])[0] for window in windows]


def streamed(
    decoder: SourceFilterDecoder, codes: Sequence[int], sizes: tuple[int, ...], buffer: int = 0
) -> np.ndarray:
    options = StreamingOptions(sizes, buffer, prepend=ROLLING, look_ahead=SMALL_SOURCE_FILTER.ahead)
    windows = windows_of(decoder.spec, options, codes, prompt_codes=VOICE)
    return np.concatenate(blocks_of(decoder, windows))


def test_the_spec_equals_the_files(decoder: SourceFilterDecoder) -> None:
    spec = decoder.spec
    assert (spec.name, spec.sample_rate, spec.samples_per_code) == ("source_filter", 24_000, 960)
    assert (spec.codes_per_second, spec.codebook_size, spec.num_codebooks) == (25.0, 64, 1)
    assert (spec.receptive_field, spec.right_field, spec.voice_codes) == (10, 2, 4)
    assert spec.attention is AttentionKind.NONE
    assert spec.can_encode
    assert spec.keeps_state
    assert spec.recommended.prepend is ROLLING
    assert spec.recommended.look_ahead == SMALL_SOURCE_FILTER.ahead
    assert validate_streaming(spec.recommended, spec) == []


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 63), min_size=1, max_size=40),
    st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    st.integers(0, 12),
)
def test_streamed_audio_equals_the_whole(decoder, network, codes, sizes, buffer) -> None:
    got = streamed(decoder, codes, sizes, buffer)
    assert got.shape == (len(codes) * SMALL_SOURCE_FILTER.hop,)
    assert close(got, whole(network, codes))


def test_a_long_stream_equals_the_whole(decoder, network) -> None:
    codes = some_codes(500)
    expected = whole(network, codes)
    assert expected.std() > 0.005
    assert close(streamed(decoder, codes, (3, 7, 20)), expected)


def test_a_block_alone_is_the_beginning_of_a_stream(decoder, network) -> None:
    codes = some_codes(12)
    (window,) = windows_of(decoder.spec, AT_ONCE, codes, prompt_codes=VOICE)
    assert np.abs(render(decoder, [DecodeRequest(window)])[0] - whole(network, codes)).max() < 2e-5


def test_a_continued_stream_begins_with_its_carry(decoder, network) -> None:
    carry, codes = some_codes(6, 1), some_codes(9, 2)
    options = StreamingOptions((4,), 6, prepend=ROLLING, look_ahead=2)
    windows = windows_of(
        decoder.spec, options, codes, prompt_codes=VOICE, carry=carry, token_offset=6
    )
    got = np.concatenate(blocks_of(decoder, windows))
    expected = whole(network, carry + codes)[6 * SMALL_SOURCE_FILTER.hop :]
    assert close(got, expected)


@pytest.mark.parametrize("offset", [0, 1, 1000])
def test_noise_is_that_of_the_place_in_the_stream(decoder, network, offset) -> None:
    options, codes = StreamingOptions((9,), prepend=ROLLING), [0] * 9
    start = {"prompt_codes": VOICE, "carry": (), "token_offset": offset}
    (got,) = blocks_of(decoder, windows_of(decoder.spec, options, codes, **start))
    expected = whole(network, codes)
    assert close(got, expected) == (offset % 100 == 0)  # it repeats after 4 s


def test_other_streams_of_a_call_change_no_bit(decoder) -> None:
    options = StreamingOptions((2, 5), 3, prepend=ROLLING, look_ahead=2)
    streams = [
        windows_of(
            decoder.spec,
            options,
            some_codes(9 + seed, seed),
            prompt_codes=some_codes(4, 9),
            pitch=3.0 * (seed % 2),
        )
        for seed in range(4)
    ]
    alone = [np.concatenate(blocks_of(decoder, windows)) for windows in streams]
    states = [StreamState() for _ in streams]
    together = render(
        decoder,
        [
            DecodeRequest(window, state)
            for windows, state in zip(streams, states, strict=True)
            for window in windows
        ],
    )
    place = 0
    for windows, expected in zip(streams, alone, strict=True):
        own = np.concatenate(together[place : place + len(windows)])
        place += len(windows)
        assert np.array_equal(own, expected)


def test_streams_at_any_place_share_a_row_of_networks(decoder) -> None:
    """The path of CUDA devices, on the host: rows of different lengths, new and continued."""
    options = StreamingOptions((2, 7, 4), 5, prepend=ROLLING, look_ahead=2)
    first, second, third = (
        windows_of(
            decoder.spec,
            options,
            some_codes(20, seed),
            prompt_codes=some_codes(4, seed),
            pitch=-5.0 * seed,
        )
        for seed in range(3)
    )
    starts = {"carry": some_codes(5, 8), "token_offset": 5, "prompt_codes": VOICE}
    fourth = windows_of(decoder.spec, options, some_codes(1, 7), **starts)
    (_, (after_first,)) = decoder.decode_next([first[0]], [None])
    (_, after_second) = decoder.decode_next(second[:1], [None])
    (_, (after_second,)) = decoder.decode_next([second[1]], after_second)
    windows = [first[1], second[2], third[0], fourth[0]]
    states = [after_first, after_second, None, None]
    lines = list(map(decoder._line, windows, states))
    with torch.inference_mode():
        rows, past = decoder._rendered(lines, states)
    assert len({len(line.codes) for line in lines}) == 4
    for index, (window, state) in enumerate(zip(windows, states, strict=True)):
        (expected, (kept,)) = decoder.decode_next([window], [state])
        assert close(rows[index, : expected.shape[1]].numpy(), expected[0].numpy())
        own, alone = past.row(index), kept.past
        assert torch.allclose(own.frames, alone.frames, atol=1e-5)
        assert torch.allclose(own.tones, alone.tones, rtol=1e-5)
        assert close(own.pieces.numpy(), alone.pieces.numpy())
        off = own.turns - alone.turns
        assert float((off - off.round()).abs()) < 1e-5
        assert not own.is_new


@settings(max_examples=10)
@given(st.floats(-12, 12), st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple))
def test_a_streams_pitch_is_moved_and_its_voicing_stays(decoder, pitch, sizes) -> None:
    codes = some_codes(20)
    plain, whole_window = (
        windows_of(decoder.spec, AT_ONCE, codes, prompt_codes=VOICE, pitch=moved)[0]
        for moved in (0.0, pitch)
    )
    rows, kept = decoder.decode_next([plain, whole_window], [None, None])
    expected = rows[1, : len(codes) * SMALL_SOURCE_FILTER.hop].numpy()
    options = StreamingOptions(sizes, prepend=ROLLING, look_ahead=SMALL_SOURCE_FILTER.ahead)
    windows = windows_of(decoder.spec, options, codes, prompt_codes=VOICE, pitch=pitch)
    assert close(np.concatenate(blocks_of(decoder, windows)), expected)
    (hz, voiced), (moved_hz, moved_voiced) = (state.past.tones[0].T for state in kept)
    assert torch.allclose(moved_hz, hz * 2 ** (pitch / 12), rtol=1e-6)
    assert torch.equal(moved_voiced, voiced)


def test_a_codec_without_a_pitch_refuses_another_one() -> None:
    plain = create_decoder("snac", test_mode=True)
    with pytest.raises(DecoderConfigError, match="'snac' cannot change the pitch"):
        DecoderStream(plain.spec, StreamingOptions(), pitch=1.0)


def test_a_failed_call_leaves_the_states_as_they_were(decoder) -> None:
    options = StreamingOptions((2,), prepend=ROLLING)
    first, second = windows_of(decoder.spec, options, some_codes(4), prompt_codes=VOICE)
    state = StreamState()
    with pytest.raises(DecoderConfigError, match=r"position 0 does not follow .* which is at 2"):
        render(decoder, [DecodeRequest(first, state), DecodeRequest(first, state)])
    assert state == StreamState()
    render(decoder, [DecodeRequest(window, state) for window in (first, second)])
    assert state.kept.next_position == 4


def test_another_voice_gives_other_samples(decoder, network) -> None:
    codes, other = some_codes(5), (0, 0, 0, 0)
    (window,) = windows_of(decoder.spec, AT_ONCE, codes, prompt_codes=other)
    got = render(decoder, [DecodeRequest(window)])[0]
    assert np.allclose(got, whole(network, codes, other), atol=1e-5)
    assert not np.allclose(got, whole(network, codes), atol=1e-3)


def test_a_voice_stands_in_front_of_every_window(decoder) -> None:
    options = StreamingOptions((3,), 2, prepend=ROLLING)
    windows = windows_of(decoder.spec, options, some_codes(9), prompt_codes=VOICE, carry=(5, 6))
    assert [window.codes[:4] for window in windows] == [VOICE] * 3
    assert [(window.prompt_len, window.history_len) for window in windows] == [(4, 2)] * 3
    for count in (0, 3):
        with pytest.raises(CodeRangeError, match=f"voice prompt of 4 codes, not {count}"):
            DecoderStream(decoder.spec, options, prompt_codes=VOICE[:count])
    plain = DecodeWindow((1,), (0,), (0,), 0, 0, MaskPolicy(), 0, 0, SMALL_SOURCE_FILTER.hop)
    with pytest.raises(DecoderConfigError, match="a voice of 4 codes in front of every window"):
        decoder.decode([plain])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (StreamingOptions((3,), 2), "must be 'rolling'"),
        (StreamingOptions((3,), 2, prepend=PrependPromptSpeechTokens.ONCE), "must be 'rolling'"),
        (StreamingOptions((3,), 2, MaskPolicy(block_causal=True), ROLLING), "attention masks"),
    ],
)
def test_streams_that_it_cannot_render(decoder, options, message) -> None:
    with pytest.raises(DecoderConfigError, match=message):
        validate_streaming(options, decoder.spec)


def test_no_buffer_is_needed(decoder) -> None:
    options = StreamingOptions((2,), prepend=ROLLING, look_ahead=2)
    assert validate_streaming(options, decoder.spec) == []
    assert with_graphs(decoder, options) is decoder


@pytest.mark.parametrize("num_samples", [1, 959, 24_000, 100_000])
def test_a_clips_voice_is_that_of_the_network(decoder, network, num_samples) -> None:
    clip = np.random.default_rng(0).normal(0, 0.1, num_samples).astype(np.float32)
    codes = decoder.encode(clip)
    assert len(codes) == SMALL_SOURCE_FILTER.voice_tokens
    assert codes == decoder.encode(clip)
    if num_samples > 2 * SMALL_SOURCE_FILTER.mel_n_fft:
        frames = num_samples // SMALL_SOURCE_FILTER.frame * SMALL_SOURCE_FILTER.frame
        with torch.inference_mode():
            expected = network.voice(torch.from_numpy(clip[None, :frames]))[1]
        assert codes == tuple(expected[0].tolist())


def test_clips_of_other_voices_have_other_codes(decoder) -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, 48_000).astype(np.float32)
    hum = np.sin(np.arange(48_000) * 0.05).astype(np.float32)
    assert decoder.encode(noise) != decoder.encode(hum)


def test_a_clips_voice_does_not_depend_on_what_is_too_faint_to_be_heard(network) -> None:
    rng, size = np.random.default_rng(0), 48_000
    spectrum = np.fft.rfft(rng.normal(0, 0.1, size))
    spectrum[len(spectrum) // 3 :] = 0  # a file of 8 kHz
    narrow = np.fft.irfft(spectrum)
    faint, audible = (rng.normal(0, 0.1 * share, size) for share in (3e-4, 3e-2))
    clips = torch.from_numpy(np.stack((narrow, narrow + faint, narrow + audible))).float()
    with torch.inference_mode():
        own, same, other = network.voice_encoder(network.mel(clips))
    assert float((same - own).abs().max()) < 0.01 * float((other - own).abs().max())


@pytest.mark.parametrize("samples", [np.zeros(0), np.zeros((2, 700)), np.array([0.0, np.nan])])
def test_clips_that_cannot_be_encoded(decoder, samples) -> None:
    with pytest.raises(AudioFormatError):
        decoder.encode(samples)


def test_weights_may_be_stored_in_8_bits(folder: Path, network) -> None:
    path = folder / "model.safetensors"
    weights, rounded = load_file(path), copy.deepcopy(network)
    for name in ("decoder.blocks.0.ff_in.weight", "decoder.input.weight"):
        value = weights.pop(name)
        scale = (value.flatten(1).abs().amax(1) / 127).half()
        per_row = scale.float().view(-1, *(1,) * (value.dim() - 1))
        weights[name] = (value / per_row).round().to(torch.int8)
        weights[f"{name}:scale"] = scale
        with torch.no_grad():
            rounded.get_parameter(name).copy_(weights[name] * per_row)
    save_file(weights, path)
    found, codes = create_decoder(folder), some_codes(8)
    assert isinstance(found, SourceFilterDecoder)
    got = streamed(found, codes, (8,))
    assert close(got, whole(rounded, codes))
    assert not close(got, whole(network, codes))


def test_a_codec_may_have_no_encoder_of_voices(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({n: w for n, w in load_file(path).items() if n.startswith("decoder.")}, path)
    found = create_decoder(folder)
    assert not found.spec.can_encode
    with pytest.raises(DecoderConfigError, match="no encoder of voices"):
        found.encode(np.zeros(30_000, np.float32))


def test_scales_that_do_not_fit_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["decoder.input.weight"] = weights["decoder.input.weight"].to(torch.int8)
    weights["decoder.input.weight:scale"] = torch.ones(3)
    save_file(weights, path)
    with pytest.raises(DecoderConfigError, match=r"model\.safetensors.*size of tensor"):
        create_decoder(folder)


def test_a_clip_shorter_than_a_frame_is_filled_up(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "mel_n_fft": 40, "mel_bins": 20}))
    with pytest.warns(UserWarning, match="mel filterbank has all zero values"):
        assert len(create_decoder(folder).encode(np.full(100, 0.1, np.float32))) == len(VOICE)


@pytest.mark.parametrize("change", ["missing", "surplus", "shape"])
def test_weights_that_do_not_fit_are_named(folder: Path, change: str) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    if change == "missing":
        del weights["decoder.spectra.bias"]
    else:
        name = "decoder.extra" if change == "surplus" else "decoder.spectra.bias"
        weights[name] = torch.zeros(1)
    save_file(weights, path)
    with pytest.raises(DecoderConfigError, match=r"model\.safetensors.*(spectra\.bias|extra)"):
        create_decoder(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hop": 320}, "hop is 320 but the sizes give 960"),
        ({"n_fft": 500}, "n_fft must be even and a multiple of stft_hop"),
        ({"voice_dim": 200}, "voice_dim must be a multiple"),
        ({"codebooks": 2}, "codebooks is 2"),
        ({"decoder_blocks": 300}, "too large"),
        ({"decoder_dim": 1 << 20}, "too large"),
        ({"levels": [4, 0]}, "levels"),
        ({"levels": [4, 1]}, "levels must be 2 or more each"),
        ({"levels": [1 << 40]}, "at most 1048576 multiplied"),
        ({"levels": [2] * 10_000}, "at most 1048576 multiplied"),
        ({"sample_rate": 1000}, r"sample_rate must be in \[8000, 192000\]"),
        ({"sample_rate": 200_000_000}, "sample_rate must be in"),
        ({"frames_per_code": 1 << 16, "decoder_dim": 1}, "hop is 31457280 samples, more than a s"),
        ({"n_fft": 240 << 10, "decoder_dim": 1}, "n_fft is 245760 samples, more than a second"),
        ({"mel_n_fft": 1 << 27, "mel_bins": 1}, "mel_n_fft is 134217728 samples"),
        ({"kernel": 1 << 20, "decoder_dim": 1, "voice_dim": 512}, "too large"),
    ],
)
def test_a_config_that_cannot_work(folder: Path, changes: dict[str, object], message: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(DecoderConfigError, match=message):
        create_decoder(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_rate_hz": 50}, "token_rate_hz is 50"),
        ({"look_ahead": 1}, "does not support 'look_ahead'"),
        ({"stateful": True}, "does not support 'stateful'"),
        ({"crossfade_ms": 5}, "does not support 'crossfade_ms'"),
    ],
)
def test_options_it_does_not_take(written: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(DecoderConfigError, match=message):
        create_decoder(written, options=options)


def test_without_weights_only_the_test_mode_starts(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(DecoderConfigError, match="needs weights"):
        create_decoder(folder)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = (create_decoder(folder, test_mode=True) for _ in range(2))
    clip = np.random.default_rng(0).normal(0, 0.1, 9000).astype(np.float32)
    assert first.encode(clip) == second.encode(clip)
    assert torch.equal(torch.rand(3), expected)
    (window,) = windows_of(first.spec, AT_ONCE, some_codes(3), prompt_codes=VOICE)
    assert torch.equal(first.decode([window]), second.decode([window]))
    assert float(first.decode([window]).abs().max()) > 0
