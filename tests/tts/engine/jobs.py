"""Speech jobs and text requests for the tiny checkpoint, and functions that await them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from decoder import MaskPolicy, StreamingOptions
from llm import Request, SamplingParams, TokenChunk
from tests.deadlines import HANG_S
from tests.vocabulary import END_OF_SPEECH, END_OF_TEXT, FIRST_CODE, FIRST_VOICE, START_OF_SPEECH
from tts.engine.admission import Admission
from tts.engine.client import AudioBlock, EngineClient, SpeechJob
from tts.ipc.remote_admission import RemoteAdmission

HOP = 640
NUM_CODES = 64
STREAMED = StreamingOptions(
    (2, 4, 8),
    buffer=8,
    masks=MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True),
)


def speech(
    request_id: str,
    text: str = "hello there",
    *,
    streaming: StreamingOptions = STREAMED,
    voice: int = 0,
    prompt_ids: tuple[int, ...] = (),
    exactly: int = 0,
    **sampling: Any,
) -> SpeechJob:
    """A job as the prompt builder makes it; `exactly` so many codes when that is given."""
    values = {"seed": 7, "max_tokens": exactly or 40, "min_tokens": exactly} | sampling
    values = {"temperature": 0.9, "top_k": 50} | values
    params = SamplingParams(
        stop_token_ids=(END_OF_SPEECH,),
        allowed_ranges=((FIRST_CODE, FIRST_CODE + NUM_CODES),),
        **values,
    )
    prompt = prompt_ids or (FIRST_VOICE + voice, *text.encode(), START_OF_SPEECH)
    return SpeechJob(Request(request_id, prompt, params), streaming)


def text(
    request_id: str, prompt: str = "once upon a time", exactly: int = 0, **sampling: Any
) -> Request:
    values = {"seed": 3, "max_tokens": exactly or 24, "min_tokens": exactly} | sampling
    values = {"stop_token_ids": (END_OF_TEXT,)} | values
    return Request(request_id, tuple(prompt.encode()), SamplingParams(**values))


async def listen(client: EngineClient, job: SpeechJob) -> list[AudioBlock]:
    return [block async for block in client.speak(job)]


async def read(client: EngineClient, request: Request) -> list[TokenChunk]:
    return [chunk async for chunk in client.generate(request)]


def samples(blocks: Sequence[AudioBlock]) -> np.ndarray:
    return np.concatenate([block.samples for block in blocks])


def run(scenario: Callable[[], Awaitable[None]], timeout_s: float = HANG_S) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), timeout_s)

    asyncio.run(bounded())


@asynccontextmanager
async def in_slot(admission: Admission | RemoteAdmission, client: str) -> AsyncIterator[None]:
    """Hold a slot while the body runs, as calls do."""
    async with admission.request(client) as slot:
        await slot.held()
        yield
