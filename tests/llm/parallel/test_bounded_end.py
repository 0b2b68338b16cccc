"""The end of a group whose call of C does not return, in a process that must end all the same."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from llm.parallel.bounded_end import BoundedEnd
from tests.deadlines import HANG_S

PROGRAM = """
import ctypes, sys
from llm.parallel import bounded_end

bounded_end.END_S = 0.2

class Stuck:
    def abort(self):
        ctypes.CDLL(None).sleep(3600)

    def __del__(self):
        self.abort()

end = bounded_end.BoundedEnd(Stuck())
if sys.argv[1] == "waits":
    end.wait()
    print("continues")
"""


class Group:
    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def abort(self) -> None:
        self.has_ended.set()
        raise RuntimeError("a rank has ended")


@pytest.mark.parametrize("how", ["waits", "exits"])
def test_a_process_ends_although_its_group_does_not(how: str) -> None:
    program = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(program, capture_output=True, text=True, timeout=HANG_S, check=True)
    expected = ("continues\n", True) if how == "waits" else ("", False)
    assert (done.stdout, "NCCL has not ended within 0.2 s" in done.stderr) == expected


def test_a_group_that_ends_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    end = BoundedEnd(Group())
    end.begin()
    end.wait()
    assert "ended with an error: a rank has ended" in caplog.text
    assert "not ended" not in caplog.text


def test_a_group_ends_when_its_owner_is_collected() -> None:
    group = Group()
    end = BoundedEnd(group)
    assert not group.has_ended.is_set()
    del end
    assert group.has_ended.wait(HANG_S)
