"""The house rules, read from the source: who may import whom, how long things may be."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVICE = ("llm", "decoder", "tts")
FOLDERS = (*SERVICE, "training", "benchmarks", "samples", "tests")

LLM_ORDER = [
    "errors",
    "config",
    "request",
    "sequence",
    "batch",
    "memory",
    "parallel",
    "kv_cache",
    "scheduler",
    "attention",
    "lora",
    "kernels",
    "layers",
    "sampling",
    "models",
    "structured",
    "runner",
    "speculative",
    "pipeline",
    "engine",
]

HOST_ONLY = (
    "llm/errors.py",
    "llm/config/*.py",
    "llm/request.py",
    "llm/sequence.py",
    "llm/scheduler/*.py",
    "llm/kv_cache/page_pool.py",
    "llm/kv_cache/page_node.py",
    "llm/kv_cache/host_slots.py",
    "llm/kv_cache/radix_cache.py",
    "llm/kv_cache/manager.py",
)

# Tops of threads and of calls, what nobody above could catch; where code of others is imported;
# and a library (tokenizers) that raises plain Exception.
CATCH_ALL = {
    "llm/config/plugins.py",
    "llm/engine.py",
    "llm/engine_steps.py",
    "tts/audio_worker.py",
    "tts/ipc/engine_server.py",
    "tts/rpc.py",
    "tts/tokenizer.py",
}

# Reads recordings of published codecs, at the first one; nobody who only speaks gets there.
TRANSFORMERS_USERS = {"decoder/encoders.py", "llm/models/auto.py"}

MAX_FUNCTION_LINES = 60
MEDIAN_FUNCTION_LINES = 10

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, and the names taken from it (none for `import x`)."""

    source: str
    line: int
    module: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.module} {' '.join(self.names)}".rstrip()


@cache
def source_files() -> tuple[Path, ...]:
    """Every Python file of ours, generated stubs aside."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return tuple(sorted(p for p in found if not p.name.endswith(("_pb2.py", "_pb2_grpc.py"))))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """All imports of a file: lazy ones, those for types, and import_module("...") alike."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[Import]:
    source = name_of(path)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (Import(source, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: write the whole module name"
            names = tuple(alias.name for alias in node.names)
            yield Import(source, node.lineno, node.module or "", names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                yield Import(source, node.lineno, str(argument.value))


def imports_in(*folders: str) -> Iterator[Import]:
    for path in source_files():
        if path.relative_to(ROOT).parts[0] in folders:
            yield from imports_of(path)


def functions_of(path: Path) -> Iterator[FunctionNode]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, FunctionNode):
            yield node


def lines_of(function: FunctionNode) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def test_there_is_something_to_look_at() -> None:
    names = set(map(name_of, source_files()))
    assert {"llm/engine.py", "decoder/base.py", "tts/say.py", "tests/test_architecture.py"} <= names


@pytest.mark.parametrize(
    ("package", "strangers"),
    [
        ("llm", {"decoder", "tts", "training", "benchmarks", "samples", "tests"}),
        ("decoder", {"llm", "tts", "training", "benchmarks", "samples", "tests"}),
        ("tts", {"training", "benchmarks", "samples", "tests"}),
        ("samples", {"llm", "decoder", "training", "benchmarks", "tests"}),
    ],
)
def test_packages_import_one_way(package: str, strangers: set[str]) -> None:
    wrong = [i for i in imports_in(package) if i.module.split(".")[0] in strangers]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_service_imports_only_the_roots_of_the_core_and_the_decoder() -> None:
    wrong = [i for i in imports_in("tts") if i.module.startswith(("llm.", "decoder."))]
    assert not wrong, "\n".join(map(str, wrong))


def test_samples_use_only_the_wire_contract() -> None:
    ours = [i for i in imports_in("samples") if i.module.split(".")[0] == "tts"]
    wrong = [i for i in ours if i.module != "tts.v1" and not i.module.startswith("tts.v1.")]
    assert ours
    assert not wrong, "\n".join(map(str, wrong))


def _llm_part(module: str) -> str:
    """`llm.kv_cache.manager` -> kv_cache; helper modules share the place of what they help."""
    part = module.split(".")[1]
    return next((name for name in (part, part.split("_")[0]) if name in LLM_ORDER), part)


def test_inside_the_core_an_import_only_points_left() -> None:
    rank = {part: index for index, part in enumerate(LLM_ORDER)}
    wrong = []
    for found in imports_in("llm"):
        if found.source == "llm/__init__.py" or found.module.split(".")[0] != "llm":
            continue
        assert found.module != "llm", f"{found}: name the module, the root imports all of them"
        importer = _llm_part(found.source.removesuffix(".py").replace("/", "."))
        if rank[_llm_part(found.module)] > rank[importer]:
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_every_part_of_the_core_has_a_place_in_the_order() -> None:
    modules = {name_of(p).removesuffix(".py").replace("/", ".") for p in source_files()}
    parts = {_llm_part(m) for m in modules if m.startswith("llm.") and m != "llm.__init__"}
    assert parts <= set(LLM_ORDER)


def test_the_scheduler_and_the_runner_are_strangers() -> None:
    wrong = [
        found
        for found in imports_in("llm")
        if {found.source.split("/")[1], *found.module.split(".")[1:2]} == {"scheduler", "runner"}
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_host_only_modules_know_no_tensor() -> None:
    paths = [path for pattern in HOST_ONLY for path in sorted(ROOT.glob(pattern))]
    assert len(paths) >= len(HOST_ONLY)
    wrong = [
        i for p in paths for i in imports_of(p) if i.module.split(".")[0] in {"torch", "numpy"}
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("llm.scheduler.scheduler, llm.kv_cache.manager", "torch"),
        ("llm, decoder, tts.config", "torch"),
        ("tts.say, tts.say_options", "numpy grpc pydantic torch"),
        ("tts.say_run", "torch transformers"),
        (
            "tts.say_local, llm.engine, llm.pipeline.text_generation",
            "transformers torchaudio llguidance zmq msgspec",
        ),
        ("tts.processes.supervisor, tts.serve", "torch grpc"),
        ("tts.processes.front_end", "torch"),
    ],
)
def test_importing_stays_light(modules: str, absent: str) -> None:
    """In a fresh process: what a module does not need is not loaded for it."""
    code = f"import sys, {modules}; print(*sorted(set('{absent}'.split()) & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert loaded.stdout.split() == []


def test_transformers_is_never_on_the_speaking_path() -> None:
    found = [i for i in imports_in(*SERVICE) if i.module.split(".")[0] == "transformers"]
    wrong = [i for i in found if i.source not in TRANSFORMERS_USERS]
    assert not wrong, "\n".join(map(str, wrong))


def test_only_the_configuration_reads_the_environment() -> None:
    readers = {
        name_of(path)
        for path in source_files()
        if name_of(path).startswith(SERVICE)
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"})
        or (
            isinstance(node, ast.ImportFrom)
            and {"environ", "getenv"} & {a.name for a in node.names}
        )
    }
    assert readers <= {"tts/config.py"}


def _catches_all(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(kind) in {"Exception", "BaseException"} for kind in caught)


def _only_passes_on(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_only_tops_of_threads_and_calls_catch_everything() -> None:
    catching = {
        name_of(path)
        for path in source_files()
        if name_of(path).startswith(SERVICE)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and _catches_all(node) and not _only_passes_on(node)
    }
    assert catching == CATCH_ALL


def test_functions_are_short() -> None:
    wrong = [
        f"{name_of(path)}:{function.lineno} {function.name}: {lines_of(function)} lines"
        for path in source_files()
        for function in functions_of(path)
        if lines_of(function) > MAX_FUNCTION_LINES
    ]
    assert not wrong, "\n".join(wrong)


def test_the_median_function_is_small() -> None:
    lengths = [
        lines_of(function)
        for path in source_files()
        if name_of(path).startswith(SERVICE)
        for function in functions_of(path)
    ]
    assert statistics.median(lengths) <= MEDIAN_FUNCTION_LINES


def test_every_file_says_what_it_is() -> None:
    silent = [
        name_of(path)
        for path in source_files()
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree_of(path))
    ]
    assert not silent


def test_nothing_is_left_for_later() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")
    wrong = [
        f"{name_of(path)}:{number}"
        for path in source_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if any(f"# {mark}" in line for mark in marks)
    ]
    assert not wrong


def test_our_own_classes_are_never_mocked() -> None:
    wrong = [i for i in imports_in("tests") if i.module.startswith("unittest.mock")]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("package", ["llm", "decoder"])
def test_the_public_surface_is_written_down(package: str) -> None:
    root = import_module(package)
    assert len(set(root.__all__)) == len(root.__all__)
    assert [name for name in root.__all__ if not hasattr(root, name)] == []


@pytest.mark.parametrize("package", ["llm", "decoder"])
def test_the_service_and_the_tests_take_from_a_root_only_what_it_promises(package: str) -> None:
    promised = set(import_module(package).__all__)
    taken = {
        name
        for found in imports_in("tts", "tests", "benchmarks")
        if found.module == package
        for name in found.names
    }
    submodules = {path.stem for path in (ROOT / package).iterdir()}
    assert taken - submodules <= promised


def test_every_package_of_the_service_ships() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    find = project["tool"]["setuptools"]["packages"]["find"]
    assert {pattern.rstrip("*") for pattern in find["include"]} == set(SERVICE)
    assert find.get("namespaces", True), "tts/v1 is generated and has no __init__.py"
