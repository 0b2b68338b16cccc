"""`EmulatedKernel`: a kernel in CUDA C++, compiled for the CPU with `cuda_emulator.h`."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from llm.kernels import cuda

HEADER = Path(__file__).with_name("cuda_emulator.h")
SOURCES = Path(cuda.__file__).parent
OPTIONS = ("-std=c++17", "-nostdinc++", "-O0", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIC",
           "-w")  # fmt: skip


class EmulatedKernel:
    """Takes the place of `llm.kernels.cuda.CudaKernel`."""

    folder: Path  # of what is compiled, and found there by later kernels with the same macros

    def __init__(
        self, source: str, name: str, macros: Mapping[str, int], device: torch.device
    ) -> None:
        defined = [f"-D{key}={value}" for key, value in macros.items()]
        library = self.folder / f"{name}{''.join(defined)}.so"
        if not library.exists():
            code = library.with_suffix(".cpp")
            code.write_text(
                f'#include "{SOURCES / source}"\n'
                f"static void run_thread(const Arguments& given) {{ {name}(given); }}"
            )
            options = (*OPTIONS, "-include", HEADER, *defined, "-shared", "-o", library)
            subprocess.run(["g++", *map(str, (*options, code))], check=True, timeout=120)
        self._library = ctypes.CDLL(str(library))

    def launch(
        self,
        grid: tuple[int, int],
        num_threads: int,
        shared_bytes: int,
        arguments: ctypes.Structure,
        *,
        is_early: bool = False,
    ) -> None:
        """Run the kernel; see `CudaKernel`."""
        is_inside = self._library.launch(*grid, num_threads, shared_bytes, ctypes.byref(arguments))
        assert is_inside, "a program wrote beyond its shared memory"
