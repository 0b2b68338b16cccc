"""The engine's process, started by the supervisor as `python -m tts.processes`.

It exits with status 1 when its engine fails or hangs, so that the supervisor restarts it, and with
UNLOADED after an idle time, so that it is started again when it is wanted. A signal ends it; one of
several replicas finishes its requests first and exits with DRAINED, so that it is started again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any, NoReturn

import zmq

from llm import ConfigError, PipelineRole
from tts.cli.program import end_process
from tts.config.serve import ServeConfig
from tts.engine.admission import Admission
from tts.engine.client import EngineClient, EngineInfo
from tts.engine.local_client import LocalEngineClient
from tts.engine.prefill_client import PrefillClient
from tts.factory import connect_service, create_engine_client
from tts.ipc.decode_client import DecodeClient
from tts.ipc.endpoints import Endpoints, owner_only
from tts.ipc.engine_server import EngineServer
from tts.processes.child import (
    DRAINED,
    TEXT_ENGINE_NAME,
    UNLOADED,
    Launch,
    Ready,
    Reporter,
    Signals,
)
from tts.processes.collector import collect_regularly, tune_gc

logger = logging.getLogger("tts.engine")

SWITCH_S = 0.0005
"""Seconds for which one thread of Python may keep another waiting. With the default, ten times as
long, a step waits for the thread that sends audio."""
NICENESS = 10
"""Niceness of a text model's engine: where it competes for a core with the voice's, for whose next
block a listener waits, the voice's has ten times the weight."""


async def run(launch: Launch, report: Reporter) -> int:
    """Load, bind, and serve until a signal; return the exit status."""
    config = launch.config
    sys.setswitchinterval(SWITCH_S)
    if launch.name == TEXT_ENGINE_NAME:
        os.nice(NICENESS)  # threads that are started later have it, too
    gc.disable()  # until `tune_gc`: almost nothing of what is imported and loaded is garbage
    await asyncio.to_thread(import_module, "torch")
    gc.freeze()  # `tune_gc` need not visit its objects
    local, info = await asyncio.to_thread(
        create_engine_client,
        config.model,
        config.server,
        on_ranks_lost=_ranks_lost,
        num_replicas=launch.num_engines,
    )
    client: EngineClient = local
    status = 0
    signals = Signals()  # before this a signal ends the process, with nothing to clean up
    try:
        client, endpoints = await _with_role(launch, local, info)
        tune_gc()
        collect_regularly(asyncio.get_running_loop())
        server = EngineServer(client, info, endpoints, _admission(launch))
        try:
            with owner_only():
                await _start(server, _base(config))
            report(Ready(model=config.model.model.model_path))
            if await _is_idle(server, signals, config.server.unload_after_s):
                status = UNLOADED
                await server.unload()
            elif (launch.replicas or launch.is_prefill) and not server.broken.is_set():
                status = DRAINED
                await server.drain(config.server.drain_grace_s)
        finally:
            await server.close()
        if server.broken.is_set():
            end_process(1)  # without waiting for a thread that hangs
    finally:
        await client.close()
    return status


async def _with_role(
    launch: Launch, local: LocalEngineClient, info: EngineInfo
) -> tuple[EngineClient, Endpoints]:
    """Warm the engine up; return its client and its endpoints by its role.

    Instead of a server's id, the endpoints of an engine that computes prompts have the format of
    its pages: engines of other servers may use them. Raises ConfigError for engines whose pages
    cannot be used here.
    """
    config, endpoints = launch.config.model, launch.endpoints
    if launch.is_prefill:
        prefill = PrefillClient(local)
        await prefill.warm_up()
        return prefill, replace(endpoints, server_id=prefill.page_format)
    of_front_ends = {"watermark": False, "lexicon": []}
    plain = config.model_copy(update=of_front_ends)
    service = connect_service(plain, launch.config.server, local, info)
    await service.synthesize_word()  # front ends check the chat templates
    if config.pipeline_role is PipelineRole.DecodeOnly:
        bases, watermark = config.prefill_endpoints, config.kvcache_ce_watermark
        return await DecodeClient.connect(local, bases, watermark), endpoints
    return local, endpoints


def _ranks_lost(reason: str) -> NoReturn:
    """End this process, so that the model's calls end as those of a lost engine do."""
    logger.error("the engine ends: %s", reason)
    end_process(1)


async def _start(server: EngineServer, base: str) -> None:
    try:
        await server.start()
    except zmq.ZMQError as error:
        raise ConfigError(f"zmq_endpoint_base={base} cannot be used: {error}") from error


def _base(config: ServeConfig) -> str:
    return config.model.zmq_endpoint_base


def _admission(launch: Launch) -> Admission | None:
    """Return the admission of calls, if several front ends share it and there are no replicas."""
    server = launch.config.server
    if launch.replicas or server.front_ends < 2:
        return None
    return Admission(server.admission_limits)


async def _is_idle(server: EngineServer, signals: Signals, unload_after_s: float | None) -> bool:
    """Wait for a signal, a failure of the engine or the idle time; return whether it was idle."""
    waits: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(event.wait()) for event in (signals.asked, server.broken)
    ]
    if unload_after_s is not None:
        waits.append(asyncio.ensure_future(server.wait_idle(unload_after_s)))
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return not (signals.asked.is_set() or server.broken.is_set())
