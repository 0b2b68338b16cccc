"""Kernels that are compiled in threads: for a GPU that is not there, whose launches are counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from llm.kernels.together import compile_together
from tests.llm.kernels.triton_driver import Driver, Launcher

WIDTH = 64


@pytest.fixture
def normalise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The norm as the process's first kernel, with an empty folder of compiled ones."""
    pytest.importorskip("triton")
    from triton import knobs
    from triton.runtime import driver

    from llm.kernels import elementwise

    monkeypatch.setattr(elementwise._norm_kernel, "device_caches", _caches(elementwise))
    monkeypatch.setattr(Launcher, "count", 0)
    monkeypatch.setattr(driver, "_active", Driver())
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield elementwise.normalise


def _caches(elementwise: Any) -> Any:
    found = elementwise._norm_kernel.device_caches
    return type(found)(found.default_factory)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    return torch.ones(2, WIDTH, dtype=dtype), torch.ones(WIDTH, dtype=dtype), 1e-5


def test_work_compiles_its_kernels_and_launches_none(normalise: Any) -> None:
    results = []

    def work() -> None:
        results.extend(normalise(*inputs(dtype)) for dtype in (torch.float32, torch.bfloat16))

    assert compile_together(work) == 2
    assert Launcher.count == 0
    assert not any(bool(result.any()) for result in results)  # zeros, not what was in memory
    normalise(*inputs(torch.bfloat16))  # is loaded already
    assert Launcher.count == 1
    assert compile_together(work) == 0
    assert Launcher.count == 3


def test_kernels_on_disk_are_not_compiled_again(normalise: Any) -> None:
    assert compile_together(lambda: normalise(*inputs(torch.float32))) == 1
    from llm.kernels import elementwise

    elementwise._norm_kernel.device_caches.clear()  # as another process
    assert compile_together(lambda: normalise(*inputs(torch.float32))) == 0
    normalise(*inputs(torch.float32))
    assert Launcher.count == 1


class _SharedLauncher(Launcher):
    """A launcher from a module that all launchers of the process share, as Python loads them."""

    module: Any = None

    def __init__(self, source: Any, *_: Any) -> None:
        _SharedLauncher.module = source
        time.sleep(0.3)  # the others are compiled by then
        self._source = _SharedLauncher.module

    def __call__(self, *arguments: Any) -> None:
        """Launch; the tensors among the arguments have the types of the source."""
        tensor = next(each for each in arguments if isinstance(each, Tensor))
        names = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
        assert names[tensor.dtype] in self._source.signature.values()
        super().__call__(*arguments)


def test_kernels_are_loaded_one_after_the_other(
    normalise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "launcher_cls", _SharedLauncher)
    types = (torch.float16, torch.bfloat16, torch.float32)

    def work() -> None:
        for dtype in types:
            normalise(*inputs(dtype))

    assert compile_together(work) == len(types)
    work()
    assert Launcher.count == len(types)


def test_the_error_of_a_kernel_is_logged_and_raised_at_its_launch(
    normalise: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such instruction")

    monkeypatch.setattr(Driver, "launcher_cls", fail)
    compile_together(lambda: normalise(*inputs(torch.float32)))
    assert "no such instruction" in caplog.text
    with pytest.raises(ValueError, match="no such instruction"):
        normalise(*inputs(torch.float32))


def test_an_error_ends_the_mode(normalise: Any) -> None:
    def work() -> None:
        normalise(*inputs(torch.float32))
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        compile_together(work)
    normalise(*inputs(torch.float32))
    assert Launcher.count == 1
    assert compile_together(lambda: None) == 0


def test_engines_that_start_at_once_compile_one_after_the_other(normalise: Any) -> None:
    from triton import knobs

    order, second_begun = [], Event()

    def second() -> None:
        second_begun.set()
        normalise(*inputs(torch.bfloat16))
        order.append("second")

    def first() -> None:
        found.append(pool.submit(compile_together, second))
        second_begun.wait(0.2)  # it waits, so that it counts its own kernels
        normalise(*inputs(torch.float32))
        order.append("first")

    found: list[Any] = []
    with ThreadPoolExecutor() as pool:
        assert compile_together(first) == 1
        assert found[0].result() == 1
    assert order == ["first", "second"]
    assert knobs.compilation.listener is None
