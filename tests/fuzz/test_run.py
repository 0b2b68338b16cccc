"""The runner with targets that fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.base import Case, InvariantError, Target, random_of
from tests.fuzz.run import Find, Slice, TargetCounts, run_all, run_slice, tried

SEED = 1
LONG_S = 10_000.0


def _breaks(chance: Random) -> None:
    """Fail once in four: a violation, an end of the process, a hang."""
    kind = chance.randrange(4)
    if kind == 0:
        raise InvariantError("number 17 is wrong")
    if kind == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == 2:
        time.sleep(LONG_S)


@contextmanager
def _broken(_: Path) -> Iterator[Case]:
    yield _breaks
    raise InvariantError("wrong at the end")


BROKEN = Target("broken", _broken)


def _index_of(kind: int) -> int:
    return next(i for i in range(99) if random_of(SEED, "broken", i).randrange(4) == kind)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(0, "number 17 is wrong"), (1, "the process died: -9"), (2, "hangs: no answer within 3 s")],
)
def test_an_input_that_breaks_a_target_is_found(kind: int, text: str) -> None:
    index, counts = _index_of(kind), TargetCounts()
    part = Slice(BROKEN, SEED, index, LONG_S, count=1)
    found = next(run_slice(part, counts, hang_s=3))
    assert text in found.text
    assert found.command == f"python -m tests.fuzz --only broken --seed 1 --first {index} --count 1"
    assert counts.num_inputs == 1


def test_the_end_is_checked(tmp_path: Path) -> None:
    part = Slice(BROKEN, SEED, _index_of(3), LONG_S, count=1)
    (found,) = tried(part, tmp_path)
    assert "wrong at the end" in found.text
    assert found.command == "python -m tests.fuzz --only broken --seed 1"


def test_the_inputs_behind_a_crash_are_tried() -> None:
    first, counts = _index_of(1), TargetCounts()
    found = list(run_slice(Slice(BROKEN, SEED, first, LONG_S, count=3), counts, hang_s=3))
    assert found[0].index == first
    assert counts.num_inputs == 3


def test_finds_with_the_same_cause_count_once() -> None:
    text = 'File "a.py", line {}, in f\n    x()\nValueError: {} is wrong'
    finds = [Find("t", SEED, n, text.format(line, n)) for n, line in enumerate((1, 1, 2))]
    counts = TargetCounts()
    assert [counts.add(found) for found in finds] == [True, False, True]
    assert finds[0].place.endswith("ValueError: # is wrong")


def test_an_input_depends_on_its_numbers_only() -> None:
    first, again, other = random_of(1, "a", 2), random_of(1, "a", 2), random_of(1, "a", 3)
    assert first.random() == again.random() != other.random()


def test_a_run_prints_a_line_for_each_target_and_its_finds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    all_counts = run_all([BROKEN], SEED, 1.0, first=_index_of(0), count=1)
    assert [found.index for found in all_counts["broken"].finds.values()] == [_index_of(0), -1]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FOUND: python -m tests.fuzz --only broken --seed 1 --first")
    assert lines[-1].startswith("broken: 1 inputs, ")
    assert lines[-1].endswith(" per second, 2 finds")
