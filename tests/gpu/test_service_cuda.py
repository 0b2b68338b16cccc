"""The whole service on a GPU: text in, audio out, with and without what makes it fast there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes import tiny_config
from tts.factory import create_service, embedded_folder
from tts.speech import SamplingOverrides, SpeechRequest, SynthesizedSpeech

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EMBEDDED = embedded_folder()


def speak(config: Any, *texts: str) -> list[SynthesizedSpeech]:
    """Greedy, all texts at once."""
    service = create_service(config)
    synthesizer = service.synthesizer
    assert synthesizer is not None

    async def all_of_them() -> list[SynthesizedSpeech]:
        try:
            sampling = SamplingOverrides(temperature=0.0)
            requests = [SpeechRequest(text, sampling=sampling, max_audio_s=4.0) for text in texts]
            return await asyncio.gather(*map(synthesizer.synthesize, requests))
        finally:
            await service.client.close()

    return asyncio.run(asyncio.wait_for(all_of_them(), 100))


def test_it_runs_on_the_gpu_unless_a_device_is_named(tiny_checkpoint: Path) -> None:
    assert tiny_config(tiny_checkpoint).model.device_specs == ["cuda:0"]


def test_the_same_speech_however_it_is_decoded(tiny_checkpoint: Path) -> None:
    """float32, so that the tokens are the same; then the audio is, up to the codec's rounding."""
    model = {"quantization_encoding": "float32"}
    texts = ["Hello.", "One two three.", "Did he? Yes.", "By the river."]
    slow = {"model": model | {"disable_cuda_graph": True}, "max_num_steps": 1}
    plain = speak(tiny_config(tiny_checkpoint, **slow), *texts)
    fast = {"model": model, "enable_overlap_scheduler": True}
    for expected, found in zip(
        plain, speak(tiny_config(tiny_checkpoint, **fast), *texts), strict=True
    ):
        assert found.result.usage == expected.result.usage
        then, now = (np.frombuffer(said.audio, "<i2").astype(float) for said in (expected, found))
        assert np.abs(then - now).max() < 0.02 * np.abs(then).max()


@pytest.mark.skipif(not (EMBEDDED / "model.safetensors").is_file(), reason="it is not there")
def test_the_embedded_voice_says_hello() -> None:
    from tts.config import AudioGenerationConfig
    from tts.factory import default_values

    values = AudioGenerationConfig.merged(default_values(), {"model": {"device_specs": ["cuda:0"]}})
    (said,) = speak(AudioGenerationConfig(**values), "hello")
    samples = np.frombuffer(said.audio, "<i2")
    assert 0.2 < said.result.usage.audio_s < 2.0
    assert np.abs(samples).max() > 1000
