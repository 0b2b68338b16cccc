"""Kernels in CUDA C++: compiled by NVRTC when they are first launched.

Machine code is kept where Triton keeps its own: in `TRITON_CACHE_DIR`, or `~/.triton/cache`. NVRTC
and the bindings are packages that torch depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

INSTRUCTIONS = "instructions.cu"
OPTIONS = ("--std=c++17",)
DIGEST = hashlib.sha256
DIGEST_BYTES = 32


def machine_code(source: str, name: str, macros: Mapping[str, int], architecture: str) -> bytes:
    """Return the same as `compiled`, from disk if it was compiled before.

    A file has the digest of its code before it: one that is not whole is compiled again.
    """
    from cuda.bindings import nvrtc
    from triton.runtime.cache import get_cache_manager

    options = _options(macros, architecture)
    compiler = (_checked(nvrtc.nvrtcVersion()), torch.__version__)
    key = DIGEST(repr((source, name, options, compiler)).encode()).hexdigest()
    kept, file = get_cache_manager(key), f"{Path(name).stem}.cubin"
    path = kept.get_file(file)
    stored = b""
    if path is not None:
        with suppress(FileNotFoundError):  # the folder was deleted since
            stored = Path(path).read_bytes()
    code = stored[DIGEST_BYTES:]
    if not code or DIGEST(code).digest() != stored[:DIGEST_BYTES]:
        code = compiled(source, name, macros, architecture)
        kept.put(DIGEST(code).digest() + code, file)
    return code


def _options(macros: Mapping[str, int], architecture: str) -> list[str]:
    given = [f"-D{key}={int(value)}" for key, value in macros.items()]
    return [f"--gpu-architecture={architecture}", *OPTIONS, *given]


def compiled(source: str, name: str, macros: Mapping[str, int], architecture: str) -> bytes:
    """Return the machine code of a source for an architecture (sm_90).

    Raises RuntimeError, as torch does, if NVRTC refuses it.
    """
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    options = [text.encode() for text in _options(macros, architecture)]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result):
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name} is not compiled for {architecture}: {log.decode()}")
    code = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


class CudaKernel:
    """A function of a source file of this package, compiled with macros, on one device."""

    def __init__(
        self, source: str, name: str, macros: Mapping[str, int], device: torch.device
    ) -> None:
        from cuda.bindings import driver

        major, minor = torch.cuda.get_device_capability(device)
        self._driver = driver
        self._device = device
        self._bind()
        code = machine_code(source_text(source), source, macros, f"sm_{major}{minor}")
        self._module = _checked(driver.cuModuleLoadData(code))
        self._function = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
        self._shared_bytes = 0
        early = driver.CUlaunchAttribute()
        ids = driver.CUlaunchAttributeID
        early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        self._early = early

    def launch(
        self,
        grid: tuple[int, int],
        num_threads: int,
        shared_bytes: int,
        arguments: ctypes.Structure,
        *,
        is_early: bool = False,
    ) -> None:
        """Queue the kernel, which takes one structure, on the current stream. `is_early`: it may
        start before its predecessor ends (programmatic dependent launch).
        """
        driver = self._driver
        self._reserve(shared_bytes)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = driver.CUstream(torch.cuda.current_stream(self._device).cuda_stream)
        if is_early:
            config.attrs, config.numAttrs = [self._early], 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        address = ctypes.addressof(pointers)
        (result,) = driver.cuLaunchKernelEx(config, self._function, address, 0)
        if result == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a thread's first use of CUDA
            self._bind()
            (result,) = driver.cuLaunchKernelEx(config, self._function, address, 0)
        _checked((result,))

    def _reserve(self, shared_bytes: int) -> None:
        """Allow so much shared memory of a program."""
        if shared_bytes > self._shared_bytes:
            attributes = self._driver.CUfunction_attribute
            largest = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(self._driver.cuFuncSetAttribute(self._function, largest, shared_bytes))
            self._shared_bytes = shared_bytes

    def _bind(self) -> None:
        """Make torch's context that of this thread."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        context = _checked(self._driver.cuDevicePrimaryCtxRetain(index))
        _checked(self._driver.cuCtxSetCurrent(context))


@cache
def most_shared_bytes(device: torch.device) -> int:
    """Shared memory that a program can have: 99 to 227 KiB."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@cache
def source_text(source: str) -> str:
    """Return the text of a source file of this package, after that of `INSTRUCTIONS`."""
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in (INSTRUCTIONS, source))


def _checked(results: tuple[Any, ...]) -> Any:
    """Return what a call of the bindings returned after its status."""
    if int(results[0]):
        raise RuntimeError(f"CUDA: {results[0].name}")
    return None if len(results) == 1 else results[1] if len(results) == 2 else results[1:]
