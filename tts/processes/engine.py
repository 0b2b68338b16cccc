"""`python -m tts.processes.engine`: the model behind the hop. Started by the supervisor.

It ends by itself, with status 1, when its engine breaks down or hangs: a new process is better.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from llm import ConfigError
from tts.admission import Admission
from tts.collector import calm_collector
from tts.factory import connect_service, create_engine_client
from tts.host import admission_limits
from tts.ipc.engine_server import EngineServer
from tts.processes.calls import warm_up
from tts.processes.child import Launch, Ready, Reporter, Signals, end_process, run_child
from tts.serve_config import ServeConfig

logger = logging.getLogger("tts.engine")

OWNER_ONLY = 0o077


async def run(launch: Launch, report: Reporter) -> int:
    """Load, bind, serve until told to stop."""
    config = launch.config
    client, facts = await asyncio.to_thread(create_engine_client, config.model, config.server)
    signals = Signals()  # until here a signal ends the process, which nothing would be lost by
    try:
        await warm_up(connect_service(config.model, config.server, client, facts))
        calm_collector()
        server = EngineServer(client, facts, launch.endpoints, _admission(config))
        try:
            with owner_only():
                await _start(server, _base(config))
            report(Ready(model=config.model.model.model_path))
            is_broken = await _first(signals.asked, server.broken)
        finally:
            await server.close()
        if is_broken:
            end_process(1)  # a thread that hangs is not waited for
    finally:
        await client.close()
    return 0


async def _start(server: EngineServer, base: str) -> None:
    try:
        await server.start()
    except zmq.ZMQError as error:
        raise ConfigError(f"zmq_endpoint_base={base} cannot be used: {error}") from error


def _base(config: ServeConfig) -> str:
    return config.model.zmq_endpoint_base


def _admission(config: ServeConfig) -> Admission | None:
    """The places of calls, where front ends share them."""
    if config.server.front_ends < 2:
        return None
    return Admission(admission_limits(config.server))


@contextmanager
def owner_only() -> Iterator[None]:
    """Files that are made meanwhile are for this user only: sockets can be reached by no other."""
    former = os.umask(OWNER_ONLY)
    try:
        yield
    finally:
        os.umask(former)


async def _first(asked: asyncio.Event, broken: asyncio.Event) -> bool:
    """Wait for either; whether it was the second."""
    waits = [asyncio.ensure_future(event.wait()) for event in (asked, broken)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return broken.is_set()


if __name__ == "__main__":
    sys.exit(run_child(run))
