"""DAC: equality with transformers, selected codebooks, receptive field, odd rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoder import DecoderConfigError, StreamingOptions, create_decoder
from tests.closeness import error
from tests.decoder.small_codecs import audio_of, random_codes, write_dac

MAX_ERROR = 1e-5  # of the loudest sample; float32 sums in another order differ by 1e-6
FRAMES = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("dac")
    return folder, write_dac(folder)


@torch.inference_mode()
def reference_audio(reference: Any, codes: list[int], num_codebooks: int) -> np.ndarray:
    rows = torch.tensor(codes).view(1, -1, num_codebooks).transpose(1, 2)
    return reference.decode(audio_codes=rows).audio_values[0].numpy()


@pytest.mark.parametrize("num_codebooks", [None, 2])
def test_audio_equals_the_reference(checkpoint, num_codebooks) -> None:
    """An odd rate drops 8 samples at the end, which are zeros here."""
    folder, reference = checkpoint
    decoder = create_decoder(folder, options={"num_codebooks": num_codebooks})
    codes = random_codes(decoder, FRAMES)
    expected = reference_audio(reference, codes, num_codebooks or 4)
    got = audio_of(decoder, codes)
    assert (len(got), len(expected)) == (FRAMES * 320, FRAMES * 320 - 8)
    assert error(got[:-8], expected) < MAX_ERROR
    assert not got[-8:].any()


def test_the_facts_follow_the_configuration(checkpoint) -> None:
    spec = create_decoder(checkpoint[0], options={"num_codebooks": 2}).spec
    assert (spec.sample_rate, spec.samples_per_frame, spec.layout) == (24_000, 320, (0, 1))
    assert spec.codes_per_second == 150


def test_streamed_equals_whole_at_the_recommended_context(checkpoint) -> None:
    decoder = create_decoder(checkpoint[0])
    codes = random_codes(decoder, FRAMES)
    whole = audio_of(decoder, codes)
    assert error(audio_of(decoder, codes, decoder.spec.recommended), whole) < MAX_ERROR
    field = decoder.spec.receptive_field
    for buffer, look_ahead in ((8, decoder.spec.right_field), (field, 8)):
        options = StreamingOptions((4,), buffer=buffer, look_ahead=look_ahead)
        assert error(audio_of(decoder, codes, options), whole) > MAX_ERROR


@pytest.mark.parametrize("ratios", [[2, 4, 5, 8], [2, 4, 8, 8], [3, 3, 7, 7]])
def test_the_stated_field_is_the_measured_one(tmp_path, ratios) -> None:
    """A NaN vector affects exactly the samples in its field."""
    write_dac(tmp_path, downsampling_ratios=ratios)
    decoder = create_decoder(tmp_path)
    for book in decoder._network.codebooks:
        book.vectors.weight[1] = torch.nan
    codes = [0] * 4 * 20 + [1] * 4 + [0] * 4 * 20
    spoiled = np.isnan(audio_of(decoder, codes)).reshape(41, -1)
    frames = np.flatnonzero(spoiled.any(axis=1))
    assert (20 - frames[0]) * 4 == decoder.spec.right_field
    assert (frames[-1] - 20) * 4 == decoder.spec.receptive_field


def test_more_codebooks_than_there_are(checkpoint) -> None:
    with pytest.raises(DecoderConfigError, match="num_codebooks is 5 but codec 'dac' has 4"):
        create_decoder(checkpoint[0], options={"num_codebooks": 5})
