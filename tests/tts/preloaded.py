"""`python -m tts.serve` whose engines begin with torch imported: each saves seconds of imports.

    python -m tests.tts.preloaded [NAME=VALUE ...] [options of tts.serve]

An engine is a fork of the supervisor instead of a program of its own. Its pipes, its process group,
its signals and the command line that /proc shows are as in the real server, which is started by
`tests.tts.processes.test_kills` and others. NAME=VALUE is a constant of the supervisor's module.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tts import serve
from tts.cli.program import end_process, run_program
from tts.processes import supervisor
from tts.processes.__main__ import main as run_child

PRELOADED = (
    "torch", "tts.processes.engine", "tts.families.embedded", "tts.speech.synthesizer",
    "llm.engine.engine", "llm.kernels.cpu.products", "llm.models.llama", "llm.pipeline.registry",
    "decoder.codecs.embedded.decoder",
)  # fmt: skip

start_process = asyncio.create_subprocess_exec


async def start_or_fork(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Take the place of `asyncio.create_subprocess_exec`."""
    if command[-1] == supervisor.ENGINE:
        options["preexec_fn"] = lambda: become(command)
    return await start_process(*command, **options)


def become(command: tuple[str, ...]) -> NoReturn:
    """Run an engine in this new process, whose pipes are there, instead of the program."""
    status = 1
    try:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        show(command)
        sys.argv = [*command[-2:]]
        gc.enable()
        status = run_child()
    except BaseException:
        traceback.print_exc()
    end_process(status)


def show(command: tuple[str, ...]) -> None:
    """Replace the command line of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = int(fields[45]), int(fields[46])
    shown = b"\0".join(part.encode() for part in command) + b"\0"
    assert len(shown) <= last - first
    ctypes.memmove(first, shown.ljust(last - first, b"\0"), last - first)


def main() -> int:
    arguments = sys.argv[1:]
    while arguments and "=" in arguments[0] and not arguments[0].startswith("-"):
        name, _, value = arguments.pop(0).partition("=")
        assert hasattr(supervisor, name), name
        setattr(supervisor, name, float(value))
    gc.disable()
    for module in PRELOADED:
        import_module(module)
    gc.freeze()
    asyncio.create_subprocess_exec = start_or_fork
    return serve.main(arguments)


if __name__ == "__main__":
    run_program(main)
