"""Published codecs on a CUDA device: equality with the CPU, batches like single windows, states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from decoder import (
    AudioDecoder,
    DecodeRequest,
    PrependPromptSpeechTokens,
    Renderer,
    StreamState,
    create_decoder,
    render,
    with_graphs,
)
from decoder.cuda.graphs import CapturedDecoder
from decoder.cuda.state_graphs import StateGraphs
from tests.decoder.small_codecs import (
    WRITERS,
    audio_of,
    random_codes,
    write_mimi,
    write_source_filter,
)
from tests.decoder.toys import windows_of
from tests.gpu.test_audio_cuda import nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = 3e-3  # of the loudest sample: products and convolutions use TF32 or float16


class Pair(NamedTuple):
    folder: Path
    cpu: AudioDecoder
    cuda: AudioDecoder


@pytest.fixture(scope="module", params=sorted(WRITERS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    WRITERS[request.param](folder)
    cpu, cuda = (
        create_decoder(folder, device=device, allow_pickle=True) for device in ("cpu", "cuda")
    )
    return Pair(folder, cpu, cuda)


def close(got: np.ndarray, expected: np.ndarray) -> bool:
    limit = TOLERANCE * np.abs(expected).max()
    return got.shape == expected.shape and np.abs(got - expected).max() < limit


def clip_of(decoder: AudioDecoder, frames: int) -> np.ndarray:
    """Return noise."""
    count = frames * int(decoder.spec.samples_per_frame)
    return (0.2 * np.random.default_rng(0).normal(size=count)).astype(np.float32)


def test_the_device_sounds_like_the_cpu(pair: Pair) -> None:
    codes = random_codes(pair.cpu, 30)
    assert close(audio_of(pair.cuda, codes), audio_of(pair.cpu, codes))
    options = pair.cpu.spec.recommended
    assert close(audio_of(pair.cuda, codes, options), audio_of(pair.cpu, codes, options))


def test_a_batch_sounds_like_its_windows_alone(pair: Pair) -> None:
    rows = [random_codes(pair.cpu, 20, seed) for seed in range(4)]
    streams = [windows_of(pair.cpu.spec, pair.cpu.spec.recommended, codes) for codes in rows]
    for block in zip(*streams, strict=True):
        together = render(pair.cuda, [DecodeRequest(window) for window in block])
        for window, got in zip(block, together, strict=True):
            assert close(got, render(pair.cuda, [DecodeRequest(window)])[0])


def skip_without_encoder(pair: Pair) -> None:
    if not pair.cuda.spec.can_encode:
        pytest.skip("the codec has no encoder")


def test_recordings_become_the_same_codes(pair: Pair) -> None:
    skip_without_encoder(pair)
    clip = clip_of(pair.cpu, 20)
    cpu, cuda = (np.array(decoder.encode(clip)) for decoder in (pair.cpu, pair.cuda))
    # a value at the border of two codes may be rounded either way
    assert np.mean(cpu == cuda) > 0.9


def test_a_recording_is_encoded_in_parallel_with_other_work(pair: Pair) -> None:
    """The stream of the language model sleeps; codes are available before it wakes up."""
    skip_without_encoder(pair)
    clip = clip_of(pair.cuda, 20)
    expected = pair.cuda.encode(clip)
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * 10**9)  # cycles: two seconds
    asleep = torch.cuda.Event()
    asleep.record()
    assert pair.cuda.encode(clip) == expected
    assert not asleep.query()
    torch.cuda.synchronize()


def test_only_recorded_calls_change_the_precision_of_the_process(pair: Pair) -> None:
    """Work that runs in parallel with eager calls is not affected."""
    seen: list[str] = []
    decoder = pair.cuda
    note = decoder._network.register_forward_pre_hook(  # type: ignore[attr-defined] # of its class
        lambda *_: seen.append(torch.get_float32_matmul_precision())
    )
    audio_of(decoder, random_codes(decoder, 3))
    assert seen == ["highest"]
    graphs = with_graphs(decoder, decoder.spec.recommended)
    assert isinstance(graphs, CapturedDecoder)
    assert set(seen[1:]) == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"
    note.remove()


def test_a_state_is_kept_on_the_device(tmp_path: Path) -> None:
    write_mimi(tmp_path)
    decoder = create_decoder(tmp_path, device="cuda", options={"stateful": True})
    codes, state = random_codes(decoder, 24), StreamState()
    windows = windows_of(decoder.spec, decoder.spec.recommended, codes)
    parts = [render(decoder, [DecodeRequest(window, state)])[0] for window in windows]
    assert close(np.concatenate(parts), audio_of(create_decoder(tmp_path), codes))


@pytest.mark.parametrize("codec", ["mimi", "nanocodec", "qwen3_tts_tokenizer_12hz"])
@pytest.mark.parametrize("num_streams", [None, 2])
def test_streams_with_states_share_captured_calls(
    tmp_path: Path, codec: str, num_streams: int | None
) -> None:
    """Streams at different places, with blocks of all lengths, some behind a voice prompt; with two
    places for states the others have memory of their own.
    """
    WRITERS[codec](tmp_path)
    plain = create_decoder(tmp_path)
    options = {"stateful": True, "max_batch": 4}
    network = create_decoder(tmp_path, device="cuda", options=options)
    once = replace(plain.spec.recommended, prepend=PrependPromptSpeechTokens.ONCE)
    graphs = with_graphs(network, once, num_streams)
    assert isinstance(graphs, StateGraphs)
    renderer = Renderer(graphs, once)
    prompts = [random_codes(plain, 5 * (k % 2), seed=90 + k) for k in range(7)]
    rows = [random_codes(plain, 25 + 3 * k, seed=k) for k in range(7)]
    streams = [
        windows_of(network.spec, once, codes, prompt_codes=prompt)
        for codes, prompt in zip(rows, prompts, strict=True)
    ]
    states: list[StreamState | None] = [StreamState() for _ in streams]
    parts: list[list[np.ndarray]] = [[] for _ in streams]
    free = graphs.pool.num_free
    for turn in range(max(map(len, streams)) + len(streams)):
        due = [k for k, own in enumerate(streams) if 0 <= turn - k // 2 < len(own)]
        ready = []
        for k in due:
            state = states[k]
            assert state is not None
            ready.append(DecodeRequest(streams[k][turn - k // 2], state))
        launched = renderer.launch(ready)
        for k, samples in zip(due, launched.samples(), strict=True):
            parts[k].append(samples)
            if turn - k // 2 == len(streams[k]) - 1:
                states[k] = None
    assert graphs.num_replays < sum(map(len, streams))
    ready.clear()
    del launched, state
    assert graphs.pool.num_free == free
    for codes, prompt, own in zip(rows, prompts, parts, strict=True):
        hop = int(plain.spec.samples_per_code)
        expected = audio_of(plain, prompt + codes)[len(prompt) * hop :]
        assert close(np.concatenate(own), expected)


def test_a_captured_call_with_states_waits_for_nothing(tmp_path: Path) -> None:
    """It also allocates nothing."""
    write_mimi(tmp_path)
    network = create_decoder(tmp_path, device="cuda", options={"stateful": True, "max_batch": 4})
    graphs = with_graphs(network, network.spec.recommended)
    rows = [random_codes(network, 40, seed) for seed in range(3)]
    streams = [windows_of(network.spec, network.spec.recommended, codes) for codes in rows]
    kept: list[object] = [None] * 3
    calls = [list(block) for block in zip(*streams, strict=True)]
    for windows in calls[:2]:
        _, kept = graphs.decode_next(windows, kept)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with nothing_waits():
        for windows in calls[2:]:
            _, kept = graphs.decode_next(windows, kept)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()


def test_streams_of_pulses_and_noise_share_calls(tmp_path: Path) -> None:
    """New and continued streams at different places, block by block in one call each."""
    write_source_filter(tmp_path)
    cpu, cuda = (create_decoder(tmp_path, device=device) for device in ("cpu", "cuda"))
    options, voices = cpu.spec.recommended, [(1, 20, 63, 7), (9, 9, 2, 0), (4, 5, 6, 7)]
    streams = [
        windows_of(cpu.spec, options, random_codes(cpu, 40 + 9 * k, k), prompt_codes=voice)
        for k, voice in enumerate(voices)
    ]
    states = [StreamState() for _ in streams]
    parts: list[list[np.ndarray]] = [[] for _ in streams]
    for turn in range(max(map(len, streams)) + len(streams)):
        due = [k for k, own in enumerate(streams) if 0 <= turn - k < len(own)]
        ready = [DecodeRequest(streams[k][turn - k], states[k]) for k in due]
        for k, samples in zip(due, render(cuda, ready), strict=True):
            parts[k].append(samples)
    for k, own in enumerate(streams):
        state = StreamState()
        expected = np.concatenate([render(cpu, [DecodeRequest(w, state)])[0] for w in own])
        got = np.concatenate(parts[k])
        assert got.shape == expected.shape
        assert np.abs(got - expected).mean() < 0.02 * np.abs(expected).mean()
    clip = clip_of(cpu, 60)
    assert np.mean(np.array(cpu.encode(clip)) == np.array(cuda.encode(clip))) > 0.7
