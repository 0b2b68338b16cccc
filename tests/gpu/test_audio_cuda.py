"""Audio decoding in parallel with the language model: captured calls, separate stream, no
waiting.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decoder import (
    AudioDecoder,
    DecodeRequest,
    Renderer,
    StreamingOptions,
    StreamState,
    create_decoder,
    render,
    to_s16,
    with_graphs,
)
from decoder.base import DecoderOptions, TailSlot
from decoder.cuda.graphs import CapturedDecoder
from decoder.cuda.padded_graphs import PaddedGraphs
from decoder.keyed_noise import keyed_noise, noise_key
from decoder.streaming import crossfade_samples
from decoder.window_inputs import PaddedNetwork
from tests.decoder.small_codecs import (
    WRITERS,
    audio_of,
    random_codes,
    write_padding,
)
from tests.decoder.toys import windows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = 3e-3  # of the loudest sample: TF32, and kernels chosen by the number of rows
FRAMES = 160
SLEEP_CYCLES = 400_000_000  # of the device's clock: a fifth of a second


@pytest.fixture(scope="module", params=sorted(WRITERS))
def decoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AudioDecoder:
    folder = tmp_path_factory.mktemp(request.param)
    WRITERS[request.param](folder)
    return create_decoder(folder, device="cuda", options={"max_batch": 4}, allow_pickle=True)


@pytest.fixture(scope="module")
def graphs(decoder: AudioDecoder) -> CapturedDecoder:
    graphs = with_graphs(decoder, decoder.spec.recommended)
    assert isinstance(graphs, CapturedDecoder)
    return graphs


@pytest.fixture
def padded(graphs: CapturedDecoder) -> PaddedGraphs:
    if not isinstance(graphs, PaddedGraphs):
        pytest.skip("does not pad")
    return graphs


@contextmanager
def nothing_waits() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a warning about a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def streams_of(decoder: AudioDecoder, count: int) -> list[list[DecodeRequest]]:
    """Return ready windows by block, of streams at different positions."""
    options, spec = decoder.spec.recommended, decoder.spec
    blocks = []
    for seed in range(count):
        codes = random_codes(decoder, FRAMES, seed)
        offset = 7 * seed * spec.codes_per_frame
        state = StreamState()
        windows = windows_of(spec, options, codes, token_offset=offset)
        blocks.append([DecodeRequest(window, state) for window in windows])
    return [list(block) for block in zip(*blocks, strict=True)]


def close(got: np.ndarray, expected: np.ndarray) -> bool:
    limit = TOLERANCE * np.abs(expected).max()
    return got.shape == expected.shape and bool(np.abs(got - expected).max() < limit)


def test_replayed_streams_sound_like_plain_ones(
    decoder: AudioDecoder, graphs: CapturedDecoder
) -> None:
    assert graphs.num_graphs > 0
    renderer = Renderer(graphs)
    rendered = [renderer.launch(block) for block in streams_of(decoder, 3)]
    parts = [batch.samples() for batch in rendered]
    assert graphs.num_replays > 0
    for seed in range(3):
        codes = random_codes(decoder, FRAMES, seed)
        offset = 7 * seed * decoder.spec.codes_per_frame
        expected = audio_of(decoder, codes, decoder.spec.recommended, token_offset=offset)
        assert close(np.concatenate([part[seed] for part in parts]), expected)


@pytest.fixture
def fading(decoder: AudioDecoder) -> Iterator[AudioDecoder]:
    """The decoder with a crossfade, where it has a look-ahead."""
    plain = decoder.options
    fade_ms = 10.0 if decoder.spec.recommended.look_ahead else None
    set_options(decoder, replace(plain, crossfade_ms=fade_ms))
    yield decoder
    set_options(decoder, plain)


def set_options(decoder: AudioDecoder, options: DecoderOptions) -> None:
    decoder.options = options
    if isinstance(decoder, PaddedNetwork):
        decoder.fade = crossfade_samples(decoder.spec, options)


def test_postprocessing_on_the_device_equals_the_host(fading: AudioDecoder) -> None:
    """Crossfade and 16 bits, bit for bit, of streams that share calls."""
    renderer = Renderer(fading)
    on_host, on_device = ([StreamState() for _ in range(3)] for _ in range(2))
    for number, block in enumerate(streams_of(fading, 3)):
        expected = render(fading, with_states(block, on_host))
        as_s16 = number % 2 == 1
        got = renderer.launch(with_states(block, on_device, as_s16=as_s16)).samples()
        for want, found in zip(expected, got, strict=True):
            assert found.dtype == (np.int16 if as_s16 else np.float32)
            np.testing.assert_array_equal(found, to_s16(want) if as_s16 else want)


def test_nothing_is_compiled_or_pinned_for_the_usual_calls(graphs: CapturedDecoder) -> None:
    """For any widths of rows: most are multiples of 16 samples, but not all."""
    renderer = Renderer(graphs)
    postprocessor = renderer._postprocessor
    assert postprocessor is not None
    pool = postprocessor._pool._free
    before = compiled_kernels(), {size: len(free) for size, free in pool.items()}
    for number, block in enumerate(streams_of(graphs, 3)):
        as_s16 = number % 2 == 1
        renderer.launch([replace(item, as_s16=as_s16) for item in block]).samples()
    from decoder.kernels import finish

    rows = torch.zeros((2, 1001), device="cuda")
    finish.finish(rows, postprocessor._about[:2], postprocessor._tails, torch.int16)
    assert (compiled_kernels(), {size: len(free) for size, free in pool.items()}) == before


def test_memory_is_pinned_for_the_chunks_of_the_server(decoder: AudioDecoder) -> None:
    recommended = decoder.spec.recommended
    assert recommended.chunk_sizes is not None
    larger = replace(recommended, chunk_sizes=(4 * max(recommended.chunk_sizes),))

    def pinned(options: StreamingOptions | None) -> int:
        postprocessor = Renderer(decoder, options)._postprocessor
        assert postprocessor is not None
        return max(postprocessor._pool._free)

    assert pinned(larger) >= 2 * pinned(None)
    assert pinned(None) == pinned(recommended)


def compiled_kernels() -> int:
    from decoder.kernels import finish

    kernels = finish._keep_kernel, finish._finish_kernel
    device = torch.cuda.current_device()
    return sum(len(kernel.device_caches[device][0]) for kernel in kernels)


def test_two_blocks_of_a_stream_in_one_call(fading: AudioDecoder) -> None:
    """Each is blended with the tail of the one before, which is of the same launch."""
    if not crossfade_samples(fading.spec, fading.options):
        pytest.skip("no fade")
    blocks = [block for (block,) in streams_of(fading, 1)][:4]
    host, device = StreamState(), StreamState()
    expected = render(fading, with_states(blocks, [host] * len(blocks)))
    got = Renderer(fading).launch(with_states(blocks, [device] * len(blocks))).samples()
    for want, found in zip(expected, got, strict=True):
        np.testing.assert_array_equal(found, want)
    assert isinstance(device.tail, TailSlot)


def with_states(
    ready: Sequence[DecodeRequest], states: Sequence[StreamState], *, as_s16: bool = False
) -> list[DecodeRequest]:
    return [
        replace(item, state=state, as_s16=as_s16) for item, state in zip(ready, states, strict=True)
    ]


def test_a_launch_waits_for_nothing(decoder: AudioDecoder, graphs: CapturedDecoder) -> None:
    """The device sleeps while blocks are launched; they are rendered when it wakes up."""
    renderer = Renderer(graphs)
    for warming in [renderer.launch(block) for block in streams_of(decoder, 2)[:2]]:
        warming.samples()
    first, second = streams_of(decoder, 2)[:2]
    torch.cuda.synchronize()
    with renderer._on_stream():
        torch.cuda._sleep(SLEEP_CYCLES)
    with nothing_waits():
        renderer.launch(first)
        rendered = renderer.launch(second)
    assert not rendered.is_ready
    deadline_s = time.monotonic() + 60
    while not rendered.is_ready and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert rendered.is_ready
    assert len(rendered.samples()) == 2


def test_any_mixture_is_one_launch_that_sounds_like_its_windows(
    decoder: AudioDecoder, padded: PaddedGraphs
) -> None:
    """First and last blocks, short streams, streams at different positions."""
    streams = [
        windows_of(decoder.spec, decoder.spec.recommended, random_codes(decoder, frames, frames))
        for frames in (1, 9, 37, 90)
    ]
    (lone,), (start, *_), (_, later, *_), (*_, middle, last) = streams
    for windows in ([lone, last, later, start], [last], [later, middle], [start, lone, last]):
        before = padded.num_replays
        rows = padded.decode(windows).cpu().numpy()
        assert padded.num_replays == before + 1
        launched = decoder.decode(windows).cpu().numpy()
        for row, eager, window in zip(rows, launched, windows, strict=True):
            (alone,) = decoder.decode([window]).cpu().numpy()
            assert close(row[: len(alone)], alone)
            assert close(eager[: len(alone)], alone)


def test_every_window_of_the_schedule_is_replayed(
    decoder: AudioDecoder, padded: PaddedGraphs
) -> None:
    for frames in range(1, 100, 7):
        for window in windows_of(
            decoder.spec, decoder.spec.recommended, random_codes(decoder, frames)
        ):
            before = padded.num_replays
            padded.decode([window])
            assert padded.num_replays == before + 1


def test_a_replay_allocates_nothing(decoder: AudioDecoder, graphs: CapturedDecoder) -> None:
    windows = [item.window for item in streams_of(decoder, 3)[1]]
    graphs.decode(windows)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        graphs.decode(windows)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_any_mixture_of_the_embedded_codec_is_one_launch(tmp_path: Path) -> None:
    """Its body is bfloat16 here, which is most of the difference."""
    decoder = write_padding("embedded", tmp_path, device="cuda", max_batch=4)
    graphs = with_graphs(decoder, decoder.spec.recommended)
    assert isinstance(graphs, PaddedGraphs)
    cpu = create_decoder(tmp_path, test_mode=True)
    streams = [
        windows_of(cpu.spec, cpu.spec.recommended, random_codes(cpu, count, count))
        for count in (3, 16, 70)
    ]
    (lone,), (start, second, *_), (*_, middle, last) = streams
    for windows in ([lone, last, start, second], [middle], [last, start, lone]):
        before = graphs.num_replays
        torch.cuda.synchronize()
        with nothing_waits():
            rows, launched = graphs.decode(windows), decoder.decode(windows)
        assert graphs.num_replays == before + 1
        for row, eager, window in zip(rows.cpu(), launched.cpu(), windows, strict=True):
            (alone,) = cpu.decode([window])
            limit = 0.05 * alone.abs().max()
            assert (row[: len(alone)] - alone).abs().max() < limit
            assert (eager[: len(alone)] - alone).abs().max() < limit


def test_noise_is_that_of_the_cpu() -> None:
    first = torch.tensor([[0], [-5000], [10**9]])
    cpu, cuda = keyed_noise(3, 1, first, 1000), keyed_noise(3, 1, first.cuda(), 1000).cpu()
    torch.testing.assert_close(cuda, cpu, rtol=1e-6, atol=1e-6)
    from decoder.kernels.noise import noise_of

    by_kernel = noise_of(noise_key(3, 1), first.cuda(), 1, 0, 1000).cpu()
    torch.testing.assert_close(by_kernel, cuda, rtol=1e-6, atol=1e-6)
