"""Architecture rules, checked on the source: imports, lengths of functions, exceptions."""

from __future__ import annotations

import ast
import gc
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVICE = ("llm", "decoder", "tts")
FOLDERS = (*SERVICE, "training", "benchmarks", "samples", "tests")

ORDERED = ("llm", "decoder", "tts")
ARCHITECTURE = ROOT / "docs" / "architecture.md"

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
    "llm/kv_cache/state_slots.py",
    "llm/kv_cache/manager.py",
)

# Entry points of threads and calls; imports of external code; and a library (tokenizers) that
# raises plain Exception.
CATCH_ALL = {
    "llm/config/pipeline.py",
    "llm/engine/engine.py",
    "llm/pipeline/rank_process.py",
    "tts/engine/decode_loop.py",
    "tts/ipc/engine_server.py",
    "tts/server/call.py",
    "tts/checkpoint/tokenizer.py",
}

# transformers encodes recordings with published codecs, at first use; synthesis never imports it.
TRANSFORMERS_USERS = {"decoder/encoders.py", "llm/models/auto.py"}

# Tests of the service, and the helpers of all tests.
SERVICE_TESTS = re.compile(r"tests/(llm|decoder|tts|fuzz)/.*|tests/(?!test_)\w+\.py|.*_samples\.py")

MAX_FUNCTION_LINES = 60
MEDIAN_FUNCTION_LINES = 10

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, and the names imported from it (none for `import x`)."""

    source: str
    line: int
    module: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.module} {' '.join(self.names)}".rstrip()


@cache
def source_files() -> tuple[Path, ...]:
    """Return every Python file of the project, without generated stubs."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return tuple(sorted(p for p in found if not p.name.endswith(("_pb2.py", "_pb2_grpc.py"))))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's tree: walking it takes longer than parsing it."""
    return tuple(ast.walk(tree_of(path)))


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Return all imports of a file: lazy ones, those for types, and import_module("...")."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[Import]:
    source = name_of(path)
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (Import(source, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: write the whole module name"
            names = tuple(alias.name for alias in node.names)
            yield Import(source, node.lineno, node.module or "", names)
        elif isinstance(node, ast.Call) and name_called(node).endswith("import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                yield Import(source, node.lineno, str(argument.value))


@pytest.fixture(scope="module", autouse=True)
def forgets() -> Iterator[None]:
    """Collect no garbage while there are the trees, whose millions of objects it would visit."""
    gc.disable()
    yield
    for cached in (tree_of, nodes_of, imports_of):
        cached.cache_clear()
    gc.enable()


def name_called(call: ast.Call) -> str:
    """Return the last name of what is called: empty unless it ends with one."""
    called = call.func
    return getattr(called, "id", "") or getattr(called, "attr", "")


def imports_in(*folders: str) -> Iterator[Import]:
    for path in source_files():
        if path.relative_to(ROOT).parts[0] in folders:
            yield from imports_of(path)


def functions_of(path: Path) -> Iterator[FunctionNode]:
    for node in nodes_of(path):
        if isinstance(node, FunctionNode):
            yield node


def lines_of(function: FunctionNode) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def test_source_files_are_found() -> None:
    names = set(map(name_of, source_files()))
    assert {
        "llm/engine/engine.py",
        "decoder/base.py",
        "tts/say.py",
        "tests/test_architecture.py",
    } <= names


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("llm", {"decoder", "tts", "training", "benchmarks", "samples", "tests"}),
        ("decoder", {"llm", "tts", "training", "benchmarks", "samples", "tests"}),
        ("tts", {"training", "benchmarks", "samples", "tests"}),
        ("samples", {"llm", "decoder", "training", "benchmarks", "tests"}),
    ],
)
def test_packages_import_in_one_direction(package: str, forbidden: set[str]) -> None:
    wrong = [i for i in imports_in(package) if i.module.split(".")[0] in forbidden]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_services_tests_need_neither_training_nor_benchmarks() -> None:
    """Only tests of those two, of commands in documents, and on a GPU or in `clients` do."""
    imports = [i for i in imports_in("tests") if SERVICE_TESTS.fullmatch(i.source)]
    wrong = [i for i in imports if i.module.split(".")[0] in {"training", "benchmarks"}]
    assert imports
    assert not wrong, "\n".join(map(str, wrong))


def test_the_service_imports_only_the_roots_of_the_core_and_the_decoder() -> None:
    wrong = [i for i in imports_in("tts") if i.module.startswith(("llm.", "decoder."))]
    assert not wrong, "\n".join(map(str, wrong))


def test_samples_use_only_the_wire_contract_and_the_root() -> None:
    ours = [i for i in imports_in("samples") if i.module.split(".")[0] == "tts"]
    public = ("tts", "tts.v1")
    wrong = [i for i in ours if i.module not in public and not i.module.startswith("tts.v1.")]
    assert ours
    assert not wrong, "\n".join(map(str, wrong))


def import_order(package: str) -> list[str]:
    """Return the rooms of a package in the order of docs/architecture.md."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    found = re.search(rf"^{package}: ((?:[\w< ]|\n )+)", text, re.MULTILINE)
    assert found, f"{ARCHITECTURE} has no order of {package}"
    return found[1].replace("<", " ").split()


@pytest.mark.parametrize("package", ORDERED)
def test_every_room_has_a_place_in_the_order(package: str) -> None:
    rooms = {p.stem if p.is_file() else p.name for p in (ROOT / package).iterdir() if is_room(p)}
    order = import_order(package)
    assert sorted(order) == sorted(rooms)


def is_room(path: Path) -> bool:
    is_module = path.suffix == ".py" and path.stem != "__init__"
    return is_module or (path.is_dir() and any(path.glob("*.py")))


@pytest.mark.parametrize("package", ORDERED)
def test_rooms_import_those_before_them(package: str) -> None:
    rank = {room: index for index, room in enumerate(import_order(package))}
    wrong = []
    for found in imports_in(package):
        parts = found.module.split(".")
        if found.source == f"{package}/__init__.py" or parts[0] != package:
            continue
        if len(parts) == 1:  # names of the root
            assert package == "tts", f"{found}: name the module, the root imports all of them"
            continue
        importer = found.source.removesuffix(".py").split("/")[1]
        if rank[parts[1]] > rank[importer]:
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ORDERED)
def test_there_is_no_import_cycle(package: str) -> None:
    """A module's imports, lazy ones and those for types included, never lead back to it."""
    graph = import_graph(package)
    sorter = TopologicalSorter(graph)
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def import_graph(package: str) -> dict[str, set[str]]:
    """Map each module to the modules of its package that it imports, without the package's root."""
    paths = {module_of(p): p for p in source_files() if name_of(p).startswith(f"{package}/")}
    del paths[package]
    graph = {}
    for module, path in paths.items():
        targets = {target for found in imports_of(path) for target in targets_of(found, paths)}
        graph[module] = targets & paths.keys() - {module}
    return graph


def targets_of(found: Import, modules: Collection[str]) -> Iterator[str]:
    """Iterate over the modules that an import names: `from a import b` names a.b if that is one."""
    submodules = [f"{found.module}.{name}" for name in found.names]
    yield from (name for name in submodules if name in modules)
    if not found.names or any(name not in modules for name in submodules):
        yield found.module


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_names_are_imported_from_the_module_that_defines_them() -> None:
    """Modules do not re-export names of others; only a package's `__init__` may."""
    wrong = []
    for found in imports_in(*SERVICE, "benchmarks", "training", "tests"):
        path = ROOT / (found.module.replace(".", "/") + ".py")
        if not path.is_file():
            continue
        foreign = {name for i in imports_of(path) for name in i.names if is_ours(i.module)}
        wrong += [f"{found}" for name in found.names if name in foreign - definitions_of(path)]
    assert not wrong, "\n".join(wrong)


def is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] in FOLDERS


@cache
def definitions_of(path: Path) -> frozenset[str]:
    """Return names that a module binds at its top, except by imports."""
    names: set[str] = set()
    for node in tree_of(path).body:
        if isinstance(node, FunctionNode | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return frozenset(names)


def test_the_scheduler_and_the_runner_do_not_import_each_other() -> None:
    wrong = [
        found
        for found in imports_in("llm")
        if {found.source.split("/")[1], *found.module.split(".")[1:2]} == {"scheduler", "runner"}
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_host_only_modules_do_not_import_torch() -> None:
    paths = [path for pattern in HOST_ONLY for path in sorted(ROOT.glob(pattern))]
    assert len(paths) >= len(HOST_ONLY)
    wrong = [
        i for p in paths for i in imports_of(p) if i.module.split(".")[0] in {"torch", "numpy"}
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (
            "llm.scheduler.scheduler, llm.kv_cache.manager, llm, decoder, tts.config.pipeline, "
            "tts.processes.supervisor, tts.serve, tts.processes.engine",
            "torch grpc starlette uvicorn",
        ),
        (
            "tts, tts.say, tts.cli.options, tts.__main__, tts.health",
            "numpy grpc pydantic torch shtab",
        ),
        ("tts.cli.run", "torch transformers tqdm markdown_it msgspec"),
        ("tts.processes.front_end", "torch starlette uvicorn"),
        ("tts.api.load", "torch grpc transformers"),
        ("decoder, tts.serve, tts.processes.supervisor", "numpy"),
        ("tts.processes.__main__", "asyncio msgspec pydantic"),
    ],
)
def test_imports_do_not_load_heavy_packages(modules: str, absent: str) -> None:
    """In a new process: modules that are not needed are not imported."""
    code = f"import sys, {modules}; print(*sorted(set('{absent}'.split()) & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert loaded.stdout.split() == []


def test_synthesis_does_not_import_transformers() -> None:
    found = [i for i in imports_in(*SERVICE) if i.module.split(".")[0] == "transformers"]
    wrong = [i for i in found if i.source not in TRANSFORMERS_USERS]
    assert not wrong, "\n".join(map(str, wrong))


def test_only_the_configuration_reads_the_environment() -> None:
    readers = {
        name_of(path)
        for path in source_files()
        if name_of(path).startswith(SERVICE)
        for node in nodes_of(path)
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"})
        or (
            isinstance(node, ast.ImportFrom)
            and {"environ", "getenv"} & {a.name for a in node.names}
        )
    }
    assert readers <= {"tts/config/environment.py"}


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
        for node in nodes_of(path)
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


def test_every_file_has_a_docstring() -> None:
    silent = [
        name_of(path)
        for path in source_files()
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree_of(path))
    ]
    assert not silent


def test_there_are_no_todo_marks() -> None:
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


@pytest.mark.parametrize("package", ["llm", "decoder", "tts"])
def test_the_public_surface_is_written_down(package: str) -> None:
    root = import_module(package)
    assert len(set(root.__all__)) == len(root.__all__)
    assert [name for name in root.__all__ if not hasattr(root, name)] == []


@pytest.mark.parametrize("package", ["llm", "decoder"])
def test_the_service_and_the_tests_import_only_public_names_of_a_root(package: str) -> None:
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
