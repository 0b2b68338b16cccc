"""Mutation testing: change one expression at a time in a copy of the code; a test must fail.

    python -m tests.mutation --module scheduler --sample 100 --seed 1

The mutations are those of cosmic-ray (extra `mutation`); the results are in
`docs/mutation_testing.md`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch  # noqa: F401 - once, before the forks

if TYPE_CHECKING:
    from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).parent.parent
LEAST_CAUGHT = 0.9
# of a test process, so that an endless loop does not fill the machine's memory
MEMORY_BYTES = 8 * 2**30
PYTEST_OPTIONS = ("-x", "-p", "no:xdist", "-p", "no:cacheprovider", "--hypothesis-seed=0")

# Between enum members, None and small ints, `is` and `==` have the same result.
SAME_ANSWER = ("Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq")


@dataclass(frozen=True)
class Guarded:
    """Files of a module, and the tests that must detect a change in them, cheapest first."""

    module: str
    files: tuple[str, ...]
    tests: tuple[str, ...]


TARGETS = (
    Guarded(
        "chunker",
        ("decoder/streaming.py",),
        (
            "tests/decoder/test_blocks.py",
            "tests/decoder/test_streaming.py",
            "tests/decoder/test_streaming_options.py",
            "tests/decoder/test_look_ahead.py",
        ),
    ),
    Guarded(
        "scheduler",
        (
            "llm/request.py",
            "llm/scheduler/adapters.py",
            "llm/stats.py",
            "llm/scheduler/limits.py",
            "llm/scheduler/planner.py",
            "llm/scheduler/scheduler.py",
            "llm/scheduler/table.py",
        ),
        (
            "tests/llm/engine/test_request_rules.py",
            "tests/llm/scheduler/test_limits.py",
            "tests/llm/scheduler/test_queue.py",
            "tests/llm/scheduler/test_table.py",
            "tests/llm/scheduler/test_scheduler.py",
            "tests/llm/scheduler/test_control.py",
            "tests/llm/scheduler/test_ahead.py",
            "tests/llm/scheduler/test_adapter_admission.py",
            "tests/llm/engine/test_stats.py",
            "tests/llm/scheduler/test_fairness.py",
            "tests/llm/scheduler/test_prefill_policy.py",
            "tests/llm/scheduler/test_storm.py",
        ),
    ),
    Guarded(
        "page_pool",
        ("llm/kv_cache/page_pool.py", "llm/kv_cache/manager.py"),
        (
            "tests/llm/kv_cache/test_page_pool.py",
            "tests/llm/kv_cache/test_kv_manager.py",
            "tests/llm/kv_cache/test_host_cache.py",
        ),
    ),
    Guarded(
        "requests",
        (
            "tts/server/wire/common.py",
            "tts/server/wire/speech.py",
        ),
        (
            "tests/tts/server/test_proto_values.py",
            "tests/tts/server/test_refusals.py",
            "tests/tts/server/test_speech_service.py",
            "tests/tts/server/test_voices.py",
            "tests/tts/server/test_sessions.py",
        ),
    ),
    Guarded(
        "requests",
        ("tts/server/wire/text.py",),
        (
            "tests/tts/server/test_text_values.py",
            "tests/tts/server/test_text_service.py",
            "tests/tts/textgen/test_structured.py",
        ),
    ),
    Guarded("admission", ("tts/engine/admission.py",), ("tests/tts/engine/test_admission.py",)),
)
SAMPLES = {"chunker": 70, "scheduler": 130, "page_pool": 60, "requests": 90, "admission": 40}
"""Default number of mutants of each module."""


@dataclass(frozen=True)
class Tried:
    """A mutant and its outcome."""

    spec: MutationSpec
    line: str
    outcome: str  # caught, time-out or survived
    change: str

    @property
    def name(self) -> str:
        """Location and change of the mutant."""
        place = f"{self.spec.module_path}:{self.spec.start_pos[0]}"
        return f"{place} {self.spec.operator_name.removeprefix('core/')}"


def in_order(mutants: Sequence[MutationSpec], seed: int) -> list[MutationSpec]:
    """Shuffle the mutants: one of every place comes before a second one of any place."""
    shuffled = random.Random(seed).sample(mutants, len(mutants))
    seen: Counter[tuple[Path, tuple[int, int]]] = Counter()
    turns = []
    for index, mutant in enumerate(shuffled):
        place = (mutant.module_path, mutant.start_pos)
        turns.append((seen[place], index))
        seen[place] += 1
    return [shuffled[index] for _, index in sorted(turns)]


def pick(mutants: Sequence[MutationSpec], count: int, seed: int) -> list[MutationSpec]:
    """Draw `count` mutants that compile; any test would catch the others."""
    chosen = itertools.islice(filter(compiles, in_order(mutants, seed)), count)
    return sorted(chosen, key=place_of)


def place_of(mutant: MutationSpec) -> tuple[Path, tuple[int, int], str, int]:
    """Return a sort key: file, place and operator."""
    return mutant.module_path, mutant.start_pos, mutant.operator_name, mutant.occurrence


def mutated(mutant: MutationSpec) -> str:
    """Return the source text with the mutation."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    operator = get_operator(mutant.operator_name)()
    return mutate_code(mutant.module_path.read_text("utf-8"), operator, mutant.occurrence)


def compiles(mutant: MutationSpec) -> bool:
    """Whether the mutation is valid Python."""
    with warnings.catch_warnings(action="ignore"):  # such as `1 is x`
        try:
            compile(mutated(mutant), str(mutant.module_path), "exec")
        except SyntaxError:
            return False
    return True


def declarations(source: str) -> Iterator[ast.AST]:
    """Iterate over code that only a type checker reads: annotations, protocols, `if
    TYPE_CHECKING`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            yield node.returns
        elif _is_for_types_only(node):
            yield node


def _is_for_types_only(node: ast.AST) -> bool:
    if isinstance(node, ast.ClassDef):
        return "Protocol" in map(ast.unparse, node.bases)
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def is_inside(position: tuple[int, int], nodes: Iterable[ast.AST]) -> bool:
    """Whether a position (line, column) is inside one of the nodes."""
    return any(
        (node.lineno, node.col_offset) <= position < (node.end_lineno, node.end_col_offset)
        for node in nodes
    )


def is_marker(position: tuple[int, int], source: str) -> bool:
    """Whether a position (line, column) is the `*,` before keyword-only parameters."""
    line, column = position
    return source.splitlines()[line - 1].startswith("*,", column)


def mutants_of(files: Sequence[str]) -> list[MutationSpec]:
    """Return every mutation of the files that a test could detect."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB, use_db

    with use_db(":memory:", WorkDB.Mode.create) as database:
        init([Path(file) for file in files], database, {})
        found = [mutation for item in database.work_items for mutation in item.mutations]
    sources = {Path(file): Path(file).read_text("utf-8") for file in files}
    silent = {path: list(declarations(source)) for path, source in sources.items()}
    return [
        mutant
        for mutant in sorted(found, key=place_of)
        if not mutant.operator_name.endswith((*SAME_ANSWER, "/NoOp"))
        and not is_inside(mutant.start_pos, silent[mutant.module_path])
        and not is_marker(mutant.start_pos, sources[mutant.module_path])
    ]


def run_pytest(tests: Sequence[str], log: Path) -> None:
    """Run tests in the current folder and exit with pytest's status; for a separate process."""
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path[:] = [os.getcwd(), *(entry for entry in sys.path if Path(entry or ".") != ROOT)]
    sys.modules.pop("tests", None)  # so that the copy's tests are imported
    os._exit(pytest.main([*PYTEST_OPTIONS, *tests]))


class Guard:
    """Runs the tests of a target, in the copy that is the current folder.

    Each run is a fork of this process, which has imported slow packages but none of the project's
    own code.
    """

    def __init__(self, target: Guarded) -> None:
        """Raise `RuntimeError` when the tests fail on unchanged code, or pass when the code is
        broken.
        """
        self._tests = target.tests
        self._log = Path.cwd() / "pytest.log"
        self._timeout_s = 600.0
        sys.dont_write_bytecode = False
        started = time.monotonic()
        if self._run() != "survived":
            raise RuntimeError(f"the tests fail without a change:\n{self._log.read_text()}")
        # Compiled code of a mutant could be used for the next one, with the same second and size.
        sys.dont_write_bytecode = True
        self._timeout_s = 20 + 5 * (time.monotonic() - started)
        broken = Path(target.files[0])
        source = broken.read_text("utf-8")
        broken.write_text("raise RuntimeError\n", "utf-8")
        if self._run() != "caught":
            raise RuntimeError(f"the tests do not import {broken.absolute()}")
        broken.write_text(source, "utf-8")

    def _run(self) -> str:
        process = multiprocessing.get_context("fork").Process(
            target=run_pytest, args=(self._tests, self._log)
        )
        process.start()
        process.join(self._timeout_s)
        if process.exitcode is None:
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return "time-out"
        return "caught" if process.exitcode else "survived"

    def try_mutant(self, mutant: MutationSpec) -> Tried:
        """Run the tests on a mutant."""
        path, source = mutant.module_path, mutant.module_path.read_text("utf-8")
        changed = mutated(mutant)
        path.write_text(changed, "utf-8")
        outcome = self._run()
        path.write_text(source, "utf-8")
        before, after = source.splitlines(), changed.splitlines()
        changes = [c for c in difflib.ndiff(before, after) if c.startswith(("- ", "+ "))]
        line = before[mutant.start_pos[0] - 1].strip()
        return Tried(mutant, line, outcome, "\n".join(changes))


def copy_project(to: Path) -> None:
    """Copy the files that git would commit, with uncommitted changes."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def try_module(module: str, count: int, seed: int) -> Iterator[Tried]:
    """Try `count` mutants of a module, in the copy that is the current folder."""
    targets = [target for target in TARGETS if target.module == module]
    files = [file for target in targets for file in target.files]
    chosen = pick(mutants_of(files), count, seed)
    for target in targets:
        guard = Guard(target)
        for mutant in chosen:
            if str(mutant.module_path) in target.files:
                yield guard.try_mutant(mutant)


def table(tried: Sequence[Tried]) -> str:
    """Return the results by file, as a Markdown table."""
    lines = ["| file | mutants | caught | by time-out | survived |", "|---|---|---|---|---|"]
    files = sorted({str(one.spec.module_path) for one in tried})
    for name in (*files, "all"):
        counts = Counter(one.outcome for one in tried if name in (str(one.spec.module_path), "all"))
        caught = counts["caught"] + counts["time-out"]
        row = (name, counts.total(), caught, counts["time-out"], counts["survived"])
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--module", action="append", choices=SAMPLES, help="default: all")
    parser.add_argument("--sample", type=int, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing of mutants")
    return parser.parse_args(words)


def main() -> int:
    """Print every mutant, the survivors' changes and the table; 0 when enough were caught."""
    args = parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    tried = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as copy:
        copy_project(Path(copy))
        os.chdir(copy)
        for module in args.module or SAMPLES:
            for one in try_module(module, args.sample or SAMPLES[module], args.seed):
                print(f"{one.outcome:9}{one.name}  {one.line}", flush=True)
                tried.append(one)
        os.chdir(ROOT)
    for one in tried:
        if one.outcome == "survived":
            print(f"\nsurvived: {one.name}\n{one.change}")
    print(f"\n{table(tried)}")
    num_caught = sum(one.outcome != "survived" for one in tried)
    return 0 if num_caught >= LEAST_CAUGHT * len(tried) else 1


if __name__ == "__main__":
    sys.exit(main())
