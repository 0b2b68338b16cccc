"""`compile_together`: compiles the Triton kernels of a forward in threads, before it runs.

Triton compiles a kernel when it is first launched, and its launch waits for that. A first start
would compile dozens of kernels one after the other, on one core. Which kernels a forward needs, and
for which types, sizes and alignments, is known where it launches them; so the forward is run once
in Triton's mode for this (`triton.AsyncCompileMode`): a launch of a kernel that is not loaded
passes it to a thread, which compiles or loads it, and the forward continues without it.

Compiled kernels are kept on disk (`TRITON_CACHE_DIR`, or `~/.triton/cache`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, RLock
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_one_at_a_time = RLock()  # the mode is of a thread, the listener of the process
_loads = Lock()
"""Held while a thread of `compile_together` loads a kernel, which compiles its launcher if that is
not on disk. Triton's launchers are modules of one name: where a process has loaded a file before,
Python returns the module in `sys.modules` with the file's functions, and Triton would read the
function that another thread has put there."""


class _Zeros(TorchDispatchMode):
    """Fills tensors that are created unwritten with zeros: a kernel that is not launched leaves its
    result as it was, and what follows may take it for page numbers or tokens.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation of torch."""
        found = func(*args, **(kwargs or {}))
        is_plain = isinstance(func, OpOverload) and isinstance(found, Tensor)
        is_unwritten = is_plain and func.overloadpacket.__name__ in UNWRITTEN
        return found.zero_() if is_unwritten else found


class _Unlaunched:
    """In place of a kernel that is being compiled: what Triton's launch reads and calls."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        """See `triton.compiler.CompiledKernel`."""

    def run(self, *_: Any) -> None:
        """See `triton.compiler.CompiledKernel`."""


def _use_device(index: int) -> None:
    """Make a device's context that of this thread."""
    if torch.cuda.is_available():
        torch.cuda.set_device(index)


def compile_together(work: Callable[[], object]) -> int:
    """Run `work` once so that its kernels are compiled; return the number that was compiled.

    Kernels that this process has loaded are launched. The others are not: they are loaded from disk
    or compiled in threads, all before this returns. Tensors that `work` creates for their results
    are zeros, so that it computes nothing of use; it must not wait for other ranks. The error of a
    kernel that cannot be compiled or loaded is logged, and raised when it is launched. A call of
    another thread waits for this one: engines that start in one process find each other's kernels
    on disk.
    """
    from triton import AsyncCompileMode, knobs
    from triton.runtime import driver

    device = driver.active.get_current_device()

    class Compiling(AsyncCompileMode):
        """Does not launch what it compiles; Triton's own mode waits for it."""

        def submit(self, key: Any, compile_kernel: Callable[[], Any], finish: Any) -> _Unlaunched:
            def load() -> Any:
                try:
                    kernel = compile_kernel()
                    with _loads:
                        _ = kernel.run  # the launcher has code of its own, which is compiled
                except Exception:
                    logger.warning("a kernel was not compiled or loaded in advance", exc_info=True)
                    raise
                return kernel

            super().submit(key, load, finish)
            return _Unlaunched()

    compiled: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    with _one_at_a_time:
        listener, knobs.compilation.listener = knobs.compilation.listener, note
        try:
            with (
                ThreadPoolExecutor(
                    thread_name_prefix="compile", initializer=_use_device, initargs=(device,)
                ) as pool,
                Compiling(pool, ignore_errors=True),
                _Zeros(),
            ):
                work()
        finally:
            knobs.compilation.listener = listener
    return len(compiled)
