"""`python -m tts.serve`: load a model, answer gRPC until told to stop.

Prints one line when ready. The first SIGTERM or SIGINT drains, the second ends at once.
Exit status: 0 drained · 1 something failed · 2 the configuration is wrong · 128 + signal: at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from decoder import DecoderConfigError
from llm import CapacityError, CheckpointError, ConfigError
from tts import __version__
from tts.config import (
    AudioGenerationConfig,
    PrometheusMetricsMode,
    ServerConfig,
    add_config_flags,
    config_from_args,
    describe_error,
    process_environment,
)
from tts.factory import Service, create_service
from tts.logs import configure_logging
from tts.metrics import Metrics
from tts.metrics_export import metrics_folder, register, serve_metrics
from tts.model_values import complete_values
from tts.server import SpeechServer
from tts.speech import SamplingOverrides, SpeechRequest

logger = logging.getLogger("tts.serve")

PROGRAM = "serve"
WARM_UP_CODES = 16
WRONG_CONFIGURATION = (
    ConfigError,
    CheckpointError,
    CapacityError,
    DecoderConfigError,
    FileNotFoundError,
)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Both halves of the configuration."""

    model: AudioGenerationConfig
    server: ServerConfig


def build_parser() -> argparse.ArgumentParser:
    """The command line: a flag for every configuration field."""
    parser = argparse.ArgumentParser(
        prog="python -m tts.serve",
        allow_abbrev=False,
        description="Serve speech and text over gRPC (default: the embedded voice).",
        epilog="Values come from flags, then --config-file, then SONANT_… variables.",
    )
    parser.add_argument("--version", action="version", version=f"sonant {__version__}")
    _add_short_names(parser)
    add_config_flags(parser, ServerConfig)
    add_config_flags(parser, AudioGenerationConfig)
    return parser


def _add_short_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        dest="model.model_path",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="checkpoint: a folder, or OWNER/NAME on the Hugging Face hub (default: the voice "
        "that comes with this); short for --model.model-path",
    )
    parser.add_argument(
        "--revision",
        dest="model.huggingface_revision",
        default=argparse.SUPPRESS,
        help="its branch, tag or commit; short for --model.huggingface-revision",
    )


def read_config(args: argparse.Namespace) -> ServeConfig:
    """Both configurations from parsed arguments, file, environment and the model's own.

    The model is found first, and downloaded where it must be.
    """
    return ServeConfig(
        model=config_from_args(AudioGenerationConfig, args, base=complete_values),
        server=config_from_args(ServerConfig, args),
    )


def ready_line(server: SpeechServer, service: Service) -> str:
    """What is printed when calls are taken: address, model, voices."""
    voices = service.synthesizer.voices.voices() if service.synthesizer else ()
    names = ", ".join(voice.name for voice in voices) or "none"
    return f"ready: {server.address} model={service.model} voices={names}"


class Signals:
    """SIGTERM and SIGINT: the first asks to drain, the second ends the process at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            logger.warning("%s again: ending at once", number.name)
            _end_process(128 + number)
        logger.info("%s: draining", number.name)
        self.asked.set()


async def run(config: ServeConfig, folder: Path | None = None) -> int:
    """Serve until a signal; the exit status. `folder`: see `shared_folder`."""
    signals = Signals()
    server = SpeechServer(config.server)
    async with AsyncExitStack() as ending:
        ending.push_async_callback(server.stop)
        await server.start()
        logger.info("listening on %s, loading %s", server.address, config.model.model.model_path)
        service = await _load(config, signals)
        if service is None:
            _end_process(0)  # the loading thread cannot be interrupted, and nobody waits for it
        ending.push_async_callback(service.client.close)
        await _warm_up(service)
        ending.enter_context(expose_metrics(config, server.host.metrics, folder))
        ending.push_async_callback(server.stop)  # calls end before the engine that answers them
        await server.serve(service)
        print(ready_line(server, service), flush=True)
        await signals.asked.wait()
        if not await server.drain():
            logger.warning("%d calls did not finish in time", server.host.calls.num_open)
    logger.info("drained")
    return 0


async def _load(config: ServeConfig, signals: Signals) -> Service | None:
    """The model, loaded on another thread; None when told to stop meanwhile."""
    loading = asyncio.ensure_future(asyncio.to_thread(create_service, config.model, config.server))
    asked = asyncio.ensure_future(signals.asked.wait())
    await asyncio.wait((loading, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if loading.done():
        return loading.result()
    return None


async def _warm_up(service: Service) -> None:
    """Speak a word to nobody: the first call pays for no lazy import and no first allocation."""
    if service.synthesizer is not None:
        sampling = SamplingOverrides(seed=0, max_tokens=WARM_UP_CODES)
        await service.synthesizer.synthesize(SpeechRequest("Ready.", sampling=sampling))


def expose_metrics(config: ServeConfig, metrics: Metrics, folder: Path | None) -> ExitStack:
    """Put the metrics where the configuration says; closing the result undoes it.

    Raises ConfigError when the address cannot be used.
    """
    with ExitStack() as undo:
        undo.callback(register(metrics))
        if config.model.prometheus_metrics_mode is not PrometheusMetricsMode.INSTRUMENT_ONLY:
            server = config.server
            undo.callback(serve_metrics(metrics, server.metrics_host, server.metrics_port, folder))
        return undo.pop_all()


def shared_folder(config: ServeConfig) -> AbstractContextManager[Path | None]:
    """Where several processes count together; None where each counts for itself."""
    if config.model.prometheus_metrics_mode is PrometheusMetricsMode.LAUNCH_MULTIPROC_SERVER:
        return metrics_folder(process_environment())
    return nullcontext()


def _end_process(status: int) -> NoReturn:
    """End without waiting for any thread."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    args = build_parser().parse_args(argv)
    try:
        config = read_config(args)
        configure_logging(config.server.log_level, config.server.log_format)
        with shared_folder(config) as folder:
            return asyncio.run(run(config, folder))
    except ValidationError as error:
        return _refuse(describe_error(error))
    except WRONG_CONFIGURATION as error:
        return _refuse(str(error))
    except KeyboardInterrupt:  # while a model was downloaded: nobody listened for signals yet
        return 128 + signal.SIGINT


def _refuse(message: str) -> int:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
