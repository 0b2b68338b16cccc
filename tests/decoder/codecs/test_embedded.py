"""The embedded codec: files, optimised path against the network, encoding, errors."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder import (
    AttentionKind,
    AudioFormatError,
    CodeRangeError,
    DecoderConfigError,
    MaskPolicy,
    PcmFormat,
    PrependPromptSpeechTokens,
    StreamingOptions,
    attention_mask,
    create_decoder,
)
from decoder.codecs.embedded.decoder import EmbeddedDecoder, use_bfloat16
from decoder.codecs.embedded.modules import CodecConfig, EmbeddedCodec
from tests.closeness import error
from tests.decoder.toys import SMALL, build_embedded, one_shot_audio, windows_of

MAX_ERROR = 1e-5  # of the loudest sample; float32 sums in another order differ by 1e-6

ENCODING = CodecConfig(
    levels=(4, 4, 4),
    mel_bins=12,
    mel_n_fft=256,
    encoder_dim=16,
    encoder_layers=2,
    encoder_heads=2,
    encoder_window=3,
    decoder_dim=16,
    decoder_layers=1,
    decoder_heads=2,
    decoder_ff=32,
)
STREAMING = {
    "chunk_sizes": [6, 12],
    "buffer": 25,
    "block_causal": True,
    "prepend_prompt_speech_tokens_causal": True,
}
ROLLING = PrependPromptSpeechTokens.ROLLING


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a codec folder with fp16 weights, like the shipped one."""
    folder = tmp_path_factory.mktemp("codec")
    config = {"type": "embedded", "hop": ENCODING.hop, "streaming": STREAMING, **asdict(ENCODING)}
    (folder / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        codec = EmbeddedCodec(ENCODING)
        assert codec.encoder is not None
        torch.nn.init.normal_(codec.encoder.input.weight, std=1.0)
        # so that clips give different codes
        torch.nn.init.normal_(codec.encoder.output.weight, std=1.0)
    weights = {name: value.half().contiguous() for name, value in codec.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may modify."""
    return Path(shutil.copytree(written, tmp_path / "codec"))


@pytest.fixture(scope="module")
def decoder(written: Path) -> EmbeddedDecoder:
    found = create_decoder(written)
    assert isinstance(found, EmbeddedDecoder)
    return found


def rewrite_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def clip(num_samples: int, seed: int = 0) -> np.ndarray:
    """Return a sweep with noise."""
    time = np.arange(num_samples) / 16_000
    noise = np.random.default_rng(seed).normal(0, 0.02, num_samples)
    return (0.4 * np.sin(2 * np.pi * (200 + 60 * time) * time) + noise).astype(np.float32)


def test_the_spec_equals_the_files(decoder: EmbeddedDecoder) -> None:
    spec = decoder.spec
    assert (spec.name, spec.sample_rate, spec.samples_per_code) == ("embedded", 16_000, 640)
    assert (spec.codes_per_second, spec.codebook_size, spec.num_codebooks) == (25.0, 64, 1)
    assert spec.receptive_field == ENCODING.receptive_field == 9
    assert spec.attention is AttentionKind.BIDIRECTIONAL
    assert spec.can_encode
    assert spec.can_mask
    assert spec.recommended == StreamingOptions(
        (6, 12), 25, MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True)
    )


def test_a_codec_that_never_looks_ahead_is_causal() -> None:
    assert build_embedded(replace(SMALL, right_window=0)).spec.attention is AttentionKind.CAUSAL


@pytest.mark.parametrize(
    "masks", [MaskPolicy(), MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True)]
)
@pytest.mark.parametrize("buffer", [0, 3, 30])
@pytest.mark.parametrize("config", [SMALL, replace(ENCODING, decoder_layers=3)])
def test_the_lean_path_is_the_network(config: CodecConfig, buffer: int, masks: MaskPolicy) -> None:
    """Emitted samples equal those of the whole network at the window's absolute positions."""
    decoder = build_embedded(config)
    codec = decoder._codec
    s = np.random.default_rng(buffer).integers(0, 64, 40).tolist()
    options = StreamingOptions((2, 5, 9), buffer, masks, ROLLING)
    for window in windows_of(decoder.spec, options, s, prompt_codes=s[:12]):
        mask = torch.from_numpy(attention_mask(window, AttentionKind.BIDIRECTIONAL))
        with torch.inference_mode():
            expected = codec.decode(
                torch.tensor([window.codes]), mask, torch.tensor(window.positions)
            )
        got = decoder.decode([window])
        assert expected.shape == (1, len(window.codes) * config.hop)
        assert got.shape == (1, window.num_samples)
        assert got.dtype == torch.float32
        emitted = expected[:, window.skip_samples :][:, : window.num_samples]
        assert error(got, emitted) < MAX_ERROR


def test_bfloat16_gives_nearly_the_same_audio() -> None:
    """The path of CUDA devices; the network in bfloat16 is its reference."""
    decoder = build_embedded(replace(ENCODING, decoder_dim=64))
    window = windows_of(decoder.spec, StreamingOptions((9,), 30), range(40))[2]
    exact = decoder.decode([window])[0]
    codec = decoder._codec
    use_bfloat16(codec)
    mask = torch.from_numpy(attention_mask(window, AttentionKind.BIDIRECTIONAL))
    with torch.inference_mode():
        network = codec.decode(torch.tensor([window.codes]), mask)[0, window.skip_samples :]
    rough = EmbeddedDecoder(decoder.spec, codec, decoder._source).decode([window])[0]
    assert rough.dtype == torch.float32
    assert (rough - exact).pow(2).mean() < 0.01 * exact.pow(2).mean()
    assert (rough - network).pow(2).mean() < 0.01 * exact.pow(2).mean()
    assert not torch.equal(rough, exact)


def test_a_window_may_be_longer_than_the_table_of_positions(
    decoder: EmbeddedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = np.random.default_rng(0).integers(0, 64, 300).tolist()
    audio = one_shot_audio(decoder, codes)
    assert audio.shape == (300 * 640,)
    assert np.isfinite(audio).all()
    renderer = decoder._renderer
    monkeypatch.setattr(renderer, "_rotary", renderer._rotary.part(0, 599))
    assert np.array_equal(one_shot_audio(decoder, codes), audio)


def test_a_shift_of_positions_changes_nothing(decoder: EmbeddedDecoder) -> None:
    codes = tuple(range(20))
    options = StreamingOptions((8,), 4)
    near = windows_of(decoder.spec, options, codes)[1]
    far = windows_of(decoder.spec, options, codes, token_offset=10_000_000)[1]
    assert near.positions != far.positions
    assert torch.equal(decoder.decode([near]), decoder.decode([far]))


def test_codes_are_checked(decoder: EmbeddedDecoder) -> None:
    window = windows_of(decoder.spec, StreamingOptions(), (1, 2, 3))[0]
    with pytest.raises(CodeRangeError, match=r"code 64 is outside 0\.\.63"):
        decoder.decode([replace(window, codes=(1, 64, 3))])
    with pytest.raises(CodeRangeError, match="code -1"):
        decoder.decode([replace(window, codes=(1, -1, 3))])


def test_windows_of_any_lengths_go_into_one_call(decoder: EmbeddedDecoder) -> None:
    windows = windows_of(decoder.spec, StreamingOptions((2, 3), 1), (1, 2, 3, 4, 5))
    rows = decoder.decode(windows)
    for row, window in zip(rows, windows, strict=True):
        (alone,) = decoder.decode([window])
        assert torch.equal(row[: window.num_samples], alone[: window.num_samples])


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_other_windows_of_a_batch_change_no_bit(k: int, count: int) -> None:
    """Neither in a batch of equal codes nor of different ones."""
    decoder = build_embedded(SMALL)
    options = StreamingOptions(
        (k,), 2, MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True)
    )
    rng = np.random.default_rng(k)
    for codes in (np.zeros((count, 3 * k), int), rng.integers(64, size=(count, 3 * k))):
        streams = [windows_of(decoder.spec, options, tuple(row.tolist())) for row in codes]
        for windows in zip(*streams, strict=True):
            apart = [decoder.decode([window]) for window in windows]
            assert torch.equal(decoder.decode(windows), torch.cat(apart))


def test_positions_follow_each_other(decoder: EmbeddedDecoder) -> None:
    window = windows_of(decoder.spec, StreamingOptions(), (1, 2, 3))[0]
    with pytest.raises(DecoderConfigError, match="must follow each other"):
        decoder.decode([replace(window, positions=(0, 1, 5))])


@pytest.mark.parametrize("num_samples", [1, 639, 640, 641, 16_000, 100_000])
def test_encode_gives_one_code_per_started_code_length(
    decoder: EmbeddedDecoder, num_samples: int
) -> None:
    codes = decoder.encode(clip(num_samples))
    assert len(codes) == -(-num_samples // 640)
    assert all(0 <= code < 64 for code in codes)


def test_encoding_in_pieces_is_encoding_at_once(
    decoder: EmbeddedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = clip(100 * 640)
    whole = decoder.encode(samples)
    assert len(set(whole)) > 4
    monkeypatch.setattr("decoder.codecs.embedded.decoder.ENCODE_CODES", 17)
    assert decoder.encode(samples) == whole


def test_encoded_clips_can_be_decoded(decoder: EmbeddedDecoder) -> None:
    codes = decoder.encode(clip(20_000))
    assert one_shot_audio(decoder, codes).shape == (len(codes) * 640,)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(0), "one row of samples"),
        (np.zeros((2, 700)), "one row of samples"),
        (np.array([0.0, np.nan]), "not finite"),
        (np.array([0.0, np.inf]), "not finite"),
    ],
)
def test_clips_that_cannot_be_encoded(
    decoder: EmbeddedDecoder, samples: np.ndarray, message: str
) -> None:
    with pytest.raises(AudioFormatError, match=message):
        decoder.encode(samples)


def test_a_codec_may_ship_without_its_encoder(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({n: w for n, w in weights.items() if n.startswith("decoder.")}, path)
    decoder = create_decoder(folder)
    assert not decoder.spec.can_encode
    with pytest.raises(DecoderConfigError, match="no encoder"):
        decoder.encode(clip(1000))


@pytest.mark.parametrize("change", ["missing", "surplus", "shape"])
def test_weights_that_do_not_fit_are_named(folder: Path, change: str) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    if change == "missing":
        del weights["decoder.spectra.bias"]
    elif change == "surplus":
        weights["decoder.extra"] = torch.zeros(1)
    else:
        weights["decoder.spectra.bias"] = torch.zeros(1)
    save_file(weights, path)
    with pytest.raises(DecoderConfigError, match=r"model\.safetensors.*(spectra\.bias|extra)") as e:
        create_decoder(folder)
    assert "\n" not in str(e.value)


def test_a_broken_weights_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(DecoderConfigError, match=r"cannot read codec weights .*model\.safetensors"):
        create_decoder(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hop": 320}, "hop is 320 but the sizes give 640"),
        ({"streaming": {"chunk_size": [6]}}, r"unknown key streaming\.chunk_size"),
        ({"streaming": {"prepend": "always"}}, r"streaming\.prepend: 'always'"),
        ({"streaming": {"chunk_sizes": []}}, "chunk_size is empty"),
        ({"streaming": {"buffer": -1}}, "buffer -1"),
        ({"streaming": {"chunk_sizes": 6}}, r"streaming\.chunk_sizes"),
    ],
)
def test_a_config_that_cannot_work(folder: Path, changes: dict[str, object], message: str) -> None:
    rewrite_config(folder, **changes)
    with pytest.raises(DecoderConfigError, match=message):
        create_decoder(folder)


def test_options_it_takes(written: Path) -> None:
    options = {"token_rate_hz": 25, "max_batch": 3, "pcm_format": "f32le", "crossfade_ms": 0}
    decoder = create_decoder(written, options=options)
    assert decoder.options.max_batch == 3
    assert decoder.options.pcm_format is PcmFormat.F32LE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_rate_hz": 50}, "token_rate_hz is 50 but the codec's rate is 25"),
        ({"stateful": True}, "'embedded' does not support 'stateful'"),
        ({"noise_seed": 1}, "does not support 'noise_seed'"),
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
    first, second = (create_decoder(folder, test_mode=True) for _ in range(2))
    audio = one_shot_audio(first, (1, 2, 3))
    assert np.array_equal(audio, one_shot_audio(second, (1, 2, 3)))
    assert np.abs(audio).max() > 0
    assert first.encode(clip(2000)) == second.encode(clip(2000))


def test_loading_leaves_the_global_generator_alone(written: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    create_decoder(written).encode(clip(700))
    assert torch.equal(torch.rand(3), expected)
