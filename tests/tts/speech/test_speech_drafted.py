"""Speech with a draft model: the same audio, in fewer steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes import LlamaShape, build_tiny_checkpoint, tiny_config
from tests.tts.ramp import TEXT, run
from tts.factory import Service, create_service
from tts.speech.types import AudioChunk, SamplingOverrides, SpeechRequest

REQUEST = SpeechRequest(TEXT, sampling=SamplingOverrides(seed=11, max_tokens=80))


async def audio_of(events: AsyncIterator[object]) -> bytes:
    return b"".join([event.data async for event in events if isinstance(event, AudioChunk)])


def spoken(service: Service) -> bytes:
    assert service.synthesizer is not None
    return run(audio_of(service.synthesizer.stream(REQUEST)))


@pytest.mark.parametrize("is_perfect", [True, False])
def test_a_draft_model_does_not_change_the_audio(
    tiny_checkpoint: Path, tiny_service: Service, tmp_path: Path, is_perfect: bool
) -> None:
    expected = spoken(tiny_service)
    assert len(expected) > 16_000
    small = LlamaShape(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64)
    draft = tiny_checkpoint
    if not is_perfect:
        draft = build_tiny_checkpoint(tmp_path / "draft", seed=2, shape=small)
    service = create_service(tiny_config(tiny_checkpoint, draft_model={"model_path": str(draft)}))
    try:
        assert spoken(service) == expected
    finally:
        asyncio.run(service.client.close())
