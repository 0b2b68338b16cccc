"""Runners that need FlashInfer: the test is skipped if it or its kernels are missing."""

from __future__ import annotations

import pytest

from llm.errors import ConfigError
from llm.runner.model_runner import ModelRunner


def initialized(runner: ModelRunner) -> ModelRunner:
    """Initialize the runner. Skips if its backend is FlashInfer, and that is not available here."""
    if runner.model_config.attention_backend != "flashinfer":
        runner.initialize()
        return runner
    pytest.importorskip("flashinfer", reason="needs FlashInfer, the extra gpu")
    try:
        runner.initialize()
    except ConfigError as error:
        pytest.skip(str(error)[:200])
    return runner
