"""Fix for Triton's interpreter."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def repair_interpreter() -> None:
    """Let its scalars be bounds of ranges: numpy 2.4 does not convert an array of one element."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
