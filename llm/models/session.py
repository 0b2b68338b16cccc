"""`EngineSession`: what models on one device share: the device and the kernel switches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from llm.models.profiling import Profiler
from llm.models.step_trace import StepTrace


@dataclass(slots=True)
class EngineSession:
    """Set by `PipelineConfig.configure_session`."""

    device: torch.device
    gpu_profiling: str = "off"
    use_experimental_kernels: bool = False
    use_vendor_blas: bool = False
    pdl_level: int = 0
    trace: StepTrace | None = None

    def trace_steps(self, path: Path, after: int, steps: int) -> None:
        """Have some steps traced."""
        self.trace = StepTrace(path, after, steps)

    @property
    def profiler(self) -> Profiler:
        """Names phases at the level that was set."""
        return Profiler(self.gpu_profiling, str(self.device), self.trace)
