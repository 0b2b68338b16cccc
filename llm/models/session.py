"""`EngineSession`: the device and kernel switches that models on one device share."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from llm.kernels.registry import PDL_CAPABILITY, KernelSet
from llm.models.profiling import Profiler, StepTrace
from llm.parallel.group import Group, NullGroup

logger = logging.getLogger(__name__)

LONGEST_HOLD_S = 0.5  # so that nothing depends on the end of a hold


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class EngineSession:
    """Device and switches; set by `PipelineConfig.configure_session`."""

    device: torch.device
    gpu_profiling: str = "off"
    use_experimental_kernels: bool = False
    use_vendor_blas: bool = False
    pdl_level: int = 0
    use_legacy_module: bool = True  # otherwise torch.compile generates the kernels
    trace: StepTrace | None = None
    group: Group = field(default_factory=NullGroup)  # ranks that share each model
    may_run: threading.Event = field(default_factory=_set_event)
    """Unset while a step waits between two layers, see `wait_if_held`."""

    def wait_if_held(self) -> None:
        """Wait until the step may continue, for at most `LONGEST_HOLD_S`; between two layers."""
        if not self.may_run.wait(LONGEST_HOLD_S):
            self.may_run.set()

    def trace_steps(self, path: Path, after: int, steps: int) -> None:
        """Trace some steps."""
        self.trace = StepTrace(path, after, steps)

    def check_device(self) -> None:
        """Disable features that the device does not support."""
        if self.pdl_level and torch.cuda.get_device_capability(self.device) < PDL_CAPABILITY:
            text = "pdl_level=%d has no effect on %s, which is older than compute capability %d.%d"
            logger.warning(text, self.pdl_level, self.device, *PDL_CAPABILITY)
            self.pdl_level = 0

    def kernels(self) -> KernelSet:
        """Return the built-in kernels that models use: none on the CPU."""
        if self.device.type != "cuda" or not self.use_legacy_module:
            return KernelSet()
        return KernelSet.choose(
            vendor_blas=self.use_vendor_blas,
            experimental=self.use_experimental_kernels,
            launch_level=self.pdl_level,
        )

    @cached_property
    def profiler(self) -> Profiler:
        """Profiler of the configured level, created after `configure_session`."""
        return Profiler(self.gpu_profiling, str(self.device), self.trace)
