"""Every sample is run as the documentation shows, against a real server."""

from __future__ import annotations

import subprocess
import sys
import wave
from pathlib import Path

import pytest

from samples import embed_voice
from tests.deadlines import HANG_S
from tests.speech_server import Server

ROOT = Path(__file__).parent.parent
SAMPLES = sorted(path.stem for path in (ROOT / "samples").glob("[!_]*.py"))


def run(sample: str, *arguments: str, text_in: str = "") -> str:
    """Return a sample's output; it must end with status 0 and an empty standard error."""
    done = ended(sample, *arguments, text_in=text_in)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def ended(sample: str, *arguments: str, text_in: str = "") -> subprocess.CompletedProcess[str]:
    """Return a sample's exit status and output."""
    return subprocess.run(
        [sys.executable, "-m", f"samples.{sample}", *arguments],
        input=text_in,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=HANG_S,
    )


def seconds_of(path: Path) -> float:
    with wave.open(str(path), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return file.getnframes() / file.getframerate()


def test_every_sample_has_a_test_here() -> None:
    assert SAMPLES == ["embed_voice", "generate_text", "stream_speech", "type_speech"]


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_is_short_and_shows_its_own_use(sample: str) -> None:
    source = (ROOT / "samples" / f"{sample}.py").read_text(encoding="utf-8")
    assert f"python -m samples.{sample} " in source
    assert len(source.splitlines()) < 80


def test_speech_is_written_as_it_arrives(tiny_server: Server, tmp_path: Path) -> None:
    out = tmp_path / "x.wav"
    printed = run(
        "stream_speech",
        *("Hello there. This is a test.", str(out)),
        *("--server", tiny_server.address, "--voice", "owen"),
    ).splitlines()
    assert len(printed) > 2
    assert printed[-1] == f"{seconds_of(out):.2f} s"


def test_a_voice_of_ones_own_speaks_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time in this process, where torch is imported."""
    out, again = tmp_path / "x.wav", tmp_path / "again.wav"
    options = ("--voice", "owen", "--seed", "7")
    printed = run("embed_voice", "Hello there.", str(out), *options).splitlines()
    assert len(printed) > 1
    assert printed[-1] == f"{seconds_of(out):.2f} s"
    monkeypatch.setattr(sys, "argv", ["embed_voice", "Hello there.", str(again), *options])
    embed_voice.main()
    assert out.read_bytes() == again.read_bytes()


def test_refusals_of_the_server_are_printed(tiny_server: Server, tmp_path: Path) -> None:
    out = tmp_path / "x.wav"
    where = ("--server", tiny_server.address, "--voice", "missing")
    done = ended("stream_speech", "Hello.", str(out), *where)
    assert done.returncode == 1
    assert "StatusCode.NOT_FOUND" in done.stderr
    assert "wave.Error" not in done.stderr
    assert not out.exists()


def test_typed_lines_are_spoken_one_by_one(tiny_server: Server, tmp_path: Path) -> None:
    out = tmp_path / "x.wav"
    printed = run(
        "type_speech",
        *(str(out), "--server", tiny_server.address),
        text_in="Hello there\nAnd once more\n",
    ).splitlines()
    assert [line.split(" ends at ")[0] for line in printed] == ["line 1", "line 2"]
    assert printed[-1] == f"line 2 ends at {seconds_of(out):.2f} s"


@pytest.mark.parametrize("more", [[], ["--chat"]])
def test_text_is_printed_as_it_comes(tiny_server: Server, more: list[str]) -> None:
    arguments = ["hello", "--server", tiny_server.address, "--max-tokens", "8", *more]
    printed = run("generate_text", *arguments)
    assert printed == run("generate_text", *arguments)
    tokens_in, tokens_out = (int(word) for word in printed.split("[")[-1].split() if word.isdigit())
    assert tokens_in >= 5
    assert 0 < tokens_out <= 8
