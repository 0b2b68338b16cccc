"""The whole service on a GPU: text in, audio out, with and without the GPU optimisations."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes import LlamaShape, build_tiny_checkpoint, tiny_config
from tests.tts.family_checkpoints import write_orpheus
from tts.config.defaults import embedded_folder
from tts.config.pipeline import AUTO_DECODER
from tts.engine.local_client import LocalEngineClient
from tts.factory import create_service
from tts.speech.types import AudioChunk, SamplingOverrides, SpeechRequest, SynthesizedSpeech

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EMBEDDED = embedded_folder()
HEADS_OF_64 = LlamaShape(hidden=256, heads=4, kv_heads=2, intermediate=256)
TEXTS = ("Hello.", "One two three.", "Did he? Yes.", "By the river.")


def speak(config: Any, *texts: str) -> list[SynthesizedSpeech]:
    """Synthesize greedily, all texts at once."""
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


def check_both_ways(checkpoint: Path, model: dict[str, Any], **values: Any) -> None:
    """Compare eager execution with captured forwards, overlap and the codec's captured calls: as
    many tokens, and the same audio up to the codec's rounding.
    """
    slow = values | {"model": model | {"disable_cuda_graph": True}, "max_num_steps": 1}
    plain = speak(tiny_config(checkpoint, **slow), *TEXTS)
    fast = values | {"model": model, "enable_overlap_scheduler": True}
    found_all = speak(tiny_config(checkpoint, **fast), *TEXTS)
    for expected, found in zip(plain, found_all, strict=True):
        assert found.result.usage == expected.result.usage
        then, now = (np.frombuffer(said.audio, "<i2").astype(float) for said in (expected, found))
        assert np.abs(then - now).max() < 0.02 * np.abs(then).max()


def test_the_same_speech_however_it_is_decoded(tiny_checkpoint: Path) -> None:
    """float32, so that the tokens are the same; with torch's attention."""
    check_both_ways(tiny_checkpoint, {"quantization_encoding": "float32"})


def test_the_same_speech_over_flashinfer(tmp_path: Path) -> None:
    """bfloat16, in which tokens are only the same if sums always have one order."""
    pytest.importorskip("flashinfer", reason="needs FlashInfer, the extra gpu")
    checkpoint = build_tiny_checkpoint(tmp_path / "model", shape=HEADS_OF_64)
    model = {"quantization_encoding": "bfloat16", "attention_backend": "flashinfer"}
    check_both_ways(checkpoint, model | {"batch_invariant": True})


def orpheus(folder: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Write an Orpheus without weights; return its folder, the options of the model, the others."""
    checkpoint = write_orpheus(folder)
    config = json.loads((checkpoint / "config.json").read_text())
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    (checkpoint / "config.json").write_text(json.dumps(config | sizes))
    (checkpoint / "model.safetensors").unlink()
    model = {
        "quantization_encoding": "bfloat16",
        "attention_backend": "flashinfer",
        "batch_invariant": True,
    }
    values = {"audio_decoder": AUTO_DECODER, "run_model_test_mode": True, "max_length": 1280}
    return checkpoint, model, values


def test_the_same_speech_with_a_codec_that_pads(tmp_path: Path) -> None:
    """Orpheus with random weights and SNAC, the rest as above."""
    pytest.importorskip("flashinfer", reason="needs FlashInfer, the extra gpu")
    checkpoint, model, values = orpheus(tmp_path / "model")
    check_both_ways(checkpoint, model, **values)


def test_streams_of_a_crowd_sound_like_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orpheus as above, 24 streams at once: the model waits for the decoder at times."""
    pytest.importorskip("flashinfer", reason="needs FlashInfer, the extra gpu")
    checkpoint, model, values = orpheus(tmp_path / "model")
    values |= {"enable_overlap_scheduler": True, "pace_streams": True}
    config = tiny_config(checkpoint, model=model, **values)
    service = create_service(config)
    synthesizer, waits = service.synthesizer, list[bool]()
    assert synthesizer is not None
    assert isinstance(service.client, LocalEngineClient)
    loop = service.client._decode_loop
    may_wait = loop.may_wait

    def watched(num_live: int, has_step: bool) -> bool:
        waits.append(may_wait(num_live, has_step))
        return waits[-1]

    monkeypatch.setattr(loop, "may_wait", watched)

    async def heard(number: int) -> np.ndarray:
        sampling = SamplingOverrides(temperature=0.0)
        text = f"Stream number {number}."
        request = SpeechRequest(text, sampling=sampling, max_audio_s=4.0)
        events = [event async for event in synthesizer.stream(request)]
        data = b"".join(event.data for event in events if isinstance(event, AudioChunk))
        return np.frombuffer(data, "<i2").astype(float)

    async def scenario() -> None:
        try:
            alone = [await heard(number) for number in range(24)]
            together = await asyncio.gather(*map(heard, range(24)))
        finally:
            await service.client.close()
        for then, now in zip(alone, together, strict=True):
            assert len(then) == len(now) > 0
            assert np.abs(then - now).max() < 0.02 * np.abs(then).max()

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert any(waits)


@pytest.mark.skipif(not (EMBEDDED / "model.safetensors").is_file(), reason="it is not there")
def test_the_embedded_voice_is_recognised() -> None:
    from tts.config.defaults import default_values
    from tts.config.pipeline import AudioGenerationConfig

    values = AudioGenerationConfig.merged(default_values(), {"model": {"device_specs": ["cuda:0"]}})
    (said,) = speak(AudioGenerationConfig(**values), "hello")
    samples = np.frombuffer(said.audio, "<i2")
    assert 0.2 < said.result.usage.audio_s < 2.0
    assert np.abs(samples).max() > 1000
