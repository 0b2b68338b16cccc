"""Metrics of all processes of a server, on one HTTP port of the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from tts.config.serve import ServeConfig
from tts.ipc.endpoints import Endpoints, ServerEndpoints
from tts.ipc.remote_client import RemoteEngineClient
from tts.ipc.replicas import ReplicatedClient
from tts.observe.engine_metrics import EngineCollector
from tts.observe.exporter import forget_process, serve_metrics
from tts.observe.metrics import Metrics

PERIOD_S = 0.5


@asynccontextmanager
async def exported_metrics(
    config: ServeConfig, endpoints: ServerEndpoints, folder: Path
) -> AsyncIterator[Callable[[int], None]]:
    """Serve the metrics inside the block; yield the function to call with a dead process's id.

    The engines' status arrives over IPC, as for a front end. Raises ConfigError when the address
    cannot be used.
    """
    metrics = Metrics()
    server = config.server
    stop = serve_metrics(metrics, server.metrics_host, server.metrics_port, folder)
    following = [asyncio.create_task(_follow(metrics.engine, endpoints.model))]
    if endpoints.text is not None:
        following.append(asyncio.create_task(_follow(metrics.text_engine, (endpoints.text,))))
    try:
        yield partial(forget_process, folder=folder)
    finally:
        for task in following:
            task.cancel()
        await asyncio.wait(following)
        await asyncio.to_thread(stop)


async def _follow(collector: EngineCollector, endpoints: Sequence[Endpoints]) -> None:
    """Update the snapshot of an engine, or of replicas."""
    client: RemoteEngineClient | ReplicatedClient
    if len(endpoints) == 1:
        client = await RemoteEngineClient.connect(endpoints[0], "metrics")
    else:
        clients = [RemoteEngineClient(each, "metrics") for each in endpoints]
        client = await ReplicatedClient.connect(clients, waits_for_all=False)
    try:
        while True:
            collector.status = await client.status()
            await asyncio.sleep(PERIOD_S)
    finally:
        await client.close()
