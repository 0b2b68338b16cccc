"""A gRPC server's life in one process: listen, load, warm up, serve, drain.

The engine may be in the same process or behind the hop: that is what `load` decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from tts.collector import calm_collector
from tts.config import PrometheusMetricsMode
from tts.factory import Service, create_service
from tts.metrics import Metrics
from tts.metrics_export import register, serve_metrics
from tts.processes.child import Ready, Signals, end_process
from tts.serve_config import ServeConfig
from tts.server import SpeechServer
from tts.speech import SamplingOverrides, SpeechRequest

logger = logging.getLogger("tts.serve")

WARM_UP_CODES = 16

Load = Callable[[SpeechServer], Awaitable[Service]]


async def serve_calls(
    config: ServeConfig,
    signals: Signals,
    load: Load,
    ready: Callable[[Ready], None],
    folder: Path | None = None,
) -> int:
    """Serve until a signal; the exit status.

    With a `folder` this process shows the metrics of all that count in it.
    """
    server = SpeechServer(config.server)
    async with AsyncExitStack() as ending:
        ending.push_async_callback(server.stop)
        await server.start()
        logger.info("listening on %s, loading %s", server.address, config.model.model.model_path)
        service = await _loaded(load(server), signals)
        if service is None:
            end_process(0)  # a loading thread cannot be interrupted, and nobody waits for it
        ending.push_async_callback(service.client.close)
        await warm_up(service)
        calm_collector()
        ending.enter_context(expose_metrics(config, server.host.metrics, folder))
        ending.push_async_callback(server.stop)  # calls end before the engine that answers them
        await server.serve(service)
        ready(_what_is_ready(server, service))
        await signals.asked.wait()
        if not await server.drain():
            logger.warning("%d calls did not finish in time", server.host.calls.num_open)
    logger.info("drained")
    return 0


async def serve_in_process(config: ServeConfig, folder: Path | None = None) -> int:
    """Serve with the engine in this process; the exit status."""

    async def load(_: SpeechServer) -> Service:
        return await asyncio.to_thread(create_service, config.model, config.server)

    return await serve_calls(
        config, Signals(), load, lambda ready: print(ready, flush=True), folder
    )


async def warm_up(service: Service) -> None:
    """Speak a word to nobody: the first call pays for no lazy import and no first allocation.

    Raises CheckpointError for what only a first call would show.
    """
    service.prompts.check_chat()
    if service.synthesizer is not None:
        sampling = SamplingOverrides(seed=0, max_tokens=WARM_UP_CODES)
        await service.synthesizer.synthesize(SpeechRequest("Ready.", sampling=sampling))


def expose_metrics(config: ServeConfig, metrics: Metrics, folder: Path | None) -> ExitStack:
    """Put the metrics where the configuration says; closing the result undoes it.

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
    """The model's parts; None when told to stop meanwhile."""
    loaded = asyncio.ensure_future(loading)
    asked = asyncio.ensure_future(signals.asked.wait())
    await asyncio.wait((loaded, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    return loaded.result() if loaded.done() else None


def _what_is_ready(server: SpeechServer, service: Service) -> Ready:
    voices = service.synthesizer.voices.voices() if service.synthesizer else ()
    return Ready(server.address, service.model, tuple(voice.name for voice in voices))
