"""The wheel: what is in it, and its commands in an environment without a checkout."""

from __future__ import annotations

import os
import re
import signal
import sys
import tomllib
import venv
import wave
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.speech_server import started
from tests.wheels import build_wheel, run
from tts import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SHIPPED = ("decoder", "llm", "tts")
BY_OTHERS = {"grpc_tools", "_distutils_hack"}  # imported by grpc and by setuptools, if installed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of `python -m build`, which is made from the source distribution."""
    return build_wheel(tmp_path_factory.mktemp("build"), "--no-isolation")


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel and our dependencies."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", wheel)
    run(sys.executable, "-m", "pip", "--python", python, *install, folder=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(dependency_folders()))
    return python.parent


def dependency_folders() -> list[str]:
    """Return the folders of this interpreter's path, without standard library and checkout."""
    return [
        path
        for path in sys.path
        if Path(path).is_dir()
        and not Path(path).is_relative_to(sys.base_prefix)
        and Path(path).resolve() != ROOT
    ]


def frames(path: Path) -> int:
    with wave.open(str(path)) as file:
        return file.getnframes()


def test_the_wheel_has_the_packages_and_their_data_only(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = f"sonant-{__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {*SHIPPED, metadata}
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in SHIPPED
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if not name.startswith(metadata)} == sources
    assert {f"{package}/py.typed" for package in SHIPPED} <= sources
    assert "tts/embedded/codec/model.safetensors" in sources


def test_the_stated_size_is_that_of_the_wheel(wheel: Path) -> None:
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    stated = re.search(r"The wheel has (\d+) MB", page)
    assert stated
    assert abs(wheel.stat().st_size / 1e6 - int(stated[1])) < 2


def test_the_installed_version_is_the_packages(programs: Path, tmp_path: Path) -> None:
    assert run(programs / "sonant", "--version", folder=tmp_path) == f"sonant {__version__}\n"
    code = "import tts, importlib.metadata as m; print(m.version('sonant'), tts.__file__)"
    version, file = run(programs / "python", "-c", code, folder=tmp_path).split()
    assert version == __version__
    assert Path(file).is_relative_to(programs.parent)


def test_a_server_outside_the_checkout(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its voices are listed, it speaks, it is healthy, and SIGTERM ends it with status 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    sonant = str(programs / "sonant")
    with started([sonant, "serve", "--port", "0", "--log-level", "error"]) as server:
        where = ("--server", server.address)
        assert "SERVING" in run(sonant, "health", *where, folder=tmp_path)
        assert "hazel" in run(sonant, "voices", *where, folder=tmp_path)
        run(sonant, "say", "-q", "-o", "x.wav", "Good morning.", *where, folder=tmp_path)
        os.kill(server.pid, signal.SIGTERM)
    assert frames(tmp_path / "x.wav") > 8_000


def test_completion_in_a_shell(programs: Path, tmp_path: Path) -> None:
    script = tmp_path / "sonant.bash"
    script.write_text(run(programs / "sonant", "completion", "bash", folder=tmp_path))
    for words, expected in (
        (["sonant", "se"], "serve"),
        (["sonant", "say", "--format", "fl"], "flac"),
        (["sonant", "serve", "--voice-f"], "--voice-folder"),
        (["sonant", "say", "-f", "sonant.b"], "sonant.bash"),
    ):
        code = (
            f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1};"
            '_shtab_sonant sonant "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"; echo "${COMPREPLY[@]}"'
        )
        assert run("bash", "-c", code, folder=tmp_path).split() == [expected]


@pytest.fixture(scope="module")
def modules_of_extras() -> dict[str, set[str]]:
    """Top-level modules of each extra's packages; by the packages' names if not installed."""
    installed = defaultdict(set)
    for module, names in packages_distributions().items():
        for name in names:
            installed[plain(name)].add(module)
    return {
        extra: {
            module
            for requirement in requirements
            for module in modules_of(plain(requirement), installed)
        }
        for extra, requirements in PROJECT["optional-dependencies"].items()
    }


def modules_of(name: str, installed: dict[str, set[str]]) -> Iterator[str]:
    if name != "sonant":
        yield from installed.get(name) or {name.replace("-", "_")}


def plain(requirement: str) -> str:
    """Return a distribution's name in its normal form, without version and extras."""
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()


OF_SERVERS = {"llguidance", "msgspec", "zmq"}  # and of structured output
HEAVY = {"torchaudio", "scipy", "sympy", "torch._dynamo", "torch._inductor", *OF_SERVERS}


def test_speech_outside_the_checkout_imports_no_heavy_package_and_none_of_an_extra(
    modules_of_extras: dict[str, set[str]], programs: Path, tmp_path: Path
) -> None:
    """Imported by `sonant say`, with everything that it imports on the way, which takes most of the
    time of a cold start; without a warning.
    """
    speak = "main(['say', '-q', '-o', 'x.wav', 'Good morning.'])"
    code = f"import sys; from tts.__main__ import main; status = {speak}"
    told = "print(status, sys.modules['tts'].__file__, *sys.modules)"
    command = (programs / "python", "-W", "error", "-c", f"{code}; {told}")
    status, file, *modules = run(*command, folder=tmp_path).split()
    loaded = {module.partition(".")[0] for module in modules}
    assert status == "0"
    assert frames(tmp_path / "x.wav") > 8_000
    assert Path(file).is_relative_to(programs.parent)
    assert {"torch", "tokenizers"} <= loaded
    assert HEAVY.isdisjoint(modules)
    assert {"transformers", "huggingface_hub"} <= modules_of_extras["hub"]
    loaded -= BY_OTHERS
    wrong = {name: found & loaded for name, found in modules_of_extras.items()}
    assert {name: found for name, found in wrong.items() if found} == {}
    assert "shtab" not in loaded
