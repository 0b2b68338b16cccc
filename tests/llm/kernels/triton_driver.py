"""A driver of Triton for a GPU that is not there."""

from __future__ import annotations

from typing import Any


class Launcher:
    """Counts launches, and adds their arguments to a list if there is one."""

    count = 0
    launches: list[tuple[Any, ...]] | None = None

    def __init__(self, *_: Any) -> None:
        return

    def __call__(self, *arguments: Any) -> None:
        Launcher.count += 1
        if Launcher.launches is not None:
            Launcher.launches.append(arguments)


class Driver:
    """A driver of Triton without a device."""

    launcher_cls = Launcher

    class utils:  # noqa: N801 - Triton's name
        @staticmethod
        def load_binary(*_: Any) -> tuple[int, None, int, int, int]:
            return 1, None, 0, 0, 1024

        @staticmethod
        def get_device_properties(_: int) -> dict[str, int]:
            return {"max_shared_mem": 232_448}

    @staticmethod
    def get_current_device() -> int:
        return 0

    @staticmethod
    def get_current_stream(_: int) -> int:
        return 0

    @staticmethod
    def get_current_target() -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)
