"""`Launches`: launches of a Triton kernel without Triton's checks, once it has been launched.

Triton finds the compiled kernel of a launch by the types, values and alignments of all arguments,
which takes the host 20 to 30 microseconds; the kernels of a layer take the device not much longer.
Here the key is made of what differs between launches of one function of this package, and tensors
are passed as addresses, which saves their checks.

    first launch with a key    Triton's, which compiles or loads the kernel
    others                     the loaded kernel's own launch, on the current device and stream

Loaded kernels are kept in Triton's own table for the device, where `compile_together` and tests
that clear it find them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

ALIGNMENT = 16  # bytes: Triton compiles another kernel for tensors that begin elsewhere
UNALIGNED = "unaligned"


class Launches:
    """Launches of one kernel whose constants follow all of its other arguments.

    Arguments are tensors, numbers, and tuples of these. Floating-point numbers are of any value;
    each value of an integer has an entry of its own, so that they must be those of a model or a
    pool, and not of a batch.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._is_compiled = hasattr(kernel, "device_caches")  # not in the interpreter

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        *,
        num_warps: int,
        is_early: bool,
    ) -> None:
        """Queue the kernel on the current stream of the current device. `is_early`: it may start
        before its predecessor ends (programmatic dependent launch).
        """
        if not self._is_compiled:
            self._kernel[grid](*arguments, *constants, num_warps=num_warps, launch_pdl=is_early)
            return
        active = driver.active
        device = active.get_current_device()
        table = self._kernel.device_caches[device][0]
        kinds: list[Any] = [constants, num_warps, is_early]
        plain = _plain(arguments, kinds)
        key = tuple(kinds)
        kernel = None if _has_hooks() else table.get(key)
        if kernel is None:
            launch = self._kernel[grid]
            kernel = launch(*arguments, *constants, num_warps=num_warps, launch_pdl=is_early)
            if isinstance(kernel, CompiledKernel):  # and not what stands for one
                table[key] = kernel
            return
        kernel.run(
            *grid,
            active.get_current_stream(device),
            kernel.function,
            kernel.packed_metadata,
            None,  # of the launch, for hooks
            None,
            None,
            *plain,
            *constants,
        )


def power_above(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def _plain(arguments: tuple[Any, ...], kinds: list[Any]) -> tuple[Any, ...]:
    """Return the arguments with addresses in place of tensors; append to `kinds` what the choice of
    the compiled kernel depends on.
    """
    found: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            kinds.append(argument.dtype)
            if address % ALIGNMENT:
                kinds.append(UNALIGNED)
            found.append(address)
        elif isinstance(argument, tuple):
            kinds.append(tuple)
            found.append(_plain(argument, kinds))
            kinds.append(len(argument))
        else:
            kinds.append(float if isinstance(argument, float) else argument)
            found.append(argument)
    return tuple(found)


def _has_hooks() -> bool:
    """Whether functions are called at each launch, such as those of Triton's profiler."""
    hooks: Any = knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)
