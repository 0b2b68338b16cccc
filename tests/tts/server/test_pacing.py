"""Many streams on a decoder that renders in parallel: the same audio as without a crowd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import pytest

from decoder import DecodeRequest, DecodeResult, Renderer
from tests.tts.serving import Serving, collect_speech, run_with_server, unary_request
from tts.engine.local_client import LocalEngineClient
from tts.engine.pacer import DeadlinePacer
from tts.factory import Service

STREAMS = 14
CALL_S = 0.03


class LaterResult(DecodeResult):
    """A result that is ready a while after it was rendered, as if on another device."""

    took_s = CALL_S

    def __init__(self, rendered: DecodeResult) -> None:
        self._rendered, self._ready_s = rendered, time.monotonic() + CALL_S

    @property
    def is_ready(self) -> bool:
        return time.monotonic() >= self._ready_s

    def samples(self) -> list[np.ndarray]:
        return self._rendered.samples()


class LaterRenderer(Renderer):
    def launch(self, ready: Sequence[DecodeRequest]) -> DecodeResult:
        return LaterResult(super().launch(ready))


def test_paced_streams_equal_their_unary_audio(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model waits for the decoder at times, and no byte depends on it."""
    assert isinstance(service.client, LocalEngineClient)
    loop = service.client._decode_loop
    assert loop._renderer is not None
    waits: list[bool] = []
    may_wait = loop.may_wait

    def watched(num_live: int, has_step: bool) -> bool:
        waits.append(may_wait(num_live, has_step))
        return waits[-1]

    async def ask(served: Serving) -> None:
        texts = [f"Sentence number {n} of a crowd." for n in range(STREAMS)]
        asked = [{"seed": n, "max_tokens": 40 + 5 * n} for n in range(STREAMS)]
        expected = [
            (await served.speech.Synthesize(unary_request(text, **values))).audio
            for text, values in zip(texts, asked, strict=True)
        ]
        monkeypatch.setattr(loop, "_pacer", DeadlinePacer())
        monkeypatch.setattr(loop, "poll_s", 0.001)
        monkeypatch.setattr(loop, "_renderer", LaterRenderer(loop._renderer.decoder))
        monkeypatch.setattr(loop, "may_wait", watched)
        calls = [
            collect_speech(served, text, **values)
            for text, values in zip(texts, asked, strict=True)
        ]
        found = await asyncio.gather(*calls)
        assert [one.data for one in found] == expected

    run_with_server(service, ask)
    assert any(waits)
