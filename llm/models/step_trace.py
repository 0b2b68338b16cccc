"""`StepTrace`: a trace of some steps of an engine by torch's profiler, for chrome://tracing.

step 0 ──── after ────┬──── steps ────┬── the file is written ── step …
                      └── recorded ───┘   (the engine waits meanwhile)
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


class StepTrace:
    """Records once. A step ends where the next one begins; all steps run on one thread, which may
    differ from the one that creates this.
    """

    def __init__(self, path: Path, after: int, steps: int) -> None:
        self._path, self._after, self._steps = path, after, steps
        self._begun = 0
        self._profiler: torch.profiler.profile | None = None
        set_up_profiler()

    def step(self) -> None:
        """Begin a step: start to record, or write the recorded trace, at the configured steps."""
        if self._begun == self._after:
            self._profiler = create_profiler()
            self._profiler.start()
        elif self._begun == self._after + self._steps:
            self._write()
        self._begun += 1

    def _write(self) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        export(self._profiler, self._path)
        self._profiler = None
        logger.info("a trace of %d steps is in %s", self._steps, self._path)


def set_up_profiler() -> None:
    """Initialise the profiler on the main thread, which its library requires before another thread
    records.
    """
    with create_profiler():
        pass


def export(profiler: torch.profiler.profile, path: Path) -> None:
    """Write the trace atomically. Creates missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    profiler.export_chrome_trace(str(unfinished))
    unfinished.replace(path)


def create_profiler() -> torch.profiler.profile:
    """Create a profiler of the host's operations and ranges and, with a GPU, of its kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, acc_events=True)
