"""The wheel of this checkout, and commands that do not see the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_SOURCES = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "*.wav")
COMMAND_S = 900


def run(*command: object, folder: Path) -> str:
    """Run a command without this checkout on its path; return its output."""
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path, *options: str) -> Path:
    """Run `python -m build` on a copy of the sources; return the wheel, made from the sdist."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    run(sys.executable, "-m", "build", *options, "--outdir", folder, folder=source)
    shutil.rmtree(source)
    (built,) = folder.glob("*.whl")
    assert len(list(folder.glob("*.tar.gz"))) == 1
    return built
