"""`Profiler`: names the phases of a step for a profiler; `StepTrace`: a trace of some steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import torch

from llm.batch import ForwardMode

STEP_RANGES = {
    ForwardMode.EXTEND: "context_encoding",
    ForwardMode.DECODE: "token_generation",
    ForwardMode.MIXED: "mixed_batch",
    ForwardMode.IDLE: "empty_batch",
}


class Profiler:
    """Ranges for torch's profiler and, on a GPU, NVTX ranges for NVIDIA's.

    `level` is off (no ranges), on (the phases of a step) or detailed (also their parts). `trace` is
    called at the beginning of each batch. A range is a context manager; one that is off is a
    `nullcontext`.
    """

    def __init__(
        self, level: str = "off", device: str = "cpu", trace: StepTrace | None = None
    ) -> None:
        self._trace = trace
        self._has_nvtx = device.startswith("cuda")
        self.range: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Make a range "sonant.NAME"."""
        self.detail: Callable[[str], AbstractContextManager[object]] = nullcontext
        """The same, at the level detailed only."""
        self.step: Callable[[ForwardMode], AbstractContextManager[object]] = nullcontext
        """Make a range around one batch of this kind."""
        if level != "off":
            self.range = self._range
        if level == "detailed":
            self.detail = self._range
        if level != "off" or trace is not None:
            self.step = self._step

    def _step(self, mode: ForwardMode) -> AbstractContextManager[object]:
        if self._trace is not None:
            self._trace.step()
        return self.range(STEP_RANGES[mode])

    def _range(self, name: str) -> AbstractContextManager[object]:
        name = f"sonant.{name}"
        recorded = torch.profiler.record_function(name)
        if not self._has_nvtx:
            return recorded
        with ExitStack() as both:
            both.enter_context(torch.cuda.nvtx.range(name))
            both.enter_context(recorded)
            return both.pop_all()


logger = logging.getLogger(__name__)


class StepTrace:
    """A trace of some steps by torch's profiler, for chrome://tracing; records once.

        step 0 ──── after ────┬──── steps ────┬── the file is written ── step …
                              └── recorded ───┘   (the engine waits meanwhile)

    A step ends where the next one begins; all steps run on one thread, which may differ from the
    one that creates this.
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
