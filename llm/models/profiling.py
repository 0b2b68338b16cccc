"""`Profiler`: names the phases of a step for a profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from llm.batch import ForwardMode
from llm.models.step_trace import StepTrace

STEP_RANGES = {
    ForwardMode.EXTEND: "context_encoding",
    ForwardMode.DECODE: "token_generation",
    ForwardMode.MIXED: "mixed_batch",
    ForwardMode.IDLE: "empty_batch",
}
_OFF: AbstractContextManager[object] = nullcontext()


class Profiler:
    """Ranges for torch's profiler and, on a GPU, NVTX ranges for NVIDIA's.

    `level` is off (no ranges), on (the phases of a step) or detailed (also their parts). `trace` is
    called at the beginning of each batch.
    """

    def __init__(
        self, level: str = "off", device: str = "cpu", trace: StepTrace | None = None
    ) -> None:
        self.level = level
        self._trace = trace
        self._has_nvtx = device.startswith("cuda")

    def range(self, name: str, *, detail: bool = False) -> AbstractContextManager[object]:
        """Return a context manager for a range "sonant.NAME"; `detail`: only at the level
        detailed.
        """
        if self.level == "off" or (detail and self.level != "detailed"):
            return _OFF
        return self._range(f"sonant.{name}")

    def step(self, mode: ForwardMode) -> AbstractContextManager[object]:
        """Return a context manager for a range around one batch of this kind."""
        if self._trace is not None:
            self._trace.step()
        return self.range(STEP_RANGES[mode])

    def _range(self, name: str) -> AbstractContextManager[object]:
        recorded = torch.profiler.record_function(name)
        if not self._has_nvtx:
            return recorded
        with ExitStack() as both:
            both.enter_context(torch.cuda.nvtx.range(name))
            both.enter_context(recorded)
            return both.pop_all()
