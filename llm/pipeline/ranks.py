"""Ranks of a model on several devices: one process for each, which all run the same steps.

    rank 0      the engine's process: schedules, executes, returns results
    rank 1 …    python -m llm.pipeline.rank_process: receive each batch, and execute it, too

Batches are pickles on each process's standard input, which no other process can write to. None is
the last: a rank runs the batches before it, since rank 0's collectives wait for them.
Every rank samples every token, from the same logits and the same seeds, so that no rank waits for
another one's tokens. A rank that fails ends all ranks: their collectives are out of step then.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from llm.batch import ForwardMode, ScheduledBatch, ScheduledRow, StepOutput
from llm.config import PipelineConfig
from llm.errors import ConfigError, RanksLostError
from llm.models.hf_config import HuggingFaceConfig
from llm.models.registry import model_class
from llm.parallel.process_group import ProcessGroup
from llm.pipeline.rank_rows import RowChange, RowDecoder, RowEncoder

logger = logging.getLogger(__name__)

MEETING = "meeting"  # file at which the ranks find each other
STOP_S = 10.0  # a rank that has not ended after this time is killed


class Step(NamedTuple):
    """One step of rank 0, for the other ranks."""

    released: tuple[str, ...]  # requests that have ended since the previous step
    rows: tuple[ScheduledRow | RowChange, ...]
    mode: ForwardMode
    num_steps: int
    is_plain: bool

    def batch(self, decoder: RowDecoder) -> ScheduledBatch:
        """Return the batch."""
        rows = decoder.decode(self.rows)
        return ScheduledBatch(rows, self.mode, self.num_steps, self.is_plain)


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """Launch parameters of a rank's process."""

    config: PipelineConfig
    rank: int
    meeting: Path
    num_threads: int  # of torch, on a CPU
    product_threads: int  # of large products, on a CPU
    log_level: int


class RankLeader:
    """Rank 0's connection to the other ranks, and their processes."""

    def __init__(self, config: PipelineConfig) -> None:
        """Start the processes and wait until all ranks are connected.

        Raises `ConfigError` for a model that cannot be split, `RanksLostError` for a process that
        ends during the start.
        """
        devices = config.model.device_specs
        facts = HuggingFaceConfig.read(config.model.model_path)
        kind = model_class(facts, runs_alone=config.runs_alone)
        kind.check_shards(facts, len(devices), config.ep_size)
        _check_exist(devices)
        self._on_lost: Callable[[str], None] | None = None
        self._lost = ""
        self._lock = threading.Lock()
        self._released: list[str] = []
        self._encoder = RowEncoder()
        folder = self.folder = Path(tempfile.mkdtemp(prefix="sonant-ranks-"))
        """Temporary folder of these processes."""
        self._processes = [
            _start(config, rank, folder / MEETING) for rank in range(1, len(devices))
        ]
        self._is_ending = threading.Event()
        self._end = weakref.finalize(self, _end, self._processes, self._is_ending)
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        try:
            self._wait_started()
            self.group = ProcessGroup(0, len(devices), folder / MEETING, torch.device(devices[0]))
        except BaseException:
            self._end()
            self._remove()
            raise
        for rank, process in enumerate(self._processes, start=1):
            watch = threading.Thread(
                target=_watch, args=(weakref.ref(self), rank, process, self._is_ending), daemon=True
            )
            watch.start()

    def _wait_started(self) -> None:
        for rank, process in enumerate(self._processes, start=1):
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RanksLostError(f"rank {rank} ended with status {process.wait()} at its start")

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of ranks 1, 2, …"""
        return tuple(process.pid for process in self._processes)

    @property
    def is_lost(self) -> bool:
        """Whether a rank has failed, so that no more steps can run."""
        return bool(self._lost)

    def release(self, request_id: str) -> None:
        """Release a request on the other ranks, with the next step."""
        self._released.append(request_id)
        self._encoder.forget(request_id)

    def execute(
        self, batch: ScheduledBatch, run: Callable[[ScheduledBatch], StepOutput]
    ) -> StepOutput:
        """Run a batch on all ranks; `run` is this rank's part.

        Raises the error of the first step that fails, and `RanksLostError` for all later ones.
        """
        with self._lock:
            if self._lost:
                raise RanksLostError(self._lost)
        released, self._released = tuple(self._released), []
        try:
            rows = self._encoder.encode(batch.rows)
            step = Step(released, rows, batch.mode, batch.num_steps, batch.is_plain)
            message = pickle.dumps(step)
            for process in self._processes:
                _send(process, message)
            return run(batch)
        except BaseException as error:
            self.lose(f"a step failed on rank 0: {error!r}")
            raise

    def lose(self, reason: str) -> None:
        """Note the reason why no more steps can run; the first one counts.

        Other threads that find the ranks lost wait until `on_lost` has returned: where it ends the
        process, they report nothing.
        """
        with self._lock:
            if self._lost:
                return
            self._lost = reason
            logger.error("%s: no step of this model can run any more", reason)
            self._remove()  # `on_lost` may end this process
            if self._on_lost is not None:
                self._on_lost(reason)
        self.group.abort()

    def notify(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` once, from any thread, with the reason when no more steps can run."""
        with self._lock:
            self._on_lost = on_lost
            if self._lost:
                on_lost(self._lost)

    def end(self) -> None:
        """Let the other ranks finish their steps, and end their processes. Idempotent."""
        with self._lock:
            lost, self._lost = self._lost, self._lost or "the model was shut down"
        if not lost:
            for process in self._processes:
                with contextlib.suppress(BrokenPipeError):  # it has just ended
                    _send(process, pickle.dumps(None))
        if self._end():
            self.group.abort()  # the device may wait for a rank that was killed

    def close(self) -> None:
        """End the other ranks and the connections to them. Idempotent.

        CUDA graphs with collectives must have been freed.
        """
        self.end()
        self.group.close()
        self._remove()  # now: NCCL's threads may have read its file


def _check_exist(devices: Sequence[str]) -> None:
    """Raise `ConfigError` for a GPU that is not there."""
    if devices[0] == "cpu":
        return
    count = torch.cuda.device_count()
    for name in devices:
        if (torch.device(name).index or 0) >= count:
            raise ConfigError(f"device {name} requested, {count} CUDA devices found")


def _start(config: PipelineConfig, rank: int, meeting: Path) -> subprocess.Popen[bytes]:
    """Start the process of a rank, in a session of its own: Ctrl-C is for rank 0."""
    size = len(config.model.device_specs)
    product_threads = 1
    if config.model.on_cpu:
        from llm.kernels.cpu.team import teams  # imports LLVM: not needed on a GPU

        product_threads = max(1, teams.num_threads // size)
    launch = RankLaunch(
        config,
        rank,
        meeting,
        max(1, torch.get_num_threads() // size),
        product_threads,
        logging.getLogger().getEffectiveLevel(),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "llm.pipeline.rank_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    _send(process, pickle.dumps(launch))
    return process


def _send(process: subprocess.Popen[bytes], message: bytes) -> None:
    """Write to a rank's standard input. It stays open: its end means that rank 0 has ended."""
    assert process.stdin is not None
    process.stdin.write(message)
    process.stdin.flush()


def _watch(
    leader: weakref.ref[RankLeader],
    rank: int,
    process: subprocess.Popen[bytes],
    is_ending: threading.Event,
) -> None:
    """Report a process that ends by itself."""
    status = process.wait()
    found = leader()
    if found is not None and not is_ending.is_set():
        found.lose(f"rank {rank} ended with status {status}")


def _end(processes: list[subprocess.Popen[bytes]], is_ending: threading.Event) -> bool:
    """End processes by the end of their standard input; kill those that do not end, and return
    whether there were any.
    """
    is_ending.set()
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended before it read everything
                process.stdin.close()
    if were_killed := _running(processes, "and are killed"):
        for process in processes:
            process.kill()
        _running(processes, "although they were killed")  # a driver's call holds them
    for process in processes:
        if process.stdout is not None:
            process.stdout.close()
    return were_killed


def _running(processes: list[subprocess.Popen[bytes]], what_follows: str) -> bool:
    """Wait until all have ended, for at most `STOP_S`; return whether some run, and log which."""
    deadline_s, ranks = time.monotonic() + STOP_S, []
    for rank, process in enumerate(processes, start=1):
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            ranks.append(rank)
    if ranks:
        logger.error("ranks %s have not ended within %g s %s", ranks, STOP_S, what_follows)
    return bool(ranks)
