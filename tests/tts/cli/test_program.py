"""The end of a program's process: threads, exit handlers and output; its objects are not freed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tts.cli.program import LOST_OUTPUT

PROGRAM = """
import atexit, concurrent.futures, sys, threading, time
from tts.cli.program import run_program

class Freed:
    def __del__(self):
        print("freed")

kept = Freed()

def late():
    time.sleep(0.1)
    print("thread")

def main():
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(print, "pool").result()
    threading.Thread(target=late).start()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    atexit.register(print, "handler")
    print("main", end=" ")
    print("no newline", end="", file=sys.stderr)
    return 7

run_program(main)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_threads_end_and_exit_handlers_run_but_objects_are_not_freed() -> None:
    ended = run(PROGRAM)
    assert ended.returncode == 7
    assert ended.stdout.split() == ["pool", "main", "thread", "handler"]
    assert ended.stderr == "no newline"


def test_an_error_or_an_exit_of_the_program_ends_the_process_as_usual() -> None:
    ended = run("from tts.cli.program import run_program; run_program(lambda: 1 // 0)")
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr
    ended = run("import sys; from tts.cli.program import run_program; run_program(sys.exit)")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_imports_start_few_collections_of_garbage() -> None:
    ended = run(
        "import gc; from tts.cli.program import YOUNG_OBJECTS, run_program;"
        "run_program(lambda: print(gc.isenabled(), gc.get_threshold()[0] == YOUNG_OBJECTS) or 0)"
    )
    assert ended.stdout == "True True\n"


def test_closed_standard_streams_do_not_matter() -> None:
    program = "import sys; sys.stdout = sys.stderr = None;"
    ended = run(program + "from tts.cli.program import run_program; run_program(lambda: 3)")
    assert ended.returncode == 3


LOOP = """
import asyncio
loop = asyncio.new_event_loop()
loop.call_soon(end_process, 7)
loop.run_forever()
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
@pytest.mark.parametrize(
    ("end", "status"),
    [("run_program(lambda: 0)", LOST_OUTPUT), ("run_program(lambda: 7)", 7), (LOOP, 7)],
)
def test_a_process_ends_although_its_output_cannot_be_written(end: str, status: int) -> None:
    program = (
        "from tts.cli.program import end_process, run_program; import sys; sys.stdout.write('x')\n"
        + end
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program], stdout=full, env=buffered, timeout=60, check=False
        )
    assert ended.returncode == status
