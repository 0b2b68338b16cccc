"""Speech on a GPU other than the first one, without any memory on the first one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from decoder import AudioDecoder, DecodeRequest, Renderer, StreamState, create_decoder, with_graphs
from tests.decoder.small_codecs import WRITERS, audio_of, random_codes
from tests.decoder.toys import windows_of
from tests.fakes import tiny_config
from tests.gpu.test_codecs_cuda import clip_of, close
from tests.gpu.test_service_cuda import speak

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

FRAMES = 60


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_codec_on_the_second_gpu(name: str, tmp_path: Path) -> None:
    """Created on this thread and used on another one; both have the first GPU as the current
    one.
    """
    WRITERS[name](tmp_path)
    torch.cuda.set_device(0)
    before = torch.cuda.memory_allocated(0)
    plain = create_decoder(tmp_path, device="cuda:1", allow_pickle=True)
    graphs = with_graphs(plain, plain.spec.recommended)
    cpu = create_decoder(tmp_path, allow_pickle=True)
    codes = random_codes(cpu, FRAMES)
    clip = clip_of(cpu, 20)
    with ThreadPoolExecutor(1) as thread:
        launched, rendered = (
            thread.submit(work, graphs, codes).result() for work in (launched_audio, rendered_audio)
        )
        if cpu.spec.can_encode:
            encoded = np.array(thread.submit(graphs.encode, clip).result())
            assert np.mean(encoded == np.array(cpu.encode(clip))) > 0.9
        assert thread.submit(torch.cuda.current_device).result() == 0
    expected = audio_of(cpu, codes, cpu.spec.recommended)
    assert close(launched, expected)
    assert close(rendered, expected)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before


def launched_audio(decoder: AudioDecoder, codes: list[int]) -> np.ndarray:
    renderer, state = Renderer(decoder), StreamState()
    windows = windows_of(decoder.spec, decoder.spec.recommended, codes)
    batches = [renderer.launch([DecodeRequest(window, state)]) for window in windows]
    return np.concatenate([batch.samples()[0] for batch in batches])


def rendered_audio(decoder: AudioDecoder, codes: list[int]) -> np.ndarray:
    return audio_of(decoder, codes, decoder.spec.recommended)


def test_the_service_runs_on_the_second_gpu(tiny_checkpoint: Path) -> None:
    first, second = (
        speak(
            tiny_config(
                tiny_checkpoint,
                model={"device_specs": [device], "quantization_encoding": "float32"},
            ),
            "Hello.",
        )[0]
        for device in ("cuda:0", "cuda:1")
    )
    assert second.result.usage == first.result.usage
    then, now = (np.frombuffer(said.audio, "<i2").astype(float) for said in (first, second))
    assert np.abs(then - now).max() < 0.02 * np.abs(then).max()
