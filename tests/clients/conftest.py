"""Fixtures of the tests with other packages: the published checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write SmolLM2-135M-Instruct with the command."""
    out = tmp_path_factory.mktemp("models") / "smollm2"
    command = [sys.executable, "-m", "tests.clients.smollm2", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    return out
