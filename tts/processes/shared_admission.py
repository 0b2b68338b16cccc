"""Admission of the calls of all front ends by the supervisor, which outlives every replica.

It serves the endpoints of an engine that has no model. With one engine that engine admits the
calls: without it no call could run anyway.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import zmq

from decoder import AudioEncoding
from llm import ConfigError, Request, TokenChunk
from tts.config.server import ServerConfig
from tts.engine.admission import Admission
from tts.engine.client import AudioBlock, EncodedClip, EngineInfo, Hold, SpeechJob
from tts.errors import NotAvailableError
from tts.ipc.endpoints import Endpoints, owner_only
from tts.ipc.engine_server import EngineServer
from tts.observe.engine_status import EngineStatus

INFO = EngineInfo(codec=None, max_seq_len=0, raw_encoding=AudioEncoding.PCM_S16LE)


@asynccontextmanager
async def shared_admission(config: ServerConfig, endpoints: Endpoints) -> AsyncIterator[None]:
    """Admit calls inside the block. Raises ConfigError for an address that cannot be bound."""
    server = EngineServer(_NoModel(), INFO, endpoints, Admission(config.admission_limits))
    try:
        with owner_only():
            try:
                await server.start()
            except zmq.ZMQError as error:
                raise ConfigError(f"{endpoints.request} cannot be used: {error}") from error
        yield
    finally:
        await server.close()


class _NoModel:
    """`EngineClient` that refuses all requests."""

    codec = None

    async def generate(
        self, request: Request, hold: Hold | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        raise _not_available()
        yield

    async def speak(self, job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        raise _not_available()
        yield

    async def encode_prompt(self, samples: np.ndarray) -> EncodedClip:
        raise _not_available()

    async def status(self) -> EngineStatus:
        return EngineStatus(0, 0, 0, 0, 0, 0, 0)

    async def close(self, drain_s: float = 0.0) -> None:
        """Do nothing: there is no background task."""


def _not_available() -> NotAvailableError:
    return NotAvailableError("this process admits calls and has no model")
