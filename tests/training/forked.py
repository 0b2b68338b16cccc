"""Processes of `python -m MODULE` that begin with torch imported: each saves seconds of imports."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from io import TextIOWrapper

import torch

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = (
    "torch._dynamo", "torchaudio.functional", "training.kokoro.studio",
    "training.speech_codec.train", "training.speech_codec.train_coder",
    "training.speech_codec.train_voices", "training.speech_codec.tokenise",
    "training.speech_lm.train",
)  # fmt: skip
CONTEXT.set_forkserver_preload(list(PRELOADED))


class ForkedPopen:
    """In place of `subprocess.Popen` for a command that runs a module of ours."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], stdout: TextIOWrapper, stderr: int
    ) -> None:
        _, flag, module, *arguments = command
        assert flag == "-m"
        given = (module, arguments, dict(env), stdout.name)
        self._process = CONTEXT.Process(target=run, args=given)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        self._process.join()


def run(module: str, arguments: Sequence[str], env: Mapping[str, str], log: str) -> None:
    """Run a module's `main`, with a file for its output and its errors."""
    os.environ.update(env)
    with open(log, "w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    torch.set_num_threads(1)  # several run at once
    importlib.import_module(module).main(arguments)
