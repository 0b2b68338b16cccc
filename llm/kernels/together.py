"""`compile_together`: the Triton kernels of some work, compiled in threads before it runs.

Triton compiles a kernel when it is launched, so that a first start would wait for one after the
other. Compiled kernels are kept on disk (`TRITON_CACHE_DIR`, or `~/.triton/cache`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class _Zeros(TorchDispatchMode):
    """New tensors are zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation of torch."""
        found = func(*args, **(kwargs or {}))
        is_plain = isinstance(func, OpOverload) and isinstance(found, Tensor)
        is_unwritten = is_plain and func.overloadpacket.__name__ in UNWRITTEN
        return found.zero_() if is_unwritten else found


class _Unlaunched:
    """In place of a kernel that is being compiled."""

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
    """Run `work`, whose launches of kernels that this process has not loaded only have these
    compiled or loaded; return the number of kernels that were compiled.

    Tensors that `work` creates for the results of such kernels are zeros. It must not wait for
    other ranks. A kernel that cannot be compiled raises its error when it is launched.
    """
    from triton import AsyncCompileMode, knobs
    from triton.runtime import driver

    device = driver.active.get_current_device()

    class Compiling(AsyncCompileMode):
        """Does not launch what it compiles."""

        def submit(self, key: Any, compile_kernel: Callable[[], Any], finish: Any) -> _Unlaunched:
            def load() -> Any:
                kernel = compile_kernel()
                _ = kernel.run  # loads it; the launcher has code of its own, which is compiled
                return kernel

            super().submit(key, load, finish)
            return _Unlaunched()

    num_compiled, listener = 0, knobs.compilation.listener

    def count(*, cache_hit: bool, **_: Any) -> None:
        nonlocal num_compiled
        num_compiled += not cache_hit

    knobs.compilation.listener = count
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
    return num_compiled
