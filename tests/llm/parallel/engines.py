"""Requests for engines on several ranks, and waits for their end."""

from __future__ import annotations

import time
from collections.abc import Callable

from llm.engine.engine import Engine
from llm.pipeline.base import TextGenerationPipelineInterface
from llm.request import Request, SamplingParams, Token
from tests.deadlines import HANG_S
from tests.llm.llama_checkpoints import random_ids


def requests() -> list[Request]:
    """Greedy and sampled requests, with prompts of several steps."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(seed=5, max_tokens=24, ignore_eos=True),
        SamplingParams(seed=6, top_k=7, top_p=0.9, max_tokens=16, ignore_eos=True),
        SamplingParams(
            temperature=0.0, repetition_penalty=1.3, max_tokens=20, ignore_eos=True, top_logprobs=2
        ),
    ]
    return [
        Request(f"r{index}", tuple(random_ids(20 + 9 * index, 96, seed=index)), sampling)
        for index, sampling in enumerate(params)
    ]


def tokens(engine: Engine) -> list[list[Token]]:
    """Run all requests at once and return their tokens."""
    streams = [engine.submit(request) for request in requests()]
    if not engine.is_running:
        engine.start()
    return [[token for chunk in stream for token in chunk.token_ids] for stream in streams]


def pipeline_of(engine: Engine) -> TextGenerationPipelineInterface:
    pipeline = engine.pipeline
    assert isinstance(pipeline, TextGenerationPipelineInterface)
    return pipeline


def wait_for(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def wait_stopped(engine: Engine) -> None:
    wait_for(lambda: not engine.is_running)
