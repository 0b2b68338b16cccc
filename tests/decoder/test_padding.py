"""Windows of different lengths in one call: every row equals its window alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder import (
    AttentionKind,
    CodeRangeError,
    DecodeWindow,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
    attention_mask,
    create_decoder,
)
from decoder.window_inputs import PaddedNetwork, WindowInputs, attention_ranks, joined
from tests.closeness import error
from tests.decoder.small_codecs import PADDING, write_padding
from tests.decoder.toys import windows_of

MAX_ERROR = 1e-5  # of the loudest sample; float32 sums in another order differ by 1e-6
MASKS = [MaskPolicy(*flags) for flags in ((True, True), (True, False), (False, True))]


@pytest.fixture(scope="module", params=PADDING)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return write_padding(request.param, tmp_path_factory.mktemp(request.param))


@st.composite
def streams(draw: st.DrawFn) -> tuple[StreamingOptions, int, int, int]:
    """Draw options in frames, a stream's frames, frames of its prompt, and the index of a block."""
    sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    options = StreamingOptions(
        sizes,
        buffer=draw(st.integers(0, 6)),
        masks=draw(st.sampled_from(MASKS)),
        prepend=draw(st.sampled_from(PrependPromptSpeechTokens)),
        look_ahead=draw(st.integers(0, 3)),
    )
    return options, draw(st.integers(1, 12)), draw(st.integers(0, 9)), draw(st.integers(0, 11))


def window_of(
    network: PaddedNetwork, stream: tuple[StreamingOptions, int, int, int], seed: int
) -> DecodeWindow:
    """Return one window of such a stream, as far as the codec supports it."""
    options, frames, prompt, block = stream
    spec, rng = network.spec, np.random.default_rng(seed)
    n = spec.codes_per_frame
    masks = options.masks if spec.can_mask else MaskPolicy()
    options = replace(
        options,
        chunk_sizes=tuple(size * n for size in options.chunk_sizes or ()),
        buffer=options.buffer * n,
        look_ahead=options.look_ahead * n,
        masks=masks,
    )
    windows = windows_of(
        spec,
        options,
        rng.integers(0, spec.codebook_size, frames * n).tolist(),
        prompt_codes=rng.integers(0, spec.codebook_size, prompt * n).tolist(),
        token_offset=int(rng.integers(0, 1000)) * n,
    )
    return windows[block % len(windows)]


@settings(max_examples=20)
@given(st.lists(streams(), min_size=1, max_size=4), st.integers(0, 2**31))
def test_a_padded_row_is_its_window_alone(network, drawn, seed) -> None:
    windows = [window_of(network, stream, seed + i) for i, stream in enumerate(drawn)]
    with torch.inference_mode():
        rows = network.run(network.inputs(windows))
    for row, window in zip(rows, windows, strict=True):
        size = network.shape_of(window).num_samples
        (alone,) = network.decode([window])
        assert len(alone) == size >= window.num_samples
        assert error(row[:size], alone) < MAX_ERROR


def test_rows_may_be_longer_than_any_window(network) -> None:
    window = window_of(network, (StreamingOptions((2,), look_ahead=1), 3, 0, 0), 5)
    (alone,) = network.decode([window])
    own = network.shape_of(window)
    shape = replace(own, left=3, right=9, num_samples=own.num_samples + 50, is_exact=False)
    assert shape.holds(own)
    lines = np.ones((1, network.width(shape)), dtype=np.int64)
    network.fill(lines, [window], shape)
    with torch.inference_mode():
        row = network.run(WindowInputs((torch.from_numpy(lines),), shape))[0]
    assert len(row) == shape.num_samples
    assert error(row[: len(alone)], alone) < MAX_ERROR


def test_a_code_outside_the_codebook_is_named(network) -> None:
    window = window_of(network, (StreamingOptions((2,)), 2, 0, 0), 1)
    for code in (-1, network.spec.codebook_size):
        bad = replace(window, codes=(*window.codes[:-1], code))
        with pytest.raises(CodeRangeError, match=f"code {code} is outside"):
            network.inputs([window, bad])


@given(streams(), st.integers(0, 99))
def test_ranks_are_equivalent_to_the_mask(stream, seed) -> None:
    spec = create_decoder("ramp").spec
    options, frames, prompt, block = stream
    windows = windows_of(spec, options, range(frames), prompt_codes=range(prompt))
    window = windows[block % len(windows)]
    sees, ranks = attention_ranks(window)
    mask = attention_mask(window, AttentionKind.BIDIRECTIONAL)
    assert np.array_equal(sees[:, None] >= ranks[None, :], mask)


def test_a_shape_holds_what_it_was_joined_from(network) -> None:
    stream = StreamingOptions((2, 4), buffer=5, look_ahead=2)
    windows = [window_of(network, (stream, 12, 0, block), 0) for block in range(4)]
    shapes = [network.shape_of(window) for window in windows]
    shape = joined(shapes)
    assert all(shape.holds(each) for each in shapes)
    assert not shape.is_exact
    assert joined(shapes[:1]) == shapes[0]
    assert not any(shapes[0].holds(each) for each in shapes[1:3])
