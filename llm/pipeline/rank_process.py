"""`python -m llm.pipeline.rank_process`: the process of a rank other than 0, started by rank 0."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import threading
from pathlib import Path

import torch

from llm.parallel.process_group import ProcessGroup
from llm.pipeline.base import TextGenerationPipelineInterface
from llm.pipeline.ranks import RankLaunch
from llm.pipeline.registry import create_rank


def follow(pipeline: TextGenerationPipelineInterface) -> None:
    """Run rank 0's steps on another rank; returns when rank 0 sends None."""
    while (step := pipeline.runner.group.broadcast(None)) is not None:
        for request_id in step.released:
            pipeline.release(request_id)
        pipeline.run(step.batch)


def main() -> None:
    """Run one rank until rank 0 ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains first
    launch: RankLaunch = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_leader, args=(launch.meeting,), daemon=True).start()
    name = f"rank {launch.rank}: %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=launch.log_level, stream=sys.stderr, format=name)
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
    follow(create_rank(config, group))


def _end_with_leader(meeting: Path) -> None:
    """End the process when rank 0 has closed this process's standard input, or was killed."""
    os.read(sys.stdin.fileno(), 1)
    shutil.rmtree(meeting.parent, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
