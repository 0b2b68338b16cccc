"""`python -m llm.pipeline.rank_process`: the process of a rank other than 0, started by rank 0."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import torch

from llm.parallel.process_group import ProcessGroup
from llm.pipeline.base import TextGenerationPipelineInterface
from llm.pipeline.rank_rows import RowDecoder
from llm.pipeline.ranks import STOP_S, RankLaunch, Step
from llm.pipeline.registry import create_rank

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # of Linux's prctl: signal that a process gets when its parent has ended


def follow(pipeline: TextGenerationPipelineInterface, steps: SimpleQueue[Step | None]) -> None:
    """Run rank 0's steps on another rank, up to the last."""
    decoder = RowDecoder()
    while (step := steps.get()) is not None:
        for request_id in step.released:
            pipeline.release(request_id)
            decoder.forget(request_id)
        pipeline.run(step.batch(decoder))


def main() -> None:
    """Run one rank until rank 0 ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains first
    _continue_after_parent()
    launch: RankLaunch = pickle.load(sys.stdin.buffer)
    steps: SimpleQueue[Step | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(steps, launch.meeting), daemon=True).start()
    name = f"rank {launch.rank}: %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=launch.log_level, stream=sys.stderr, format=name)
    try:
        _run(launch, steps)
    except BaseException:
        logger.exception("this rank has failed")
        # Its collectives also fail when rank 0 was killed, maybe before `_receive` notices that.
        shutil.rmtree(launch.meeting.parent, ignore_errors=True)
        os._exit(1)  # the interpreter's own end would wait for the thread that reads
    os._exit(0)


def _continue_after_parent() -> None:
    """Have the kernel continue this process when rank 0 ends, in case it is stopped then: it could
    not notice the end, and would keep its memory.

    Only Linux has this. The signal does nothing to a process that runs.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def _run(launch: RankLaunch, steps: SimpleQueue[Step | None]) -> None:
    """Load the model and run rank 0's steps, until the device has finished the last."""
    gc.disable()  # almost nothing of what is loaded is garbage
    torch.set_num_threads(launch.num_threads)
    config = launch.config
    if config.model.on_cpu:
        from llm.kernels.cpu.team import set_product_threads  # imports LLVM

        set_product_threads(launch.product_threads)
    config.load_architectures()
    sys.stdout.write("started\n")
    sys.stdout.flush()
    device = torch.device(config.model.device_specs[launch.rank])
    group = ProcessGroup(launch.rank, len(config.model.device_specs), launch.meeting, device)
    pipeline = create_rank(config, group)
    gc.freeze()  # a collection that visits the model's and torch's objects stops all ranks
    gc.enable()
    follow(pipeline, steps)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _receive(steps: SimpleQueue[Step | None], meeting: Path) -> NoReturn:
    """Queue rank 0's steps. Ends the process when rank 0 was killed, or some time after the last
    step.
    """
    try:
        while True:
            step = pickle.load(sys.stdin.buffer)
            steps.put(step)
            if step is None:
                sys.stdin.buffer.read()  # up to its end
                time.sleep(STOP_S)
                shutil.rmtree(meeting.parent, ignore_errors=True)
                os._exit(1)  # the last steps wait for a rank that has ended
    except (EOFError, pickle.UnpicklingError):  # an incomplete message when rank 0 was killed
        shutil.rmtree(meeting.parent, ignore_errors=True)
        os._exit(0)
    except BaseException:
        logger.exception("cannot read the next step")
        os._exit(1)


if __name__ == "__main__":
    main()
