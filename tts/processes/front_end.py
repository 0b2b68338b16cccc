"""Front end of the engine's process, for all protocols.

It handles prompts, voices and formats, and holds no weights. Started by the
supervisor as `python -m tts.processes`.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from tts.factory import Service, connect_service, with_text_model
from tts.ipc.endpoints import Endpoints
from tts.ipc.remote_admission import RemoteAdmission
from tts.ipc.remote_client import RemoteEngineClient
from tts.ipc.replicas import ReplicatedClient
from tts.processes.calls import serve_calls
from tts.processes.child import (
    ENGINE_NAME,
    TEXT_ENGINE_NAME,
    Launch,
    Reporter,
    Signals,
)
from tts.server.server import SpeechServer

FEW_CODES = 3
"""Codes that a front end has spoken before it is ready: its engine has been warmed up."""


async def run(launch: Launch, report: Reporter) -> int:
    """Listen on the server's ports; serve once the engine is connected."""
    model, server_config = launch.config.model, launch.config.server
    text = launch.config.text
    for config in filter(None, (model, text)):
        config.load_architectures()  # the configuration was resolved in another process
    if model.watermark:
        import torch

        torch.set_num_threads(1)  # its operations are small, and more would wait for each other

    async def connected(endpoints: Endpoints, engine: str) -> RemoteEngineClient:
        wake = partial(report.request_engine, engine)
        return await RemoteEngineClient.connect(endpoints, launch.name, wake=wake)

    async def connected_to_model() -> RemoteEngineClient | ReplicatedClient:
        if not launch.replicas:
            return await connected(launch.endpoints, ENGINE_NAME)
        clients = [RemoteEngineClient(endpoints, launch.name) for endpoints in launch.replicas]
        # Ready means all at first; after a restart one that is being restarted is not waited for.
        return await ReplicatedClient.connect(
            clients, server_config.front_ends, waits_for_all=not launch.is_restart
        )

    async def load(server: SpeechServer) -> Service:
        client = await connected_to_model()
        # On a thread: loading the watermark takes seconds.
        service = await asyncio.to_thread(
            connect_service,
            model,
            server_config,
            client,
            client.info,
            launch.voice_folder,
            requires_lexicons=not launch.is_restart,
        )
        admitting = [client] if isinstance(client, RemoteEngineClient) else []
        if text is not None and launch.text_endpoints is not None:
            writer = await connected(launch.text_endpoints, TEXT_ENGINE_NAME)
            admitting.append(writer)
            own = connect_service(text, server_config, writer, writer.info)
            service = with_text_model(service, own)
        if launch.admission is not None:
            admitting = [await RemoteEngineClient.connect(launch.admission, launch.name)]
            ending.push_async_callback(admitting[0].close)
        if server_config.front_ends > 1:
            server.host.admission = RemoteAdmission(admitting, server.host.metrics.note_requests)
        return service

    listening = server_config.model_copy(update=dict(launch.ports))
    async with AsyncExitStack() as ending:
        own_config = replace(launch.config, server=listening)
        return await serve_calls(own_config, Signals(), load, report, warm_up_codes=FEW_CODES)
