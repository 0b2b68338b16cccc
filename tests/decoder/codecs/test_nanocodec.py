"""NanoCodec: equality with the package nanocodec-torch, streams equal to the whole, its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder import (
    AudioDecoder,
    DecoderConfigError,
    DecodeRequest,
    StreamingOptions,
    StreamState,
    create_decoder,
    render,
)
from decoder.codecs.nanocodec.decoder import codec_spec, read_config
from tests.closeness import error
from tests.decoder.small_codecs import (
    NANOCODEC,
    audio_of,
    changed_frames,
    random_codes,
    write_nanocodec,
)
from tests.decoder.toys import windows_of

MAX_ERROR = 1e-5  # of the loudest sample; float32 sums in another order differ by 1e-6
FRAMES = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("nanocodec")
    return folder, write_nanocodec(folder)


@pytest.fixture(scope="module")
def codec(checkpoint: tuple[Path, Any]) -> AudioDecoder:
    return create_decoder(checkpoint[0])


def test_facts_of_the_published_checkpoint() -> None:
    spec = codec_spec(read_config({}), 22_050)
    assert (spec.samples_per_frame, spec.codes_per_second, spec.codebook_size) == (1764, 50, 4032)
    assert (spec.right_field, spec.num_codebooks, spec.receptive_field) == (0, 4, 4 * 28)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "decoder_config": {"up_sample_rates": [7, 2], "input_dim": 4, "base_channels": 12},
            "quantizer_config": {"num_groups": 2, "num_levels_per_group": [9, 8]},
        },
    ],
)
def test_audio_equals_the_reference(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = write_nanocodec(tmp_path, **changes)
    decoder = create_decoder(tmp_path)
    codes = random_codes(decoder, FRAMES)
    rows = torch.tensor(codes).view(1, FRAMES, -1).transpose(1, 2)
    with torch.inference_mode():
        wanted = reference.decode(rows)[0][0, 0].numpy()
    assert len(wanted) == FRAMES * decoder.spec.samples_per_frame
    assert 0.01 < np.abs(wanted).mean() < 0.9  # neither silent nor clipped throughout
    assert error(audio_of(decoder, codes), wanted) < MAX_ERROR


def test_streamed_equals_whole_with_the_recommended_buffer(codec: AudioDecoder) -> None:
    codes = random_codes(codec, FRAMES)
    whole = audio_of(codec, codes)
    assert error(audio_of(codec, codes, codec.spec.recommended), whole) < MAX_ERROR
    assert error(audio_of(codec, codes, StreamingOptions((4, 12), buffer=4)), whole) > MAX_ERROR


def test_no_frame_changes_more_than_the_stated_field(codec: AudioDecoder) -> None:
    field = codec.spec.receptive_field // 4
    changed = [changed_frames(codec, FRAMES, at=at) for at in (0, 5, 15)]
    assert {first for first, _ in changed} == {0}
    assert field - 2 <= max(last for _, last in changed) <= field


@pytest.mark.parametrize("sizes", [(4,), (8, 4, 12), (120, 4)])
def test_a_kept_state_is_the_whole_past(
    checkpoint: tuple[Path, Any], codec: AudioDecoder, sizes: tuple[int, ...]
) -> None:
    stateful = create_decoder(checkpoint[0], options={"stateful": True})
    codes, state = random_codes(codec, FRAMES), StreamState()
    windows = windows_of(stateful.spec, StreamingOptions(sizes, buffer=8), codes)
    parts = [render(stateful, [DecodeRequest(window, state)])[0] for window in windows]
    assert error(np.concatenate(parts), audio_of(codec, codes)) < MAX_ERROR


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("decoder_config", {"activation": "lrelu"}, "activation is 'lrelu', but only 'half_snake'"),
        ("decoder_config", {"input_dim": 16}, "input_dim is 16, but only 12 is supported"),
        ("decoder_config", {"base_channels": 36}, "base_channels=36 cannot be halved 3 times"),
        ("quantizer_config", {"num_levels_per_group": [4, 3, 1]}, "must be 2 or more"),
        ("quantizer_config", None, "must be objects"),
    ],
)
def test_a_wrong_configuration_is_an_error(
    tmp_path: Path, part: str, changes: dict[str, Any] | None, message: str
) -> None:
    own: object = [1] if changes is None else NANOCODEC[part] | changes
    (tmp_path / "config.json").write_text(
        json.dumps({"type": "nanocodec"} | NANOCODEC | {part: own})
    )
    with pytest.raises(DecoderConfigError, match=message):
        create_decoder(tmp_path, test_mode=True)


def test_a_missing_tensor_is_an_error(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    tensors = load_file(checkpoint[0] / "model.safetensors")
    del tensors["audio_decoder.activations.1.activation.snake_act.alpha"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint[0] / "config.json").read_text())
    with pytest.raises(DecoderConfigError, match=r"lack 'audio_decoder.activations.1.activation"):
        create_decoder(tmp_path)


def test_recordings_are_not_encoded(codec: AudioDecoder) -> None:
    assert not codec.spec.can_encode
    with pytest.raises(DecoderConfigError, match="codec 'nanocodec' has no encoder"):
        codec.encode(np.zeros(100))
