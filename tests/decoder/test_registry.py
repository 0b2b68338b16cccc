"""Codec names and folders, audio_decoder_config, and the ramp codec of the test mode."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import decoder
from decoder import (
    AttentionKind,
    DecoderConfigError,
    DecoderOptions,
    MaskPolicy,
    PcmFormat,
    StreamingOptions,
    create_decoder,
    supported_decoders,
    validate_streaming,
)
from decoder.options import parse_options
from tests.decoder.toys import stream_audio, windows_of

ALL_KEYS = frozenset(DecoderOptions.__dataclass_fields__)


def test_the_public_names_exist() -> None:
    assert sorted(decoder.__all__) == sorted(set(decoder.__all__))
    assert all(hasattr(decoder, name) for name in decoder.__all__)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import decoder, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_supported_names() -> None:
    assert supported_decoders() == (
        "dac",
        "embedded",
        "higgs_audio_v2_tokenizer",
        "mimi",
        "nanocodec",
        "neucodec",
        "qwen3_tts_tokenizer_12hz",
        "ramp",
        "snac",
        "source_filter",
        "xcodec2",
    )


@pytest.mark.parametrize("name", ["", "snack"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(
        DecoderConfigError,
        match=f"decoder '{name}'; supported: dac, embedded, higgs_audio_v2_tokenizer, mimi, "
        "nanocodec, neucodec, qwen3_tts_tokenizer_12hz, ramp, snac, source_filter, xcodec2",
    ):
        create_decoder(name)


def test_a_folder_is_known_by_its_type(tmp_path: Path) -> None:
    values = {"type": "ramp", "sample_rate": 8000, "token_rate_hz": 50, "codebook_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(values))
    spec = create_decoder(tmp_path).spec
    assert (spec.name, spec.sample_rate, spec.samples_per_code) == ("ramp", 8000, 160)
    assert spec.codebook_size == 10
    assert create_decoder(str(tmp_path)).spec == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no 'type'"),
        ('{"type": "snack"}', "unknown audio decoder 'snack'"),
        ("[1]", "does not hold a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_a_folder_with_a_bad_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DecoderConfigError, match=message):
        create_decoder(tmp_path)


def test_a_named_codec_without_a_config_is_as_published(tmp_path: Path) -> None:
    """Weights alone: NeuCodec's first publication has no config.json."""
    assert create_decoder("ramp").spec.sample_rate == 16_000
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(DecoderConfigError, match="cannot read codec weights"):
        create_decoder("snac", weights=str(tmp_path), allow_pickle=True)
    (tmp_path / "config.json").write_text('{"codebook_size": 0}')
    with pytest.raises(DecoderConfigError, match="codebook_size is 0"):
        create_decoder("snac", weights=str(tmp_path), allow_pickle=True)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(DecoderConfigError, match=r"cannot read .*config\.json: No such file"):
        create_decoder(tmp_path)


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DecoderConfigError, match="no codec folder at"):
        create_decoder(tmp_path / "gone")
    with pytest.raises(DecoderConfigError, match="no codec folder at"):
        create_decoder(str(tmp_path / "gone"))
    with pytest.raises(DecoderConfigError, match="no decoder weights at"):
        create_decoder("embedded", weights=str(tmp_path / "gone.safetensors"))


def test_weights_name_a_codec_folder_or_a_file_in_one(tiny_checkpoint: Path) -> None:
    codec = tiny_checkpoint / "codec"
    expected = create_decoder(codec).spec
    assert expected.codebook_size == 64
    assert create_decoder("embedded", weights=str(codec)).spec == expected
    file = str(codec / "model.safetensors")
    assert create_decoder("embedded", weights=file).spec == expected
    assert create_decoder(codec, weights=file).spec == expected


def test_a_name_alone_has_no_weights() -> None:
    with pytest.raises(DecoderConfigError, match="needs weights"):
        create_decoder("embedded")
    assert create_decoder("embedded", test_mode=True).spec.codebook_size == 16_384


def test_no_options_are_the_defaults() -> None:
    assert parse_options({}, "toy", ALL_KEYS) == DecoderOptions()
    assert parse_options({"noise_seed": None}, "toy", frozenset()) == DecoderOptions()


def test_every_option_is_read() -> None:
    values = {
        "token_rate_hz": 12.5,
        "max_batch": 2,
        "pcm_format": "f32le",
        "stateful": True,
        "noise_seed": 0,
        "crossfade_ms": 2,
    }
    assert parse_options(values, "toy", ALL_KEYS) == DecoderOptions(
        12.5, 2, PcmFormat.F32LE, True, 0, 2.0
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bach": 2}, "unknown key 'max_bach', did you mean 'max_batch'?"),
        ({"zzz": 2}, r"unknown key 'zzz'; known: token_rate_hz, max_batch"),
        ({"max_batch": 0}, "'max_batch' is 0 but must be an integer >= 1"),
        ({"max_batch": 2.5}, "'max_batch' is 2.5"),
        ({"max_batch": True}, "'max_batch' is True"),
        ({"token_rate_hz": 0}, "must be a number above 0"),
        ({"token_rate_hz": "25"}, "'token_rate_hz' is '25' but must be a number"),
        ({"pcm_format": "mp3"}, "'pcm_format' is 'mp3' but must be s16le or f32le"),
        ({"stateful": 1}, "'stateful' is 1 but must be true or false"),
        ({"noise_seed": -1}, "must be an integer >= 0"),
        ({"crossfade_ms": -1}, "must be a number >= 0"),
        ({"crossfade_ms": True}, "'crossfade_ms' is True"),
    ],
)
def test_options_that_are_wrong(options: dict[str, object], message: str) -> None:
    with pytest.raises(DecoderConfigError, match=message.replace("?", r"\?")):
        parse_options(options, "toy", ALL_KEYS)


def test_an_unsupported_option_lists_the_supported_ones() -> None:
    with pytest.raises(DecoderConfigError, match="'toy' does not support 'stateful'; it takes: a"):
        parse_options({"stateful": True}, "toy", frozenset({"a"}))
    assert parse_options({"stateful": False}, "toy", frozenset()) == DecoderOptions()


def test_the_ramp_is_its_formula() -> None:
    ramp = create_decoder("ramp", options={"token_rate_hz": 4000})
    assert ramp.spec.samples_per_code == 4
    audio = np.concatenate(stream_audio(ramp, StreamingOptions((2,), 1), (5, 6, 5)))
    steps = [97 * code + 31 * t + k for t, code in enumerate((5, 6, 5)) for k in range(4)]
    assert np.array_equal(audio, np.array([s % 2048 / 1024 - 1 for s in steps]))


def test_the_ramp_takes_rational_rates() -> None:
    ramp = create_decoder("ramp", options={"token_rate_hz": 86.4})
    assert ramp.spec.samples_per_code == Fraction(16_000 * 10, 864)
    blocks = stream_audio(ramp, StreamingOptions((3,), 2), range(13))
    whole = stream_audio(ramp, StreamingOptions(), range(13))[0]
    assert len(whole) == 13 * 160_000 // 864
    assert np.array_equal(np.concatenate(blocks), whole)


def test_ramp_windows_of_one_shape_join_at_a_rational_rate() -> None:
    ramp = create_decoder("ramp", options={"token_rate_hz": 86.4})
    windows = windows_of(ramp.spec, StreamingOptions((2,), 2), range(12))[1:]
    assert len({sum(w.skip_samples + w.num_samples for w in [window]) for window in windows}) > 1
    joined = ramp.decode(windows)
    for row, window in zip(joined, windows, strict=True):
        alone = ramp.decode([window])[0]
        assert row[: len(alone)].equal(alone)


def test_ramp_noise_is_keyed_by_seed_and_absolute_position() -> None:
    plain, first, second = (
        create_decoder("ramp", options={"noise_seed": seed}) for seed in (None, 1, 2)
    )
    streamed = np.concatenate(stream_audio(first, StreamingOptions((3,), 2), range(9)))
    whole = stream_audio(first, StreamingOptions(), range(9))[0]
    assert np.array_equal(streamed, whole)
    assert not np.array_equal(whole, stream_audio(second, StreamingOptions(), range(9))[0])
    assert not np.array_equal(whole, stream_audio(plain, StreamingOptions(), range(9))[0])
    with_prompt = windows_of(
        first.spec, StreamingOptions(), range(9), carry=(1, 2), token_offset=2
    )[0]
    assert not np.array_equal(whole, first.decode([with_prompt])[0].numpy())


def test_the_ramp_takes_every_mask_and_no_weights(tmp_path: Path) -> None:
    ramp = create_decoder("ramp")
    assert ramp.spec.attention is AttentionKind.CAUSAL
    masks = MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True)
    assert validate_streaming(StreamingOptions((2,), 0, masks), ramp.spec) == []
    (tmp_path / "config.json").write_text('{"type": "ramp"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(DecoderConfigError, match="'ramp' has no weights"):
        create_decoder(tmp_path)


def test_the_ramp_encodes_levels() -> None:
    ramp = create_decoder("ramp", options={"token_rate_hz": 1600})
    levels = np.repeat([-1.0, 0.0, 0.999, 1.0], 10)[:-5]
    assert ramp.encode(levels) == (0, 2048, 4093, 4095)
