"""Runners that need FlashInfer: where it or its kernels are missing, the test is skipped."""

from __future__ import annotations

import pytest

from llm.errors import ConfigError
from llm.runner.model_runner import ModelRunner


def initialized(runner: ModelRunner) -> ModelRunner:
    """The runner, ready. Skips where its backend is FlashInfer, and that cannot be used here."""
    if runner.model_config.attention_backend != "flashinfer":
        runner.initialize()
        return runner
    pytest.importorskip("flashinfer", reason="needs FlashInfer, the extra gpu")
    try:
        runner.initialize()
    except ConfigError as error:
        pytest.skip(str(error)[:200])
    return runner
