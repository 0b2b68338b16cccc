"""The folder for a machine without network, and the script that watches a visit there."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from training.kokoro.packages import SYMBOLS
from training.kokoro.phonemes import read_table, table, write_table
from training.kokoro.weights import pack, unpack
from training.lent import bundle
from training.speech_codec.coder import CODER_FILE

SCRIPTS = Path(bundle.__file__).parent


def test_the_folder_holds_code_teacher_phonemes_and_texts(tmp_path: Path, capsys) -> None:
    teacher, package, phonemes = (tmp_path / name for name in ("teacher", "package", "phonemes"))
    for folder in (teacher, (package / SYMBOLS).parent, phonemes):
        folder.mkdir(parents=True)
    (teacher / bundle.WEIGHTS_FILE).write_bytes(b"weights")
    np.savez_compressed(teacher / bundle.VOICES_FILE, af_one=np.ones((510, 256), np.float16))
    (package / SYMBOLS).write_text("{}")
    for accent in "ab":
        write_table(["hˈI\tHi"], table(phonemes, accent))
    out = tmp_path / "bundle"
    (tmp_path / "lines.json").write_text("[]")
    folders = {"teacher": teacher, "package": package, "phonemes": phonemes, "out": out}
    given = [f"--{name}={folder}" for name, folder in folders.items()]
    bundle.main([*given, f"--clips={tmp_path / 'lines.json'}"])
    assert 0 < sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) < 10e6
    assert f"{out / 'texts'}: " in capsys.readouterr().out
    for part in ("machine", "texts"):
        environment = os.environ | {"VOICE_WORK": str(tmp_path / "work")}
        subprocess.run(["bash", str(out / part / "lay.sh")], env=environment, check=True)
    parts, out = out, tmp_path / "work" / "bundle"
    assert (out / "clips.json").read_text() == "[]"
    assert (out / "coder.safetensors").read_bytes() == CODER_FILE.read_bytes()
    assert read_table(table(out / "phonemes", "a")) == ["hˈI\tHi"]
    assert (out / "training" / "speech_codec" / "train.py").exists()
    assert (out / "decoder" / "codecs" / "embedded" / "modules.py").exists()
    assert {"start.sh", "poll.sh"} <= {path.name for path in out.iterdir()}
    with np.load(out / "teacher" / bundle.VOICES_FILE) as voices:
        assert len(voices["af_one"]) == 33
    assert not (out / "reader.safetensors").exists()
    write_table(["ˈola\tHola"], table(phonemes, "e"))
    bundle.main(given)  # replaces the folder
    assert read_table(table(parts / "texts" / "phonemes", "e")) == ["ˈola\tHola"]
    assert (parts / "texts" / "reader.safetensors").exists()
    assert not (parts / "texts" / "clips.json").exists()


def test_a_bundle_for_plans_has_a_teacher_that_cannot_speak(tmp_path: Path) -> None:
    tensors = ("predictor.shared.bias", "decoder.F0_conv.bias", "text_encoder.lstm.bias")
    pack({name: np.ones(3) for name in tensors}, tmp_path / bundle.WEIGHTS_FILE)
    np.savez_compressed(tmp_path / bundle.VOICES_FILE, af_one=np.ones((510, 256), np.float16))
    (tmp_path / SYMBOLS).parent.mkdir(parents=True)
    for name in (SYMBOLS, "model.safetensors", "voices.json"):
        (tmp_path / name).write_text("{}")
    for accent in "ab":
        write_table(["hˈI\tHi"], table(tmp_path, accent))
    out = tmp_path / "bundle"
    given = [f"--{name}={tmp_path}" for name in ("teacher", "package", "phonemes", "lm")]
    bundle.main([*given, f"--out={out}", "--plans"])
    assert set(unpack(out / "machine" / "teacher" / bundle.WEIGHTS_FILE)) == {tensors[0]}
    found = {path.name for path in (out / "texts" / "lm").iterdir()}
    assert found == {"model.safetensors", "voices.json"}


def poll(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"VOICE_WORK": str(work), "OUT": str(work / "home")}
    command = ["bash", str(SCRIPTS / "poll.sh"), "30", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A visit that has ended: its process number is that of nothing."""
    logs = tmp_path / "out" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "out" / "status").write_text("done\n")
    (tmp_path / "out" / "visit.log").write_text("all went well\n")
    (logs / "decoder.log").write_text("held out: same mel 1.0\n")
    (logs / "studio0.log").write_text("take 1\n")
    (tmp_path / "pid").write_text("999999999")
    return tmp_path


def test_a_poll_brings_logs_and_prints_losses(work: Path) -> None:
    ended = poll(work)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "same mel 1.0" in ended.stdout
    assert "status: done" in ended.stdout
    logs = (work / "home" / "logs.txt").read_text()
    assert "all went well" in logs
    assert "take 1" in logs
    assert [path.name for path in (work / "home").iterdir()] == ["logs.txt"]


@pytest.mark.parametrize("name", ["codec", "lm"])
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
    pieces = sorted(home.glob(f"{name}.tar.*"))
    assert max(piece.stat().st_size for piece in pieces) <= 15 * 2**20
    (work / "whole.tar").write_bytes(b"".join(path.read_bytes() for path in pieces))
    with tarfile.open(work / "whole.tar") as found:
        found.extractall(work / "found", filter="data")
    assert (work / "found" / "a.npz").read_bytes() == content
    assert sorted(path.name for path in (work / "found").iterdir()) == ["a.npz", "b.npz"]


def test_an_archive_may_have_hundreds_of_pieces(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a language model whose weights are kept at every save."""
    monkeypatch.setenv("VOICE_PIECE", "1024")
    (work / "out" / "lm").mkdir()
    content = bytes(range(256)) * 460
    (work / "out" / "lm" / "lm.safetensors").write_bytes(content)
    ended = poll(work, "lm", "0", "300")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    pieces = sorted((work / "home").glob("lm.tar.*"))
    assert len(pieces) > 110
    (work / "whole.tar").write_bytes(b"".join(path.read_bytes() for path in pieces))
    with tarfile.open(work / "whole.tar") as found:
        assert found.extractfile("./lm.safetensors").read() == content


def test_a_poll_of_a_folder_alone_packs_it_again(work: Path) -> None:
    (work / "out" / "coder").mkdir()
    weights = work / "out" / "coder" / "coder.safetensors"
    for content in (b"first", b"second"):
        weights.write_bytes(content)
        ended = poll(work, "coder")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        with tarfile.open(work / "home" / "coder.tar.000") as found:
            found.extractall(work / "found", filter="data")
        assert (work / "found" / weights.name).read_bytes() == content


def test_a_visit_that_has_failed_makes_the_poll_fail(work: Path) -> None:
    (work / "out" / "status").write_text("failed\n")
    (work / "out" / "visit.log").write_text("no memory\n")
    ended = poll(work)
    assert ended.returncode == 1
    assert "no memory" in ended.stdout
