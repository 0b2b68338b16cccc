"""Captured calls of codecs with kept states, with a recorder that repeats the function itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from decoder import (
    CodeRangeError,
    DecoderConfigError,
    DecodeRequest,
    DecodeWindow,
    PrependPromptSpeechTokens,
    StreamingOptions,
    StreamState,
    create_decoder,
    render,
)
from decoder.cuda.state_graphs import StateGraphs, call_frames
from decoder.kept_states import StatefulNetwork
from tests.closeness import error
from tests.decoder.cuda.test_graphs import repeat
from tests.decoder.small_codecs import WRITERS, audio_of, random_codes
from tests.decoder.toys import windows_of

CODECS = ("mimi", "nanocodec", "qwen3_tts_tokenizer_12hz")
ROWS = 4
STATES = 12
MAX_ERROR = 1e-5  # of the loudest sample; float32 sums in another order differ by 1e-6


@pytest.fixture(scope="module", params=CODECS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp(request.param)
    WRITERS[request.param](folder)
    return create_decoder(folder, options={"max_batch": ROWS, "stateful": True})


@pytest.fixture(scope="module")
def graphs(network: StatefulNetwork) -> StateGraphs:
    return captured(network)


def captured(network: StatefulNetwork, num_states: int = STATES) -> StateGraphs:
    graphs = StateGraphs(network, repeat, num_states)
    graphs.capture_schedule(network.spec.recommended)
    return graphs


def stream(network: StatefulNetwork, frames: int, seed: int = 0) -> list[DecodeWindow]:
    """Return the windows of a stream with the recommended options."""
    codes = random_codes(network, frames, seed)
    start = 7 * seed * network.spec.codes_per_frame
    return windows_of(network.spec, network.spec.recommended, codes, token_offset=start)


def crowd(decoder: StateGraphs, streams: Sequence[Sequence[DecodeWindow]]) -> list[np.ndarray]:
    """Render streams of which two begin with each call; return the audio of each."""
    states = [StreamState() for _ in streams]
    parts: list[list[np.ndarray]] = [[] for _ in streams]
    for turn in range(max(map(len, streams)) + len(streams)):
        due = [k for k, own in enumerate(streams) if 0 <= turn - k // 2 < len(own)]
        ready = [DecodeRequest(streams[k][turn - k // 2], states[k]) for k in due]
        for k, samples in zip(due, render(decoder, ready), strict=True):
            parts[k].append(samples)
    return [np.concatenate(own) for own in parts]


def alone(network: StatefulNetwork, windows: Sequence[DecodeWindow]) -> np.ndarray:
    state = StreamState()
    return np.concatenate([render(network, [DecodeRequest(w, state)])[0] for w in windows])


def test_streams_at_different_places_share_calls(graphs, network) -> None:
    """Full calls and calls with rows left over, first, middle and last blocks."""
    streams = [stream(network, 30 + 5 * seed, seed) for seed in range(6)]
    before = graphs.num_replays
    got = crowd(graphs, streams)
    assert graphs.num_replays - before < sum(map(len, streams)) / 2
    for windows, samples in zip(streams, got, strict=True):
        assert error(samples, alone(network, windows)) < MAX_ERROR


def test_streamed_audio_is_that_of_the_whole(graphs, network) -> None:
    """Every block runs in a graph, also a last one of a length of its own."""
    codes = random_codes(network, 29)
    before = graphs.num_replays
    got = audio_of(graphs, codes, network.spec.recommended)
    assert graphs.num_replays == before + 5
    assert error(got, audio_of(network, codes)) < MAX_ERROR


def test_a_first_block_behind_a_voice_prompt_runs_without_a_graph(graphs, network) -> None:
    prompt, codes = random_codes(network, 11, seed=1), random_codes(network, 14)
    options = StreamingOptions(
        network.spec.recommended.chunk_sizes, prepend=PrependPromptSpeechTokens.ONCE
    )
    windows = windows_of(network.spec, options, codes, prompt_codes=prompt)
    before = graphs.num_replays
    assert error(crowd(graphs, [windows])[0], alone(network, windows)) < MAX_ERROR
    assert graphs.num_replays == before + len(windows) - 1


def test_windows_of_different_lengths_in_one_call(graphs, network) -> None:
    """The callers group windows, but a first one may have a context."""
    prompt = random_codes(network, 2, seed=1)
    options = StreamingOptions((4 * network.spec.codes_per_frame,), prepend="once")
    windows = [
        windows_of(network.spec, options, random_codes(network, 4, seed), prompt_codes=own)[0]
        for seed, own in enumerate(([], prompt, [], prompt))
    ]
    assert {graphs.batch_key(window) for window in windows} == {options.chunk_sizes[0]}
    for decoder in (graphs, network):
        rows, kept = decoder.decode_next(windows, [None] * 4)
        assert [state.num_frames for state in kept] == [4, 6, 4, 6]
        for row, window in zip(rows, windows, strict=True):
            assert error(row, network.decode([window])[0]) < MAX_ERROR


def test_on_a_cpu_neighbours_change_no_bit(network) -> None:
    windows = [stream(network, 4, seed)[0] for seed in range(3)]
    rows, _ = network.decode_next(windows, [None] * 3)
    expected = torch.cat([network.decode([window]) for window in windows])
    assert torch.equal(rows, expected)


def test_a_place_is_free_when_its_stream_has_ended(graphs, network) -> None:
    windows = stream(network, 9)
    states = [StreamState() for _ in range(3)]
    for window in windows:
        render(graphs, [DecodeRequest(window, state) for state in states])
        assert graphs.pool.num_free == STATES - 3
    states.pop()
    assert graphs.pool.num_free == STATES - 2
    states[0].kept = None
    assert graphs.pool.num_free == STATES - 1
    states.clear()
    assert graphs.pool.num_free == STATES


def test_a_failed_call_keeps_nothing(graphs, network) -> None:
    first, second, third, *_ = stream(network, 30)
    state = StreamState()
    render(graphs, [DecodeRequest(first, state)])
    kept = state.kept
    with pytest.raises(DecoderConfigError, match="does not follow the stream's state"):
        render(graphs, [DecodeRequest(w, state) for w in (second, second)])
    assert state.kept is kept
    assert graphs.pool.num_free == STATES - 1
    parts = render(graphs, [DecodeRequest(w, state) for w in (second, third)])
    expected = alone(network, [first, second, third])[first.num_samples :]
    assert error(np.concatenate(parts), expected) < MAX_ERROR
    del kept, state
    assert graphs.pool.num_free == STATES


def test_more_streams_than_places_have_memory_of_their_own(network) -> None:
    graphs = captured(network, num_states=2)
    streams = [stream(network, 30, seed) for seed in range(5)]
    for windows, samples in zip(streams, crowd(graphs, streams), strict=True):
        assert error(samples, alone(network, windows)) < MAX_ERROR
    assert graphs.num_replays < sum(map(len, streams))
    assert graphs.pool.num_free == 2


def test_a_wrong_code_is_refused_before_anything_runs(graphs, network) -> None:
    (window, *_) = stream(network, 9)
    bad = (*window.codes[:-1], network.spec.codebook_size)
    wrong = DecodeWindow(
        **{name: getattr(window, name) for name in window.__slots__} | {"codes": bad}
    )
    before = graphs.num_replays
    with pytest.raises(CodeRangeError):
        graphs.decode_next([window, wrong], [None, None])
    assert (graphs.num_replays, graphs.pool.num_free) == (before, STATES)


def test_chunks_and_shorter_last_blocks_are_captured(network) -> None:
    spec = network.spec

    def frames(*sizes: int) -> list[int]:
        chunks = tuple(size * spec.codes_per_frame for size in sizes)
        return call_frames(spec, StreamingOptions(chunks))

    assert frames(1, 2, 4) == [1, 2, 3, 4]
    assert frames(2, 50) == [1, 2, 3, 4, 5, 6, 7, 50]
    assert call_frames(spec, StreamingOptions()) == []
