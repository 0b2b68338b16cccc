"""Shared memory between two processes of one machine: turns, limits, and files that are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tts.engine.prefill_client import NUM_SLOTS
from tts.ipc import inbox
from tts.ipc.inbox import Inbox, Outlet

SIZE = 100


def content(number: int, size: int = SIZE) -> np.ndarray:
    return np.full(size, number, np.uint8)


def test_slots_are_used_in_turn() -> None:
    with Inbox(SIZE) as box:
        outlet = Outlet.open(box.path)
        assert outlet is not None
        assert not Path(box.path).exists()
        with outlet:
            for number in range(3 * NUM_SLOTS):
                slot = outlet.put(content(number, SIZE - number))
                assert slot == number % NUM_SLOTS
                out = np.empty(SIZE - number, np.uint8)
                box.read(slot, out)
                assert set(out.tolist()) == {number}
            assert outlet.put(content(0, SIZE + 1)) == -1


def test_only_the_memory_of_an_inbox_is_opened(tmp_path: Path) -> None:
    name = f"sonant-pages-1-{'0' * 32}"
    (tmp_path / name).write_bytes(bytes(SIZE * NUM_SLOTS))
    link = inbox.FOLDER / f"sonant-pages-{os.getpid()}-{'0' * 32}"
    link.symlink_to(tmp_path / name)
    try:
        for path in ("", "/etc/passwd", str(tmp_path / name), str(link), f"{inbox.FOLDER}/{name}"):
            assert Outlet.open(path) is None
    finally:
        link.unlink()


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS])
def test_a_slot_that_does_not_exist_is_refused(slot: int) -> None:
    with Inbox(SIZE) as box, pytest.raises(ValueError, match=f"slot {slot}"):
        box.read(slot, content(0))


def test_an_inbox_is_shut_when_no_writer_holds_it() -> None:
    with Inbox(SIZE) as box:
        outlet = Outlet.open(box.path)
        assert outlet is not None
        with outlet:
            assert not box.shut()
            assert outlet.put(content(1)) == 0
        assert box.shut()
        assert box.shut()
    with Inbox(SIZE) as box:
        assert box.shut()
        assert Outlet.open(box.path) is None, "a writer that comes too late"


def test_the_lock_of_a_killed_writer_ends_with_it() -> None:
    with Inbox(SIZE) as box:
        script = (
            "from tts.ipc.inbox import Outlet; o = Outlet.open({!r}); print(1, flush=1); input()"
        )
        command = [sys.executable, "-c", script.format(box.path)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"1\n"
            assert not box.shut()
            writer.kill()
            writer.wait()
            assert box.shut()


def test_an_inbox_leaves_no_file_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Inbox(SIZE) as box:
        path = Path(box.path)
        assert path.exists()
        assert path.stat().st_mode & 0o077 == 0
    assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) == before
