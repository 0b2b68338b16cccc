"""Life cycle of the servers in one process: listen, load, warm up, serve, drain.

`load` determines whether the engine runs in the same process or in another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Protocol

from tts.cli.program import end_process
from tts.config.packages import check_packages
from tts.config.pipeline import PrometheusMetricsMode
from tts.config.serve import ServeConfig
from tts.config.server import ServerConfig
from tts.factory import WARM_UP_CODES, Service, create_service
from tts.observe.exporter import register, serve_metrics
from tts.observe.metrics import Metrics
from tts.processes.child import Ready, Signals
from tts.processes.collector import collect_regularly, tune_gc
from tts.riva import service as riva_service
from tts.server.server import SpeechServer

logger = logging.getLogger("tts.serve")

PROTOCOLS = (riva_service.PROTOCOL,)
"""Protocols of others that are served on the same port."""

Load = Callable[[SpeechServer], Awaitable[Service]]


class ProtocolServer(Protocol):
    """Server of a protocol in addition to gRPC, which shares the gRPC server's context and access.

    It starts before the model is loaded. The state of the shared CallTracker decides whether calls
    are accepted, and a drain waits for the calls of all protocols there.
    """

    name: str

    @property
    def address(self) -> str:
        """Return host:port as a client writes it."""

    async def start(self) -> None:
        """Bind the port and accept connections. Raises ConfigError when that is not possible."""

    async def stop(self) -> None:
        """Cancel the remaining calls and close the port; does nothing when called again."""


def protocol_servers(config: ServerConfig, server: SpeechServer) -> list[ProtocolServer]:
    """Return the servers of the protocols that are on, not started."""
    found: list[ProtocolServer] = []
    if config.http_port is not None:
        check_packages(
            "http_port", "http", ("starlette", "uvicorn", "python_multipart", "websockets")
        )
        from tts.http.server import HttpServer

        found.append(HttpServer(config, server.host, server.access))
    if config.wyoming_port is not None:
        from tts.wyoming.server import WyomingServer

        found.append(WyomingServer(config, server.host, server.access))
    return found


async def stop_all(server: SpeechServer, others: Sequence[ProtocolServer]) -> None:
    """Stop the servers of all protocols."""
    await asyncio.gather(server.stop(), *(other.stop() for other in others))


async def serve_calls(
    config: ServeConfig,
    signals: Signals,
    load: Load,
    ready: Callable[[Ready], None],
    folder: Path | None = None,
    warm_up_codes: int = WARM_UP_CODES,
) -> int:
    """Serve until a signal; return the exit status.

    With a `folder` this process exports the metrics of all processes that write to it.
    `warm_up_codes` as in `Service.warm_up`.
    """
    server = SpeechServer(config.server, PROTOCOLS)
    others = protocol_servers(config.server, server)
    async with AsyncExitStack() as ending:
        ending.push_async_callback(stop_all, server, others)
        await server.start()
        for other in others:
            await other.start()
            logger.info("%s on %s", other.name, other.address)
        logger.info("listening on %s, loading %s", server.address, config.model.model.model_path)
        service = await _loaded(load(server), signals)
        if service is None:
            end_process(0)  # a loading thread cannot be interrupted
        ending.push_async_callback(service.close)
        await service.warm_up(warm_up_codes)
        tune_gc()
        collect_regularly(asyncio.get_running_loop())
        ending.enter_context(expose_metrics(config, server.host.metrics, folder))
        ending.push_async_callback(stop_all, server, others)  # calls end before their engine
        await server.serve(service)
        ready(_ready_report(server, others, service))
        await signals.asked.wait()
        if not await server.drain():
            logger.warning("%d calls did not finish in time", server.host.calls.num_open)
    logger.info("drained")
    return 0


async def serve_in_process(config: ServeConfig, folder: Path | None = None) -> int:
    """Serve with the engine in this process; return the exit status."""

    async def load(_: SpeechServer) -> Service:
        return await asyncio.to_thread(create_service, config.model, config.server, config.text)

    return await serve_calls(
        config, Signals(), load, lambda ready: print(ready, flush=True), folder
    )


def expose_metrics(config: ServeConfig, metrics: Metrics, folder: Path | None) -> ExitStack:
    """Export the metrics as configured; closing the result stops that.

    Raises ConfigError when the address cannot be used.
    """
    mode, server = config.model.prometheus_metrics_mode, config.server
    is_shown_here = mode is PrometheusMetricsMode.LAUNCH_SERVER or folder is not None
    with ExitStack() as undo:
        undo.callback(register(metrics))
        if is_shown_here:
            undo.callback(serve_metrics(metrics, server.metrics_host, server.metrics_port, folder))
        return undo.pop_all()


async def _loaded(loading: Awaitable[Service], signals: Signals) -> Service | None:
    """Return the model's components; None when a signal arrives first."""
    loaded = asyncio.ensure_future(loading)
    asked = asyncio.ensure_future(signals.asked.wait())
    await asyncio.wait((loaded, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    return loaded.result() if loaded.done() else None


def _ready_report(
    server: SpeechServer, others: Sequence[ProtocolServer], service: Service
) -> Ready:
    voices = service.synthesizer.voices.voices() if service.synthesizer else ()
    addresses = tuple((other.name, other.address) for other in others)
    models = ",".join(served.model for served in service.services)
    return Ready(server.address, models, tuple(v.name for v in voices), addresses)
