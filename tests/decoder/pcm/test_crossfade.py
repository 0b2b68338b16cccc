"""crossfade_ms: a block is blended with the previous window's samples past its end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from decoder import (
    AudioDecoder,
    DecoderConfigError,
    DecodeRequest,
    StreamingOptions,
    StreamState,
    create_decoder,
    render,
)
from decoder.streaming import blend
from tests.closeness import error
from tests.decoder.small_codecs import audio_of, random_codes, write_dac, write_xcodec2
from tests.decoder.toys import windows_of

MAX_ERROR = 1e-5  # of the loudest sample; float32 sums in another order differ by 1e-6

FADE_MS = 20.0
FADE = 480  # samples at 24 kHz
POOR = StreamingOptions((24,), buffer=4, look_ahead=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dac")
    write_dac(folder)
    return folder


@pytest.fixture(scope="module")
def fading(folder: Path) -> AudioDecoder:
    return create_decoder(folder, options={"crossfade_ms": FADE_MS, "look_ahead": 8})


def blocks(
    decoder: AudioDecoder, codes: list[int], options: StreamingOptions, state: StreamState | None
) -> list[np.ndarray]:
    windows = windows_of(decoder.spec, options, codes)
    requests = [DecodeRequest(w) if state is None else DecodeRequest(w, state) for w in windows]
    return [render(decoder, [request])[0] for request in requests]


def test_the_first_samples_of_a_block_are_blended(folder, fading) -> None:
    codes = random_codes(fading, 24)
    plain = create_decoder(folder, options={"look_ahead": 8})
    own = blocks(plain, codes, POOR, None)
    faded = blocks(fading, codes, POOR, StreamState())
    assert error(faded[0], own[0]) < MAX_ERROR
    alone = blocks(fading, codes, POOR, None)  # without a state nothing is blended
    assert all(error(a, b) < MAX_ERROR for a, b in zip(alone, own, strict=True))
    rising = (np.arange(FADE) + 0.5) / FADE
    for index in range(1, len(own)):
        assert error(faded[index][FADE:], own[index][FADE:]) < MAX_ERROR
        tail = _tail(fading, codes, index - 1)
        expected = tail * (1 - rising) + own[index][:FADE] * rising
        assert error(faded[index][:FADE], expected) < MAX_ERROR


def _tail(decoder: AudioDecoder, codes: list[int], index: int) -> np.ndarray:
    """Return the samples that a window renders past its block."""
    window = windows_of(decoder.spec, POOR, codes)[index]
    return decoder.decode([window])[0].numpy()[window.num_samples :][:FADE]


def test_a_seam_is_a_smaller_jump(folder, fading) -> None:
    """With too little context there is a step at block borders, which blending removes."""
    codes = random_codes(fading, 240)
    whole = audio_of(fading, codes)
    faded = np.concatenate(blocks(fading, codes, POOR, StreamState())) - whole
    hard = audio_of(create_decoder(folder, options={"look_ahead": 8}), codes, POOR) - whole
    seams = np.arange(1, 40) * 6 * 320
    jumps = [np.abs(error[seams] - error[seams - 1]).mean() for error in (hard, faded)]
    assert jumps[1] < jumps[0] / 3


def test_with_enough_context_a_fade_changes_nothing(folder) -> None:
    decoder = create_decoder(folder, options={"crossfade_ms": FADE_MS})
    codes = random_codes(decoder, 60)
    faded = np.concatenate(blocks(decoder, codes, decoder.spec.recommended, StreamState()))
    assert error(faded, audio_of(decoder, codes)) < MAX_ERROR


def test_no_sample_is_lost_or_doubled(fading) -> None:
    codes = random_codes(fading, 25)
    parts = blocks(fading, codes, POOR, StreamState())
    assert [len(part) for part in parts] == [6 * 320] * 4 + [320]


def test_a_tail_longer_than_the_block_fades_as_far_as_there_is_one() -> None:
    block = np.ones(2, dtype=np.float32)
    blend(block, np.zeros(4, dtype=np.float32))
    assert block.tolist() == [0.125, 0.375]
    blend(block, None)
    blend(block, np.zeros(0, dtype=np.float32))
    assert block.tolist() == [0.125, 0.375]


def test_a_transformer_codec_fades_too(tmp_path) -> None:
    write_xcodec2(tmp_path)
    plain = create_decoder(tmp_path)
    fading = create_decoder(tmp_path, options={"crossfade_ms": 50})
    codes = random_codes(plain, 45)
    faded = blocks(fading, codes, plain.spec.recommended, StreamState())
    hard = blocks(plain, codes, plain.spec.recommended, None)
    assert error(faded[1][:800], hard[1][:800]) > 10 * MAX_ERROR
    assert error(faded[1][800:], hard[1][800:]) < MAX_ERROR


def test_a_fade_needs_a_look_ahead(folder) -> None:
    with pytest.raises(
        DecoderConfigError, match="renders only 0 ms past a block: raise look_ahead"
    ):
        create_decoder(folder, options={"crossfade_ms": 1, "look_ahead": 0})
