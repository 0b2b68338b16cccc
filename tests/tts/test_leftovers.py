"""Temporary files: those of dead processes are removed, others are kept."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tts.server_process import Process, processes_of, serving_process, stub_of
from tests.tts.serving import grouped, run, stream_request
from tts.leftovers import FOLDER, SOCKETS, lock, remove_folder, sweep, temporary_folder

HOLDER = """
import sys, time
from tts.leftovers import temporary_folder
with temporary_folder("test") as folder:
    (folder / "inside").write_text("mine")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary folder of this test, for this process and its children; its path is short enough
    for sockets.
    """
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process that owns a folder and prints its name."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def folder_of(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_a_folder_ends_with_its_block(temporary: Path) -> None:
    with temporary_folder("test") as folder:
        (folder / "inside").touch()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(names(temporary)) == 2
    assert names(temporary) == []


def test_a_folder_lives_as_long_as_its_process(
    temporary: Path, holder: subprocess.Popen[str]
) -> None:
    folder = folder_of(holder)
    sweep()
    remove_folder(folder)
    assert (folder / "inside").read_text() == "mine"
    holder.kill()
    holder.wait()
    assert folder.is_dir()
    sweep()
    assert names(temporary) == []


def test_creating_a_folder_removes_leftovers(
    temporary: Path, holder: subprocess.Popen[str]
) -> None:
    folder = folder_of(holder)
    holder.kill()
    holder.wait()
    with temporary_folder("test") as own:
        assert names(temporary) == [own.name, f"{own.name}-lock"]
    assert not folder.exists()


def test_leftover_sockets_are_removed_and_other_files_kept(temporary: Path) -> None:
    os.close(lock(temporary / "sonant-x-lock", SOCKETS))
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(temporary / "sonant-x-request"))
    (temporary / "sonant-x-notes").touch()
    (temporary / "sonant-x").mkdir()
    sweep()
    assert names(temporary) == ["sonant-x", "sonant-x-notes"]


def test_a_lock_file_that_is_being_locked_is_kept(temporary: Path) -> None:
    (temporary / "sonant-x-lock").touch()
    sweep()
    assert names(temporary) == ["sonant-x-lock"]


def test_links_are_not_followed(temporary: Path) -> None:
    os.close(lock(temporary / "elsewhere", FOLDER))
    (temporary / "sonant-x-lock").symlink_to(temporary / "elsewhere")
    (temporary / "sonant-x").mkdir()
    os.close(lock(temporary / "sonant-y-lock", FOLDER))
    (temporary / "kept").mkdir()
    (temporary / "sonant-y").symlink_to(temporary / "kept")
    sweep()
    assert {"elsewhere", "kept", "sonant-x", "sonant-x-lock"} <= set(names(temporary))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_other_users_are_kept(temporary: Path) -> None:
    os.close(lock(temporary / "sonant-x-lock", FOLDER))
    (temporary / "sonant-x").mkdir()
    os.chown(temporary / "sonant-x-lock", 12_345, 12_345)
    sweep()
    assert names(temporary) == ["sonant-x", "sonant-x-lock"]


def test_a_later_server_removes_leftovers_of_a_killed_one(
    tiny_checkpoint: Path, temporary: Path
) -> None:
    """All its processes are killed at once while another server runs. A signal ends the later one,
    although it is still loading.
    """
    flags = {"front_ends": 2, "prometheus-metrics-mode": "launch_multiproc_server"}

    async def scenario() -> None:
        async with serving_process(tiny_checkpoint) as living:
            address = await living.ready()
            kept = names(temporary)
            async with serving_process(tiny_checkpoint, metrics_port=0, **flags) as killed:
                await killed.ready()
                _kill_all(killed)
                await killed.ended()
            left = set(names(temporary)) - set(kept)
            assert len(left) == 9  # four sockets, two folders, three locks
            async with serving_process(tiny_checkpoint) as later:
                await later.logged("listening on")
                assert not left & set(names(temporary))
                assert set(kept) < set(names(temporary))
                later.process.terminate()
                assert await later.ended() == 0
                assert "Traceback" not in later.log
                assert await later.line() == "", "it had not been ready"
            assert names(temporary) == kept
            async with stub_of(address) as stub:
                spoken = [r async for r in stub.SynthesizeStream(stream_request())]
                assert grouped(spoken).data
            living.process.terminate()
            assert await living.ended() == 0
        assert names(temporary) == []

    run(scenario())


def _kill_all(server: Process) -> None:
    """Kill all processes, stopped first: a child whose parent is gone would clean up."""
    children = processes_of(server, "-m")
    assert len(children) == 3
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (server.process.pid, *children):
            os.kill(pid, number)
