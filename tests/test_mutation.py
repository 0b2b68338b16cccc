"""The mutation tester: its mutations, their order, and excluded code."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from tests.mutation import (
    ROOT,
    SAMPLES,
    TARGETS,
    declarations,
    in_order,
    is_inside,
    is_marker,
)


@dataclass(frozen=True)
class Place:
    """Attributes of a mutation that `in_order` reads, and its number at its place."""

    module_path: Path
    start_pos: tuple[int, int]
    number: int


def test_every_file_and_every_test_is_there() -> None:
    names = [name for target in TARGETS for name in (*target.files, *target.tests)]
    assert [name for name in names if not (ROOT / name).is_file()] == []
    assert {target.module for target in TARGETS} == set(SAMPLES)


def test_the_whole_scheduler_is_mutated() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("llm/scheduler/*.py")}
    named = {name for target in TARGETS for name in target.files}
    assert files - named == {"llm/scheduler/__init__.py"}


def test_every_place_has_its_turn_before_one_has_a_second() -> None:
    path = Path("module.py")
    places = [Place(path, (line, 0), number) for line in range(10) for number in range(line + 1)]
    order = in_order(places, 1)
    assert set(order) == set(places)
    assert {place.start_pos for place in order[:10]} == {(line, 0) for line in range(10)}
    assert {place.start_pos for place in order[10:19]} == {(line, 0) for line in range(1, 10)}
    assert order == in_order(places, 1) != in_order(places, 2)


SOURCE = """
from typing import TYPE_CHECKING, Protocol
if TYPE_CHECKING:
    import one
class Shape(Protocol):
    @property
    def size(self) -> int: ...
class Thing:
    width: int | None = 1 + 1
def area(thing: Thing | None, *, factor: int = 1 + 1) -> int | None:
    return factor + 1
"""


def test_code_for_type_checkers_is_left_out() -> None:
    silent = list(declarations(SOURCE))
    operators = [
        (node.lineno, node.right.col_offset - 2)
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.BinOp)
    ]
    heard = sorted(place for place in operators if not is_inside(place, silent))
    assert [SOURCE.splitlines()[line - 1][column] for line, column in heard] == ["+", "+", "+"]
    assert is_inside((3, 3), silent)
    assert is_inside((6, 4), silent)
    assert not is_inside((8, 0), silent)


def test_the_star_before_keywords_is_no_product() -> None:
    source = "def area(a, *, b):\n    return a *b, b"
    assert is_marker((1, 12), source)
    assert not is_marker((2, 13), source)
