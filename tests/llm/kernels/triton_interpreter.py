"""Fixes for Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
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
    make_shapes_once()
    # Each integer operation is also computed in 64 bits, for an assertion that is not made.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


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


def make_shapes_once() -> None:
    """Share the shapes of all tensors and types: they are tuples of objects, made for each."""
    core = tl.core

    @cache
    def of_tensors(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple(list(map(core.constexpr, sizes)))

    @cache
    def of_types(sizes: tuple[int, ...]) -> tuple[Any, int]:
        return core.tuple(sizes), core.validate_block_shape(sizes)

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = of_tensors(tuple(kind.shape) if kind.is_block() else ())

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        assert sizes
        self.element_ty = element_ty
        self.shape, self.numel = of_types(sizes)
        self.name = f"<{sizes}, {element_ty}>"

    core.tensor.__init__ = init_tensor
    core.block_type.__init__ = init_type
