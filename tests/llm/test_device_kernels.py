"""Kernels in Triton's interpreter; tests/gpu runs them on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="torch brings Triton where there may be a GPU")
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    "what",
    [("sampling", "3", "4"), ("sampling", "1", "5"), ("cuts",), ("products",)],
    ids=" ".join,
)
def test_kernels_compute_what_their_twins_do(what: tuple[str, ...]) -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.llm.interpreted_kernels", *what],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (found.stdout, found.returncode) == ("equal\n", 0), found.stderr[-3000:]
