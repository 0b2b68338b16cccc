"""The image of deploy/Dockerfile: its steps in a Debian root, and servers as they are deployed.

PyTorch comes from the package index, so the build with CUDA is installed instead of the CPU's. The
stage for GPUs is not built.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pip._internal.models.index import PyPI

from tests.clients.container import STOP_S, Builder, Container, Image, is_possible, started
from tts import __version__

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not is_possible(), reason="needs root, mmdebstrap, util-linux, iproute2"),
]

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
HOME = "/var/lib/sonant"
USER_ID = 10001
SPEECH = "http://127.0.0.1:8880/v1/audio/speech"
BODY = b'{"input": "Good morning.", "response_format": "wav"}'


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with tempfile.TemporaryDirectory(prefix="sonant-image-") as folder:
        arguments = {"TORCH_INDEX": PyPI.simple_url}
        yield Builder(DOCKERFILE, ROOT, Path(folder), arguments).build("server")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A new volume, which a container engine gives to the owner of the folder in the image."""
    tmp_path.chmod(0o711)
    os.chown(folder := tmp_path, USER_ID, USER_ID)
    return folder


def ready(container: Container) -> str:
    assert container.process.stdout is not None
    return container.process.stdout.readline()


def ended(container: Container) -> int:
    """Send SIGTERM, as container engines do, and return the exit status."""
    os.kill(container.pid, signal.SIGTERM)
    container.process.communicate(timeout=STOP_S)
    return container.process.returncode


def test_the_image_has_the_release_and_no_privileges(image: Image) -> None:
    assert image.user == f"{USER_ID}:{USER_ID}"
    with started(image, ["--version"]) as container:
        assert container.process.communicate(timeout=60)[0] == f"sonant {__version__}\n"
    assert not (image.root / "dist").exists() or not list((image.root / "dist").iterdir())


def test_a_server_as_compose_starts_it(image: Image, home: Path) -> None:
    """On a read-only root: healthy, heard, measured, with a kept voice, and ended by SIGTERM."""
    service = COMPOSE["services"]["sonant"]
    assert service["volumes"] == [f"home:{HOME}"]
    assert service["tmpfs"] == ["/tmp"]
    with started(image, service["command"], {HOME: home}) as container:
        assert ready(container).startswith("ready: 0.0.0.0:50051 ")
        health = container.run(*image.health_command)
        assert (health.returncode, health.stdout) == (0, "localhost:50051: SERVING\n")
        where = ("--server", "localhost:50051")
        said = container.run("sonant", "say", "-q", "-o", f"{HOME}/x.wav", *where, "Good morning.")
        assert (said.returncode, said.stderr) == (0, "")
        code = f"import urllib.request as r; print(r.urlopen('{SPEECH}', {BODY}).read()[:4])"
        assert container.run("python", "-c", code).stdout == "b'RIFF'\n"
        scrape = (
            "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8001/metrics').read())"
        )
        metrics = container.run("python", "-c", scrape)
        assert "sonant_requests" in metrics.stdout
        assert "Read-only file system" in container.run("touch", "/x", "/opt/sonant/x").stderr
        assert ended(container) == 0
    assert (home / "x.wav").stat().st_size > 16_000
    assert (home / "voices").is_dir()


def test_a_server_without_a_volume(image: Image) -> None:
    """The built-in voice needs a writable /tmp only."""
    with started(image) as container:
        assert ready(container).startswith("ready: ")
        assert container.run(*image.health_command).returncode == 0
        assert container.run("touch", f"{HOME}/x").returncode != 0
        assert ended(container) == 0


def test_health_of_a_server_that_does_not_listen(image: Image) -> None:
    with started(image, ["serve", "--port", "50052"]) as container:
        assert ready(container).startswith("ready: ")
        assert container.run(*image.health_command).returncode == 1
        assert ended(container) == 0
