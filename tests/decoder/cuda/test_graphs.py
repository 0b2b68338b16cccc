"""Captured decode calls, with a recorder that repeats the function itself: needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decoder import (
    AudioDecoder,
    CodeRangeError,
    DecodeWindow,
    create_decoder,
    with_graphs,
)
from decoder.cuda.graphs import CapturedDecoder, batch_sizes, schedule_windows
from decoder.window_inputs import WindowNetwork
from tests.closeness import error
from tests.decoder.small_codecs import (
    PADDING,
    WRITERS,
    random_codes,
)
from tests.decoder.toys import windows_of

MAX_ERROR = 1e-5  # of the loudest sample; float32 sums in another order differ by 1e-6

ROWS = 4
FRAMES = 161  # three full blocks of every codec, and a last one of a length of its own


def repeat(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record like a graph: the replay calls the function again and writes to the same tensor."""
    output = work()

    def replay() -> None:
        output.copy_(work())

    return replay, output


@pytest.fixture(scope="module", params=sorted(WRITERS.keys() - set(PADDING)))
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    WRITERS[request.param](folder)
    return create_decoder(folder, options={"max_batch": ROWS}, allow_pickle=True)


def recorded(network: AudioDecoder) -> CapturedDecoder:
    assert isinstance(network, WindowNetwork)
    decoder = CapturedDecoder(network, repeat)
    decoder.capture(schedule_windows(network, network.spec.recommended))
    return decoder


def rows_of(network: AudioDecoder, count: int, block: int) -> list[DecodeWindow]:
    """Return one block of so many streams at different positions."""
    options = network.spec.recommended
    spec = network.spec
    streams = [
        windows_of(
            spec,
            options,
            random_codes(network, FRAMES, seed),
            token_offset=7 * seed * spec.codes_per_frame,
        )
        for seed in range(count)
    ]
    return [windows[block] for windows in streams]


def test_a_replay_sounds_like_the_network(network: AudioDecoder) -> None:
    decoder = recorded(network)
    for block in (0, 1, 2, 1):
        for count in (3, 1, 4):
            windows = rows_of(network, count, block)
            expected = torch.cat([network.decode([window]) for window in windows])
            before = decoder.num_replays
            got = decoder.decode(windows)
            assert decoder.num_replays == before + 1
            span = slice(windows[0].num_samples)
            assert error(got[:, span], expected[:, span]) < MAX_ERROR


def test_other_shapes_are_rendered_as_ever(network: AudioDecoder) -> None:
    decoder = recorded(network)
    windows = windows_of(network.spec, network.spec.recommended, random_codes(network, FRAMES))[-1:]
    assert torch.equal(decoder.decode(windows), network.decode(windows))
    assert decoder.num_replays == 0


def test_a_wrong_code_is_refused_before_anything_runs(network: AudioDecoder) -> None:
    decoder = recorded(network)
    (window,) = rows_of(network, 1, 0)
    bad = (*window.codes[:-1], network.spec.codebook_size)
    with pytest.raises(CodeRangeError):
        decoder.decode([replace(window, codes=bad)])
    assert decoder.num_replays == 0


def test_batch_sizes_are_powers_of_two_and_between_them_up_to_the_most() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(8) == (1, 2, 4, 8)
    assert batch_sizes(12) == (1, 2, 4, 8, 12)
    assert batch_sizes(40) == (1, 2, 4, 8, 12, 16, 24, 32, 40)


def test_on_a_cpu_nothing_is_recorded(network: AudioDecoder) -> None:
    assert with_graphs(network, network.spec.recommended) is network
