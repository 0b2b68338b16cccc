"""`python -m tts.serve`: load a model and serve it over gRPC until a signal.

The engine and the front ends are processes that this one supervises; with `--front-ends 0` they
run in this process. One line on standard output means ready. The first SIGTERM or SIGINT drains,
the second ends at once.
Exit status: 0 drained, 1 failed, 2 wrong configuration, 128 + signal: ended at once.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tts.cli.console import prepare_streams
from tts.cli.parser import HelpFormatter, add_information
from tts.cli.program import run_program
from tts.config.defaults import complete_values
from tts.config.environment import prepare_libraries, process_environment
from tts.config.flags import SHORT_FLAGS, add_config_flags
from tts.config.pipeline import (
    AudioGenerationConfig,
    PrometheusMetricsMode,
    config_from_args,
)
from tts.config.serve import WRONG_CONFIGURATION, ServeConfig, refuse
from tts.config.server import ServerConfig
from tts.observe.logs import configure_logging

PROGRAM = "python -m tts.serve"


def build_parser(*, show_all: bool = False, program: str = PROGRAM) -> argparse.ArgumentParser:
    """Create the command line: a flag for every configuration field."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [options]",
        allow_abbrev=False,
        add_help=False,
        formatter_class=HelpFormatter,
        description="Serve speech and text over gRPC (default: the built-in voice).",
        epilog="Values come from flags, then --config-file, then variables such as "
        "SONANT_MAX_BATCH_SIZE and SONANT_MODEL__DEVICE_SPECS.",
    )
    add_config_flags(
        parser, ServerConfig, AudioGenerationConfig, short_flags=SHORT_FLAGS, show_all=show_all
    )
    add_information(parser, lambda: build_parser(show_all=True, program=program))
    return parser


def read_config(args: argparse.Namespace) -> ServeConfig:
    """Read all configurations from parsed arguments, file, environment and the models' defaults.

    Models of the hub are downloaded first, unless they are cached.
    """
    model = config_from_args(AudioGenerationConfig, args, base=complete_values)
    model.resolve()  # which `defer_resolve` leaves to this command
    if model.lexicon:
        from tts.text.lexicon.files import check_lexicon

        for lexicon in model.lexicon:
            check_lexicon(Path(lexicon))  # before a process starts
    return ServeConfig.of(model, config_from_args(ServerConfig, args))


def shared_folder(config: ServeConfig) -> AbstractContextManager[Path | None]:
    """Return the folder where processes add their metrics up; None if each has its own."""
    if config.model.prometheus_metrics_mode is PrometheusMetricsMode.LAUNCH_MULTIPROC_SERVER:
        from tts.observe.exporter import metrics_folder

        return metrics_folder(process_environment())
    return nullcontext()


async def run(config: ServeConfig, folder: Path | None = None) -> int:
    """Serve until a signal and return the exit status. `folder`: see `shared_folder`."""
    if config.server.front_ends:
        from tts.processes.supervisor import supervise

        return await supervise(config, folder)
    from tts.processes.calls import serve_in_process

    return await serve_in_process(config, folder)


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run the command and return its exit status. `program`: its name in the help."""
    prepare_streams()
    args = build_parser(program=program).parse_args(argv)
    prepare_libraries()
    try:
        server = config_from_args(ServerConfig, args)
        configure_logging(server.log_level, server.log_format)  # before a download, which logs
        config = read_config(args)
        with shared_folder(config) as folder:
            return asyncio.run(run(config, folder))
    except WRONG_CONFIGURATION as error:
        return refuse(error)
    except KeyboardInterrupt:  # during a download: no signal handler yet
        return 128 + signal.SIGINT


if __name__ == "__main__":
    run_program(main)
