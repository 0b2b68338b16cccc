"""The folder for a machine without network, and the scripts that watch a trial there."""

from __future__ import annotations

import argparse
import os
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from training.kokoro.packages import SYMBOLS
from training.kokoro.phonemes import read_table, table, write_table
from training.lent import bundle

SCRIPTS = Path(bundle.__file__).parent


def test_the_folder_holds_code_teacher_phonemes_and_texts(tmp_path: Path) -> None:
    teacher, package, phonemes = (tmp_path / name for name in ("teacher", "package", "phonemes"))
    for folder in (teacher, (package / SYMBOLS).parent, phonemes):
        folder.mkdir(parents=True)
    (teacher / bundle.WEIGHTS_FILE).write_bytes(b"weights")
    np.savez_compressed(teacher / bundle.VOICES_FILE, af_one=np.ones((510, 256), np.float16))
    (package / SYMBOLS).write_text("{}")
    for accent in "ab":
        write_table(["hˈI\tHi"], table(phonemes, accent))
    out = tmp_path / "bundle"
    given = argparse.Namespace(
        teacher=teacher, package=package, phonemes=phonemes, out=out, wheels=None
    )
    assert 0 < bundle.bundle(given) < 5
    assert read_table(table(out / "phonemes", "a")) == ["hˈI\tHi"]
    assert (out / "training" / "speech_codec" / "train.py").exists()
    assert (out / "decoder" / "codecs" / "embedded" / "modules.py").exists()
    assert {"start.sh", "poll.sh"} <= {path.name for path in out.iterdir()}
    with np.load(out / "teacher" / bundle.VOICES_FILE) as voices:
        assert len(voices["af_one"]) == 33


def poll(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"VOICE_WORK": str(work), "OUT": str(work / "home")}
    command = ["bash", str(SCRIPTS / "poll.sh"), "30", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A trial that has ended: its process number is that of nothing."""
    (tmp_path / "out" / "logs").mkdir(parents=True)
    (tmp_path / "out" / "codec").mkdir()
    (tmp_path / "out" / "status").write_text("done\n")
    (tmp_path / "out" / "trial.log").write_text("all went well\n")
    (tmp_path / "out" / "logs" / "train_one.log").write_text("held out: same mel 1.0\n")
    (tmp_path / "pid").write_text("999999999")
    codec = tmp_path / "out" / "codec"
    (codec / "one.8bit.safetensors").write_bytes(b"eight")
    (codec / "one.safetensors").write_bytes(bytes(range(256)) * 70_000)
    (codec / "one.judges.safetensors").write_bytes(b"judges")
    (codec / "one.json").write_text("{}")
    return tmp_path


def test_a_poll_brings_small_weights_and_logs(work: Path) -> None:
    ended = poll(work)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "same mel 1.0" in ended.stdout
    assert "all went well" in (work / "home" / "logs.txt").read_text()
    assert (work / "home" / "one.8bit.safetensors").read_bytes() == b"eight"
    assert not list((work / "home").glob("one.safetensors*"))


def test_a_poll_of_a_design_brings_its_weights_in_pieces(work: Path) -> None:
    ended = poll(work, "one")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    pieces = sorted((work / "home").glob("one.safetensors.*"))
    assert len(pieces) == 2
    assert max(piece.stat().st_size for piece in pieces) <= 16 * 2**20
    joined = b"".join(piece.read_bytes() for piece in pieces)
    assert joined == (work / "out" / "codec" / "one.safetensors").read_bytes()
    assert (work / "home" / "one.judges.safetensors").read_bytes() == b"judges"


@pytest.mark.parametrize("name", ["tokens", "lm"])
def test_a_poll_of_a_folder_brings_pieces_of_one_archive(work: Path, name: str) -> None:
    folder = work / "out" / name
    folder.mkdir()
    content = bytes(range(256)) * 70_000
    (folder / "a.npz").write_bytes(content)
    (folder / "b.npz").write_bytes(b"small")
    (folder / "c.tmp.npz").write_bytes(b"not finished")
    ended = poll(work, name, "0", "0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{name}: 2 pieces" in ended.stdout
    (folder / "a.npz").write_bytes(b"written again while the pieces are fetched")
    ended = poll(work, name, "1", "3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "is not there" not in ended.stdout
    home = work / "home"
    archive = b"".join(path.read_bytes() for path in sorted(home.glob(f"{name}.tar.*")))
    (work / "whole.tar").write_bytes(archive)
    with tarfile.open(work / "whole.tar") as found:
        found.extractall(work / "found", filter="data")
    assert (work / "found" / "a.npz").read_bytes() == content
    assert sorted(path.name for path in (work / "found").iterdir()) == ["a.npz", "b.npz"]
    assert not list(home.glob("*.safetensors*"))


def test_a_trial_that_has_failed_makes_the_poll_fail(work: Path) -> None:
    (work / "out" / "status").write_text("failed\n")
    (work / "out" / "trial.log").write_text("no memory\n")
    ended = poll(work)
    assert ended.returncode == 1
    assert "no memory" in ended.stdout
    assert (work / "home" / "one.8bit.safetensors").exists()
