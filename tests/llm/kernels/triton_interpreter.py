"""Fixes for Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

NARROW = {
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    tl.bfloat16: (torch.bfloat16, torch.uint16),
}


def repair_interpreter() -> None:
    """Let its scalars be bounds of ranges: numpy 2.4 does not convert an array of one element.
    Round to the nearest as a GPU does: it cuts off bits, or loses the carry from mantissa to
    exponent.
    """
    convert = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in NARROW:
            return convert(values, source, target, rounding)
        floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        narrow, bits = NARROW[target]
        return floats.to(narrow).view(bits).numpy()

    interpreter._convert_float = converted
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    find, types = interpreter._get_np_dtype, dict[str, np.dtype]()

    def numpy_type(kind: Any) -> np.dtype:
        name = kind.scalar.name
        if name not in types:  # to find one, the interpreter makes a table of all
            types[name] = find(kind)
        return types[name]

    interpreter._get_np_dtype = numpy_type
    patch_once_per_launch()


def patch_once_per_launch() -> None:
    """Replace the functions of `tl` when a kernel starts only, with those that its device functions
    see in `tl.core`: every call of a device function reads all of `tl` to do so again.
    """
    patch = interpreter._patch_lang

    def patched(kernel: Any) -> Any:
        scope = patch(kernel)
        interpreter._patch_builtin(tl.core, interpreter.interpreter_builder, scope)
        interpreter._patch_lang_core(tl.core, scope)
        return scope

    def called(function: Any, *args: Any, **options: Any) -> Any:
        return function.rewrite()(*args, **options)

    interpreter._patch_lang = patched
    interpreter.InterpretedFunction.__call__ = called
