"""The wheel with all of its dependencies and extras for users, in an empty environment."""

from __future__ import annotations

import venv
import wave
from pathlib import Path

import pytest

from tests.wheels import build_wheel, run

pytestmark = pytest.mark.timeout(3600)  # gigabytes of packages


def test_an_installation_from_the_package_index_speaks(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    run(programs / "pip", "install", "--quiet", f"{wheel}[all]", folder=tmp_path)
    run(programs / "pip", "check", folder=tmp_path)
    run(programs / "sonant", "say", "-q", "-o", "x.wav", "Good morning.", folder=tmp_path)
    with wave.open(str(tmp_path / "x.wav")) as file:
        assert file.getnframes() > 8_000
