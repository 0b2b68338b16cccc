"""`python -m tts.serve`: load a model, answer gRPC until told to stop.

The engine and the front ends are processes that this one supervises; with `--front-ends 0` they
are all in this one. Prints one line when ready. The first SIGTERM or SIGINT drains, the second
ends at once.
Exit status: 0 drained · 1 something failed · 2 the configuration is wrong · 128 + signal: at once.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tts import __version__
from tts.config import (
    AudioGenerationConfig,
    PrometheusMetricsMode,
    ServerConfig,
    add_config_flags,
    config_from_args,
    process_environment,
)
from tts.console import prepare_streams
from tts.logs import configure_logging
from tts.metrics_export import metrics_folder
from tts.model_values import complete_values
from tts.serve_config import WRONG_CONFIGURATION, ServeConfig, refuse


def build_parser() -> argparse.ArgumentParser:
    """The command line: a flag for every configuration field."""
    parser = argparse.ArgumentParser(
        prog="python -m tts.serve",
        usage="%(prog)s [options]",
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
        metavar="REVISION",
        help="its branch, tag or commit; short for --model.huggingface-revision",
    )


def read_config(args: argparse.Namespace) -> ServeConfig:
    """Both configurations from parsed arguments, file, environment and the model's own.

    The model is found first, and downloaded where it must be.
    """
    model = config_from_args(AudioGenerationConfig, args, base=complete_values)
    model.resolve()  # also where `defer_resolve` has left it to us
    return ServeConfig(model, config_from_args(ServerConfig, args))


def shared_folder(config: ServeConfig) -> AbstractContextManager[Path | None]:
    """Where several processes count together; None where each counts for itself."""
    if config.model.prometheus_metrics_mode is PrometheusMetricsMode.LAUNCH_MULTIPROC_SERVER:
        return metrics_folder(process_environment())
    return nullcontext()


async def run(config: ServeConfig, folder: Path | None = None) -> int:
    """Serve until a signal; the exit status. `folder`: see `shared_folder`."""
    if config.server.front_ends:
        from tts.processes.supervisor import supervise

        return await supervise(config, folder)
    from tts.processes.calls import serve_in_process

    return await serve_in_process(config, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    prepare_streams()
    args = build_parser().parse_args(argv)
    # gRPC's core writes what clients send to standard error as it came, past our log.
    process_environment().setdefault("GRPC_VERBOSITY", "NONE")
    try:
        server = config_from_args(ServerConfig, args)
        configure_logging(server.log_level, server.log_format)  # a download is told, too
        config = read_config(args)
        with shared_folder(config) as folder:
            return asyncio.run(run(config, folder))
    except WRONG_CONFIGURATION as error:
        return refuse(error)
    except KeyboardInterrupt:  # while a model was downloaded: nobody listened for signals yet
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
