"""Qwen3-TTS' codec: equality with transformers' parts, streams equal to the whole, its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder import (
    AttentionKind,
    AudioDecoder,
    DecoderConfigError,
    DecodeRequest,
    StreamingOptions,
    StreamState,
    create_decoder,
    render,
    validate_streaming,
)
from decoder.codecs.qwen3_tts.decoder import Qwen3TTSDecoder, codec_spec, read_config
from decoder.codecs.qwen3_tts.modules import Qwen3TTSNetwork
from tests.decoder.small_codecs import (
    audio_of,
    changed_frames,
    random_codes,
    write_qwen3_tts_codec,
)
from tests.decoder.toys import windows_of

MAX_ERROR = 1e-5  # of the loudest sample; float32 sums in another order differ by 1e-6
FRAMES = 40
FIELD = 30  # frames: 2 × 5 of attention, 2 of the first convolution, 18 of the others


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3_tts")
    return folder, write_qwen3_tts_codec(folder)


@pytest.fixture(scope="module")
def codec(checkpoint: tuple[Path, Any]) -> AudioDecoder:
    return create_decoder(checkpoint[0])


@pytest.fixture(scope="module")
def stateful(checkpoint: tuple[Path, Any]) -> AudioDecoder:
    return create_decoder(checkpoint[0], options={"stateful": True})


@torch.inference_mode()
def reference_audio(reference: Any, codes: list[int]) -> np.ndarray:
    rows = torch.tensor(codes).view(1, -1, 4).transpose(1, 2)
    return reference.decoder(rows)[0].numpy()


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return (
        left.shape == right.shape and np.abs(left - right).max() < MAX_ERROR * np.abs(right).max()
    )


def test_facts_of_the_published_checkpoint() -> None:
    spec = codec_spec(read_config({}), 24_000)
    assert (spec.samples_per_frame, spec.codes_per_second, spec.codebook_size) == (1920, 200, 2048)
    assert (spec.attention, spec.right_field, spec.num_codebooks) == (AttentionKind.CAUSAL, 0, 16)
    assert spec.receptive_field == 16 * (8 * 71 + 2 + 10)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_quantizers": 2, "head_dim": 8},
        {"upsampling_ratios": [2, 2], "upsample_rates": [5, 4]},
    ],
)
def test_audio_equals_the_reference(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = write_qwen3_tts_codec(tmp_path, **changes)
    decoder = create_decoder(tmp_path)
    codes = random_codes(decoder, FRAMES)
    rows = torch.tensor(codes).view(1, FRAMES, -1).transpose(1, 2)
    with torch.inference_mode():
        wanted = reference.decoder(rows)[0].numpy()
    assert len(wanted) == FRAMES * 80
    assert 0.01 < np.abs(wanted).mean() < 0.9  # neither silent nor clipped throughout
    assert same(audio_of(decoder, codes), wanted)


def test_moved_biases_change_nothing(checkpoint: tuple[Path, Any]) -> None:
    """The snakes add them; this is done on a GPU only."""
    folder, reference = checkpoint
    decoder = create_decoder(folder)
    assert isinstance(decoder, Qwen3TTSDecoder)
    network = decoder._network
    assert isinstance(network, Qwen3TTSNetwork)
    network.move_biases()
    left = [name for name, _ in network.named_parameters() if name.endswith(".bias")]
    assert not [name for name in left if name.startswith(("entry", "stages"))]
    codes = random_codes(decoder, FRAMES)
    assert same(audio_of(decoder, codes), reference_audio(reference, codes))


def test_the_stated_field_is_the_measured_one(codec: AudioDecoder) -> None:
    spec = codec.spec
    assert (spec.receptive_field, spec.right_field) == (4 * FIELD, 0)
    before = [changed_frames(codec, FRAMES, at=at) for at in (0, 5, 15)]
    assert {first for first, _ in before} == {0}
    assert max(last for _, last in before) <= FIELD


def test_streamed_equals_whole_when_the_buffer_covers_the_field(codec: AudioDecoder) -> None:
    codes = random_codes(codec, FRAMES)
    whole = audio_of(codec, codes)
    assert same(audio_of(codec, codes, StreamingOptions((4, 12), buffer=4 * FIELD)), whole)
    assert not same(audio_of(codec, codes, StreamingOptions((4, 12), buffer=16)), whole)


@pytest.mark.parametrize("sizes", [(4,), (8, 4, 12), (40, 4)])
@pytest.mark.parametrize("buffer", [0, 8])
def test_a_kept_state_is_the_whole_past(
    codec: AudioDecoder, stateful: AudioDecoder, sizes: tuple[int, ...], buffer: int
) -> None:
    codes, state = random_codes(codec, FRAMES), StreamState()
    options = StreamingOptions(sizes, buffer=buffer)
    windows = windows_of(stateful.spec, options, codes)
    parts = [render(stateful, [DecodeRequest(window, state)])[0] for window in windows]
    assert same(np.concatenate(parts), audio_of(codec, codes))
    assert validate_streaming(options, stateful.spec) == []


def test_the_encoder_gives_the_first_codebooks(checkpoint: tuple[Path, Any]) -> None:
    """Mimi has eight here, the codec four."""
    folder, reference = checkpoint
    clip = (np.random.default_rng(0).normal(size=795) * 0.1).astype(np.float32)
    padded = torch.from_numpy(np.pad(clip, (0, 5)))[None, None]
    with torch.inference_mode():
        wanted = reference.encode(padded).audio_codes[0, :4].T
    found = torch.tensor(create_decoder(folder).encode(clip)).view(-1, 4)
    assert torch.equal(found, wanted)
    assert len(found) == 10


@pytest.mark.parametrize(
    ("key", "value"), [("num_codebooks", 2), ("noise_seed", 1), ("look_ahead", 4)]
)
def test_options_without_meaning_are_refused(
    checkpoint: tuple[Path, Any], key: str, value: int
) -> None:
    with pytest.raises(DecoderConfigError, match=f"does not support '{key}'"):
        create_decoder(checkpoint[0], options={key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True, but only False is supported"),
        ({"rope_theta": 5e5}, "rope_theta is 500000.0"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8, but only 16"),
        ({"num_quantizers": 1}, "num_quantizers must be at least 2"),
    ],
)
def test_variants_that_are_not_computed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DecoderConfigError, match=message):
        read_config({"decoder_config": changes})


def test_another_hop_is_refused(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    folder = checkpoint[0]
    config = json.loads((folder / "config.json").read_text()) | {"decode_upsample_rate": 1920}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(DecoderConfigError, match="decode_upsample_rate is 1920, but only 80"):
        create_decoder(tmp_path)


def test_an_encoder_with_fewer_codebooks_is_refused(tmp_path: Path) -> None:
    write_qwen3_tts_codec(tmp_path, num_quantizers=9)
    with pytest.raises(DecoderConfigError, match="the encoder has 8 codebooks, the decoder 9"):
        create_decoder(tmp_path)


def test_a_missing_codebook_is_named(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    folder, name = checkpoint[0], "decoder.quantizer.rvq_rest.vq.layers.2._codebook."
    weights = load_file(folder / "model.safetensors")
    kept = {key: tensor for key, tensor in weights.items() if not key.startswith(name)}
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(DecoderConfigError, match=f"lack '{name}"):
        create_decoder(tmp_path)
