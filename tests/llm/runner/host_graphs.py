"""Graphs without a GPU: captured work runs again, like the kernels of a graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm.attention.registry import create_attention_backend
from llm.runner.graphs.capture import CapturedWork, GraphCapture
from llm.runner.model_runner import ModelRunner
from tests.llm.llama_checkpoints import pipeline_config


class HostCapture(GraphCapture):
    """Keeps what it captures. A replay reads the current contents of the buffers."""

    def __init__(self) -> None:
        self.captured: list[CapturedWork] = []

    @property
    def num_captured(self) -> int:
        return len(self.captured)

    def capture(self, work: Callable[[], None]) -> CapturedWork:
        work()
        self.captured.append(_Again(work))
        return self.captured[-1]


class _Again:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()

    def reset(self) -> None:
        self._work = _is_freed


def _is_freed() -> None:
    raise RuntimeError("the work is freed")


def use_graphs(runner: ModelRunner) -> HostCapture:
    """Let an initialized runner replay its forwards, over the gathered backend."""
    use_gathered(runner)
    capture = HostCapture()
    runner.use_graphs(capture)
    return capture


def use_gathered(runner: ModelRunner) -> None:
    """Use the gathered backend."""
    assert runner.attn_backend is not None
    pool, options = runner.attn_backend.pool, runner.attn_backend.options
    runner.attn_backend = create_attention_backend("gathered", pool, options)


def create_pair(folder: Path, **values: Any) -> tuple[ModelRunner, ModelRunner]:
    """Return an eager runner and one with graphs, of the same checkpoint."""
    values = {"max_batch_input_tokens": 48} | values
    eager, replayed = (ModelRunner(pipeline_config(folder, **values)) for _ in range(2))
    for runner in (eager, replayed):
        runner.initialize()
    use_gathered(eager)
    use_graphs(replayed)
    return eager, replayed
