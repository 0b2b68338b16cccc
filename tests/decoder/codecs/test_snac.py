"""SNAC: equality with the published package, noise by position, measured field, whole frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoder import (
    AttentionKind,
    DecoderConfigError,
    MaskPolicy,
    StreamingOptions,
    create_decoder,
    validate_streaming,
)
from decoder.codecs.snac import SnacDecoder, snac_layout
from decoder.keyed_noise import keyed_noise
from tests.closeness import error
from tests.decoder.small_codecs import audio_of, random_codes, to_safetensors, write_snac

MAX_ERROR = 1e-5  # of the loudest sample; float32 sums in another order differ by 1e-6
FRAMES = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("snac")
    reference = write_snac(folder)
    to_safetensors(folder)
    return folder, reference


@pytest.fixture(scope="module")
def snac(checkpoint: tuple[Path, Any]) -> SnacDecoder:
    decoder = create_decoder(checkpoint[0])
    assert isinstance(decoder, SnacDecoder)
    return decoder


def split(codes: list[int]) -> list[torch.Tensor]:
    """Return the codes as the reference expects them: one row per codebook."""
    frames = torch.tensor(codes).view(-1, 7)
    places = ([0], [1, 4], [2, 3, 5, 6])
    return [frames[:, place].reshape(1, -1) for place in places]


class KeyedTorch:
    """A torch module for the reference, with our noise instead of a generator's."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.stage = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randn(self, shape: tuple[int, ...], **_: Any) -> torch.Tensor:
        self.stage += 1
        return keyed_noise(self.seed, self.stage - 1, torch.zeros(1, 1).long(), shape[-1])[None]


@torch.inference_mode()
def reference_audio(
    reference: Any, codes: list[int], monkeypatch: pytest.MonkeyPatch, seed: int = 0
) -> np.ndarray:
    with monkeypatch.context() as patch:
        patch.setattr("snac.layers.torch", KeyedTorch(seed))
        return reference.decode(split(codes))[0, 0].numpy()


def test_facts_of_the_published_checkpoint() -> None:
    spec = create_decoder("snac", test_mode=True).spec
    assert (spec.sample_rate, spec.samples_per_frame, spec.codebook_size) == (24_000, 2048, 4096)
    assert spec.codes_per_second == pytest.approx(82.03, abs=0.01)
    assert spec.attention is AttentionKind.NONE
    assert spec.recommended == StreamingOptions(
        (7, 7, 14, 21, 28, 42, 56), buffer=21, look_ahead=21
    )


@pytest.mark.parametrize("seed", [None, 7])
def test_audio_equals_the_reference(checkpoint, monkeypatch, seed) -> None:
    folder, reference = checkpoint
    decoder = create_decoder(folder, options={"noise_seed": seed})
    codes = random_codes(decoder, FRAMES)
    expected = reference_audio(reference, codes, monkeypatch, seed or 0)
    got = audio_of(decoder, codes)
    assert got.shape == expected.shape == (FRAMES * 2048,)
    assert error(got, expected) < MAX_ERROR


@pytest.mark.parametrize(
    "changes", [{"noise": False}, {"depthwise": False}, {"decoder_rates": [8, 8, 2, 4]}]
)
def test_variants_equal_the_reference(tmp_path, monkeypatch, changes) -> None:
    reference = write_snac(tmp_path, **changes)
    decoder = create_decoder(tmp_path, allow_pickle=True)
    codes = random_codes(decoder, 3)
    expected = reference_audio(reference, codes, monkeypatch)
    assert error(audio_of(decoder, codes), expected) < MAX_ERROR


def test_a_frame_is_in_order_of_time_coarse_before_fine() -> None:
    assert snac_layout((4, 2, 1)) == (0, 1, 2, 2, 1, 2, 2)
    assert snac_layout((8, 4, 2, 1)) == (0, 1, 2, 3, 3, 2, 3, 3, 1, 2, 3, 3, 2, 3, 3)


@pytest.mark.parametrize("sizes", [(7, 14), (7,), (21, 7, 35)])
def test_streamed_equals_whole_at_the_recommended_context(snac, sizes) -> None:
    codes = random_codes(snac, FRAMES)
    options = StreamingOptions(sizes, buffer=21, look_ahead=21)
    assert error(audio_of(snac, codes, options), audio_of(snac, codes)) < MAX_ERROR


@pytest.mark.parametrize(("buffer", "look_ahead"), [(14, 21), (21, 14)])
def test_less_context_changes_samples(snac, buffer, look_ahead) -> None:
    codes = random_codes(snac, FRAMES)
    options = StreamingOptions((7,), buffer=buffer, look_ahead=look_ahead)
    assert error(audio_of(snac, codes, options), audio_of(snac, codes)) > 10 * MAX_ERROR


@pytest.mark.parametrize("name", ["small", "published"])
def test_the_stated_field_is_the_measured_one(snac, name) -> None:
    """A NaN vector affects exactly the samples in its field."""
    decoder = snac if name == "small" else create_decoder("snac", test_mode=True)
    network = decoder._network
    kept = [book.vectors.weight[1].clone() for book in network.codebooks]
    try:
        for book in network.codebooks:
            book.vectors.weight[1] = torch.nan
        spoiled = np.isnan(audio_of(decoder, [0] * 35 + [1] * 7 + [0] * 35)).reshape(11, -1)
    finally:
        for book, vector in zip(network.codebooks, kept, strict=True):
            book.vectors.weight[1] = vector
    frames = np.flatnonzero(spoiled.any(axis=1))
    assert (5 - frames[0]) * 7 == decoder.spec.right_field == 21
    assert (frames[-1] - 5) * 7 == decoder.spec.receptive_field == 21


def test_noise_follows_the_position_and_the_seed(snac, checkpoint) -> None:
    codes = random_codes(snac, 6)
    other = create_decoder(checkpoint[0], options={"noise_seed": 1})
    assert np.array_equal(audio_of(snac, codes), audio_of(snac, codes))
    assert not np.array_equal(audio_of(snac, codes), audio_of(other, codes))
    moved = audio_of(snac, codes, token_offset=7)
    assert not np.array_equal(audio_of(snac, codes), moved)


def test_a_continued_stream_sounds_like_one(snac) -> None:
    """Carry and offset continue where the first part stopped, including noise."""
    codes = random_codes(snac, FRAMES)
    options = StreamingOptions((7,), buffer=21, look_ahead=0)
    first = audio_of(snac, codes[:35], options)
    rest = audio_of(snac, codes[35:], options, carry=codes[14:35], token_offset=35)
    assert np.array_equal(np.concatenate((first, rest)), audio_of(snac, codes, options))


def test_rows_of_a_batch_are_those_of_single_calls(snac) -> None:
    from tests.decoder.toys import windows_of

    windows = [
        windows_of(snac.spec, StreamingOptions(), random_codes(snac, 3, s))[0] for s in range(3)
    ]
    together = snac.decode(windows)
    assert all(torch.equal(together[[i]], snac.decode([w])) for i, w in enumerate(windows))


def test_masks_and_voice_prompts_are_refused(snac) -> None:
    with pytest.raises(DecoderConfigError, match="'snac' cannot apply attention masks"):
        validate_streaming(StreamingOptions((7,), 7, MaskPolicy(block_causal=True)), snac.spec)
    with pytest.raises(DecoderConfigError, match="'snac' has no attention"):
        validate_streaming(StreamingOptions(prepend="once"), snac.spec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stateful": True}, "codec 'snac' does not support 'stateful'"),
        ({"num_codebooks": 2}, "codec 'snac' does not support 'num_codebooks'"),
        (
            {"token_rate_hz": 50},
            "token_rate_hz is 50 but codec 'snac' has 82.0312 codes per second",
        ),
        ({"look_ahead": 8}, "look_ahead is 8 but codec 'snac' has 7 codes per frame"),
        (
            {"first_look_ahead": 28},
            "first_look_ahead 28 is not an integer from 0 to the look_ahead",
        ),
        ({"look_ahead": 7, "crossfade_ms": 90}, "renders only 85.3333 ms past a block"),
    ],
)
def test_options_that_cannot_work(checkpoint, options, message) -> None:
    with pytest.raises(DecoderConfigError, match=message):
        create_decoder(checkpoint[0], options=options)


def test_an_other_sampling_than_24_khz_is_refused(tmp_path) -> None:
    write_snac(tmp_path, attn_window_size=32)
    with pytest.raises(DecoderConfigError, match="attn_window_size is 32, but only None"):
        create_decoder(tmp_path, allow_pickle=True)
