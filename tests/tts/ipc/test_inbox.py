"""Shared memory between two processes of one machine: turns, limits, and files that are refused."""

from __future__ import annotations

import os
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


def test_an_inbox_leaves_no_file_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Inbox(SIZE) as box:
        path = Path(box.path)
        assert path.exists()
        assert path.stat().st_mode & 0o077 == 0
    assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) == before
