"""Captured calls of codecs with padding, with a recorder that repeats the function itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from decoder import (
    CodeRangeError,
    DecodeRequest,
    DecodeWindow,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
    StreamState,
    create_decoder,
    render,
)
from decoder.cuda.host_memory import STAGES
from decoder.cuda.padded_graphs import PROMPT_S, PaddedGraphs, call_shapes
from decoder.window_inputs import PaddedNetwork
from tests.closeness import error
from tests.decoder.cuda.test_graphs import repeat
from tests.decoder.small_codecs import PADDING, random_codes, write_padding
from tests.decoder.toys import windows_of

ROWS = 4
MAX_ERROR = 1e-5  # of the loudest sample; float32 sums in another order differ by 1e-6


@pytest.fixture(scope="module", params=PADDING)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return write_padding(request.param, tmp_path_factory.mktemp(request.param), max_batch=ROWS)


@pytest.fixture(scope="module")
def graphs(network: PaddedNetwork) -> PaddedGraphs:
    graphs = PaddedGraphs(network, repeat)
    graphs.capture_schedule(network.spec.recommended)
    return graphs


def stream(network: PaddedNetwork, frames: int, prompt: int = 0, seed: int = 0):
    """Return the windows of a stream with the recommended options, with a voice prompt if
    supported.
    """
    spec = network.spec
    if spec.recommended.prepend is PrependPromptSpeechTokens.NEVER:
        prompt = 0
    return windows_of(
        spec,
        spec.recommended,
        random_codes(network, frames, seed),
        prompt_codes=random_codes(network, prompt, seed + 1),
        token_offset=7 * seed * spec.codes_per_frame,
    )


def check(graphs: PaddedGraphs, network: PaddedNetwork, windows: Sequence[DecodeWindow]) -> None:
    """Check that one launch renders each row like its window alone."""
    before = graphs.num_replays
    rows = graphs.decode(windows)
    assert graphs.num_replays == before + 1
    assert len(rows) == len(windows)
    for row, window in zip(rows, windows, strict=True):
        (alone,) = network.decode([window])
        assert error(row[: len(alone)], alone) < MAX_ERROR


def test_any_mixture_is_one_launch(graphs, network) -> None:
    """First, middle and last blocks, with and without a prompt, of different streams."""
    long, short = stream(network, 90, seed=1), stream(network, 3, prompt=8, seed=2)
    spoken = stream(network, 61, prompt=20, seed=3)
    for windows in (
        [long[0], long[-1], short[0], spoken[0]],
        [long[2], spoken[1]],
        [spoken[-1]],
        [long[1], long[0], spoken[2]],
    ):
        assert len({graphs.batch_key(window) for window in windows}) == 1
        check(graphs, network, windows)


def test_nothing_that_a_stream_can_be_runs_without_a_graph(graphs, network) -> None:
    """Streams of every length, prompts of every length."""
    longest = graphs._shapes[graphs._common].num_frames + 40
    keys = set()
    for frames in range(1, longest):
        windows = stream(network, frames, prompt=frames % 70)
        keys |= {graphs.batch_key(window) for window in windows}
    assert all(isinstance(key, int) for key in keys)
    rates = network.spec.codes_per_second / network.spec.codes_per_frame
    (first, *_) = stream(network, 30, prompt=int(PROMPT_S * rates))
    assert isinstance(graphs.batch_key(first), int)


def test_a_long_prompt_is_a_call_of_few_rows(graphs, network) -> None:
    if network.spec.recommended.prepend is PrependPromptSpeechTokens.NEVER:
        pytest.skip("supports no prompt")
    windows = [stream(network, 20, prompt=300, seed=seed)[0] for seed in range(3)]
    assert graphs.batch_key(windows[0]) > graphs.batch_key(stream(network, 20)[0])
    before = graphs.num_replays
    rows = graphs.decode(windows)
    assert graphs.num_replays == before + 3
    for row, window in zip(rows, windows, strict=True):
        (alone,) = network.decode([window])
        assert error(row[: len(alone)], alone) < MAX_ERROR


def test_a_stream_is_rendered_like_without_graphs(graphs, network) -> None:
    states = StreamState(), StreamState()
    for window in stream(network, 77, prompt=9):
        got, expected = (
            render(decoder, [DecodeRequest(window, state)])[0]
            for decoder, state in zip((graphs, network), states, strict=True)
        )
        assert np.abs(got - expected).max() < MAX_ERROR


def test_a_clients_own_sizes_are_rendered_without_graphs(graphs, network) -> None:
    n = network.spec.codes_per_frame
    sizes = (max(network.spec.recommended.chunk_sizes) + n,)
    options = replace(network.spec.recommended, chunk_sizes=sizes)
    (window, *_) = windows_of(network.spec, options, random_codes(network, 60))
    before = graphs.num_replays
    assert graphs.batch_key(window) == window.shape
    assert torch.equal(graphs.decode([window]), network.decode([window]))
    assert graphs.num_replays == before


def test_masked_schedules_are_recorded_with_masks(network) -> None:
    if not network.spec.can_mask:
        pytest.skip("no attention")
    options = replace(
        network.spec.recommended,
        masks=MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True),
    )
    graphs = PaddedGraphs(network, repeat)
    graphs.capture_schedule(replace(options, prepend=PrependPromptSpeechTokens.ONCE))
    windows = windows_of(network.spec, options, random_codes(network, 100))
    plain = stream(network, 100)
    check(graphs, network, [windows[0], windows[3], plain[2], windows[-1]])


def test_a_wrong_code_is_refused_before_anything_runs(graphs, network) -> None:
    good, bad = stream(network, 10)[0], stream(network, 10, seed=1)[0]
    bad = replace(bad, codes=(*bad.codes[:-1], network.spec.codebook_size))
    before = graphs.num_replays
    with pytest.raises(CodeRangeError):
        graphs.decode([good, bad])
    assert graphs.num_replays == before
    for _ in range(STAGES + 1):
        check(graphs, network, [good])


def test_the_shapes_of_the_published_schedules() -> None:
    """SNAC, in frames of 7 codes: a first block and its look-ahead, and room for all later ones."""
    spec = create_decoder("snac", test_mode=True)
    assert isinstance(spec, PaddedNetwork)
    shapes, common = call_shapes(spec, spec.spec.recommended)
    assert common == 1
    assert [(s.left, s.right, s.num_samples) for s in shapes] == [(0, 4, 2048), (3, 11, 8 * 2048)]
    shapes, _ = call_shapes(spec, StreamingOptions((28,), buffer=21, look_ahead=21))
    assert [(s.left, s.right) for s in shapes] == [(0, 7), (3, 7)]
    assert call_shapes(spec, StreamingOptions()) == ([], 0)
