"""Checks of the documents: commands parse, links have targets, tables are complete."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass

from benchmarks import core
from benchmarks.report import arguments
from tts.__main__ import COMMANDS, SHELLS
from tts.config.pipeline import AudioGenerationConfig, config_from_args
from tts.config.server import ServerConfig
from tts.families.registry import supported_families
from tts.health import build_parser as health_parser
from tts.say import build_parser as say_parser
from tts.serve import build_parser as serve_parser
from tts.v1 import speech_pb2, text_pb2

ROOT = Path(__file__).parent.parent
PATHS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/RESULTS.md"])
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}
README, CONTRIBUTING = DOCUMENTS["README.md"], DOCUMENTS["CONTRIBUTING.md"]
ARCHITECTURE = DOCUMENTS["docs/architecture.md"]
EVERYTHING = "\n".join(DOCUMENTS.values())
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHON = ".venv/bin/python -m "
OTHER_PROGRAMS = (
    "benchmarks/codec_calls.py",
    "benchmarks/divergence.py",
    "benchmarks/idle.py",
    "benchmarks/kernels.py",
    "benchmarks/long_text.py",
    "benchmarks/planted.py",
    "benchmarks/reading.py",
    "benchmarks/replicas.py",
    "benchmarks/results.py",
    "benchmarks/decode_interference.py",
    "benchmarks/skipped.py",
    "benchmarks/understood.py",
    "tests/fuzz/__main__.py",
    "tests/mutation.py",
    "training/evaluate/__main__.py",
    "training/speech_lm/train.py",
    "training/lent/visit.py",
)
"""Programs without a parser to ask, whose flags the documents name."""

MODULES = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "markdown-it-py": "markdown_it",
    "googleapis-common-protos": "google.rpc",
    "protobuf": "google.protobuf",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
}
"""Import names of distributions, if they differ from the distribution's name."""


def section(title: str, document: str) -> str:
    """Return the text under a heading of a document."""
    return document.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_cells(table: str) -> list[str]:
    """Return the first column of a table, without its head."""
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    return [row.split("|")[1].strip() for row in rows[1:]]


def blocks(document: str, language: str = r"\w*") -> list[str]:
    """Return the code blocks of a document."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, document, flags=re.MULTILINE | re.DOTALL)


def commands(start: str) -> list[str]:
    """Return every line of the documents' code blocks that begins so, without its variables."""
    lines = [line for block in blocks(EVERYTHING) for line in block.splitlines()]
    bare = [re.sub(r"^(\w+=\S+ )+", "", line).partition("  #")[0].strip() for line in lines]
    return sorted({line for line in bare if line.startswith(start)})


def dependencies() -> list[str]:
    names = (re.match(r"[\w.-]+", line) for line in PROJECT["project"]["dependencies"])
    return [name.group() for name in names if name]


def test_the_dependency_table_is_the_projects() -> None:
    assert first_cells(section("Dependencies", ARCHITECTURE)) == dependencies()


def test_every_extra_is_named() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    named = section("Dependencies", ARCHITECTURE)
    assert [name for name in extras if f"`{name}`" not in named] == []


def test_every_dependency_is_imported_by_what_ships() -> None:
    imported = set()
    for package in ("llm", "decoder", "tts"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module)
    modules = {MODULES.get(name, name) for name in dependencies()}
    unused = {m for m in modules if not any(i == m or i.startswith(m + ".") for i in imported)}
    assert unused == set()


def test_every_speech_family_is_described() -> None:
    part = section("Speech families", DOCUMENTS["docs/checkpoints.md"])
    assert tuple(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)) == supported_families()


def test_the_test_command_equals_that_of_make() -> None:
    (command,) = re.findall(rf"`({re.escape(PYTHON)}pytest[^`]*)`", CONTRIBUTING)
    test_run = re.search("^PYTEST = (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert test_run is not None
    assert test_run[1].replace("$(BIN)", ".venv/bin") == command
    for target in ("test", "check"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
        assert recipe is not None
        assert recipe.group(1).splitlines()[-1].strip() == "$(PYTEST)"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    named = [command.split()[1] for command in commands("make ")]
    named += re.findall(r"`make ([a-z-]+)[ `]", EVERYTHING)
    assert {"say", "serve", "test", "check", "docs", "test-gpu"} <= set(named) <= targets
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert phony is not None
    assert targets <= set(phony.group(1).split())


def test_modules_that_are_run_exist() -> None:
    modules = set(re.findall(r"python -m ([\w.]+)", EVERYTHING))
    assert {"tts.say", "tts.serve", "pytest"} <= modules
    assert [module for module in modules if find_spec(module) is None] == []


@pytest.mark.parametrize("command", commands(PYTHON))
def test_commands_parse(command: str) -> None:
    module, *words = shlex.split(command.split(" > ", maxsplit=1)[0].removeprefix(PYTHON))
    parsers = {"tts.say": say_parser, "tts.serve": serve_parser}
    if module in parsers:
        parsers[module]().parse_args(words)
        return
    if module == "pytest":
        assert [word for word in words if not (ROOT / word).exists()] == []
        return
    source = (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    assert [f for f in words if f.startswith("--") and f'"{f}"' not in source] == []


@pytest.mark.parametrize("command", [*commands("sonant "), *commands(".venv/bin/sonant ")])
def test_commands_of_sonant_parse(command: str) -> None:
    _, name, *words = shlex.split(command.split(" > ", maxsplit=1)[0])
    assert name in COMMANDS
    parsers = {"say": say_parser, "serve": serve_parser, "health": health_parser}
    if name in parsers:
        parsers[name]().parse_args(words)
    else:
        assert name == "completion"
        assert set(words) <= set(SHELLS)


@pytest.mark.parametrize("command", commands(".venv/bin/pip install"))
def test_installed_extras_exist(command: str) -> None:
    (extras,) = re.findall(r"-e '\.\[([\w,]+)\]'$", command)
    assert set(extras.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()


@pytest.mark.parametrize("command", commands("grpcurl"))
def test_calls_by_grpcurl_are_of_the_contract(command: str) -> None:
    *options, name = shlex.split(command)
    if name == "list":
        return
    service, _, method = name.rpartition("/")
    file = {"tts.v1.SpeechService": speech_pb2, "tts.v1.TextService": text_pb2}[service]
    services = file.DESCRIPTOR.services_by_name
    request = services[service.rpartition(".")[2]].methods_by_name[method].input_type
    message = GetMessageClass(request)()
    json_format.Parse(options[options.index("-d") + 1], message)
    assert message.input.text


WITH_RAY = ("ray", "tts.cluster")  # tests/clients/test_ray.py has examples with them


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_examples_compile_and_import_what_exists(document: str) -> None:
    for block in blocks(DOCUMENTS[document], "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and not str(node.module).startswith(WITH_RAY):
                module = import_module(node.module or "")
                assert [n.name for n in node.names if not hasattr(module, n.name)] == []


RUNNABLE = {
    name: [block for block in blocks(text, "python") if "with load() as voice" in block]
    for name, text in DOCUMENTS.items()
}


def test_python_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On the built-in voice, one after the other, those of each document in a folder of its own."""
    for document, examples in RUNNABLE.items():
        (tmp_path / document).mkdir(parents=True)
        monkeypatch.chdir(tmp_path / document)
        for number, example in enumerate(examples):
            code = compile(example, f"<example {number} of {document}>", "exec")
            exec(code, {"__name__": "__main__"})
    assert capfd.readouterr().err == ""


def test_there_are_python_examples_to_run() -> None:
    assert sum(map(len, RUNNABLE.values())) >= 4


def test_flags_that_are_named_exist() -> None:
    known = say_parser(show_all=True).format_help() + serve_parser(show_all=True).format_help()
    known += arguments("", repeat=1).format_help() + core.parser().format_help()
    known = known.replace("[no-]", "")
    known += "".join((ROOT / path).read_text(encoding="utf-8") for path in OTHER_PROGRAMS)
    flags = {
        f.replace("--no-", "--") for f in re.findall(r"`[^`\n]*?(--[a-z][a-z0-9.-]+)", EVERYTHING)
    }
    assert {"--host", "--model.model-path"} <= flags
    assert [flag for flag in flags if flag not in known] == []


def anchors(document: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```$", "", document, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def broken_links(name: str) -> Iterator[str]:
    """Links and pictures of a document that lead to no file, or to no heading of one."""
    text = re.sub(r"^```.*?^```$", "", DOCUMENTS[name], flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (
            anchor and anchor not in anchors(file.read_text(encoding="utf-8"))
        ):
            yield target


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    assert list(broken_links(name)) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_are_named_exist(name: str) -> None:
    text = DOCUMENTS[name].partition("### Modules that moved")[0]
    folders = "|".join(path.name for path in ROOT.glob("[!.]*") if path.is_dir())
    named = re.findall(rf"`((?:{folders})/[\w/.*-]+)`", text)
    assert [path for path in named if not any(ROOT.glob(path))] == []


def test_no_document_has_the_marks_of_an_unfinished_merge() -> None:
    paths = [
        *PATHS,
        *(path for folder in ("training", "tts") for path in ROOT.glob(f"{folder}/**/*.md")),
    ]
    marked = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)
    assert [path for path in paths if marked.search(path.read_text(encoding="utf-8"))] == []


def test_the_front_page_leads_to_every_page() -> None:
    index = DOCUMENTS["docs/index.md"]
    assert "(docs/index.md)" in README
    pages = [name.removeprefix("docs/") for name in DOCUMENTS if name.startswith("docs/")]
    assert [page for page in pages if page != "index.md" and f"({page})" not in index] == []


def test_the_front_page_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_every_streaming_option_is_explained_with_its_default() -> None:
    streaming = DOCUMENTS["docs/streaming.md"]
    rows = [
        line
        for line in section("Streaming options", streaming).splitlines()
        if line.startswith("| `")
    ]
    fields = AudioGenerationConfig.model_fields
    options = [
        name for name in fields if name.split("_")[0] in {"chunk", "buffer", "block", "prepend"}
    ]
    assert [row.split("`")[1] for row in rows] == options
    shown = {row.split("`")[1]: row.split("|")[3].strip(" `") for row in rows}
    for name in options[1:]:
        default = fields[name].default
        assert shown[name] == str(getattr(default, "value", default)).lower()


def test_the_picture_names_what_exists() -> None:
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert "(docs/architecture.svg)" in README
    sources = {
        package: "".join(p.read_text(encoding="utf-8") for p in (ROOT / package).rglob("*.py"))
        for package in ("llm", "decoder", "tts")
    }
    for package, name in re.findall(r"(llm|decoder|tts): (\w+)", picture):
        assert f"class {name}" in sources[package]


def test_the_license_is_the_projects() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_ci_runs_the_whole_check_in_a_fresh_environment() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert any(line.startswith("make check VENV=") for line in lines)


def test_the_configuration_file_shown_equals_the_flag_and_the_variable(
    tmp_path: Path,
) -> None:
    serving = DOCUMENTS["docs/serving.md"]
    (shown,) = blocks(serving, "yaml")
    (tmp_path / "sonant.yaml").write_text(shown)
    (flag,) = re.findall(r"`(--model\.kv-cache\.num-pages \d+)`", serving)
    (variable,) = re.findall(r"`(SONANT_MODEL__\w+=\d+)`", serving)
    parser, needed = serve_parser(), ["--audio-decoder=embedded"]

    def num_pages(line: list[str], environ: dict[str, str]) -> int | None:
        args = parser.parse_args([*needed, *line])
        config = config_from_args(AudioGenerationConfig, args, environ=environ)
        return config.model.kv_cache.num_pages

    file = [f"--config-file={tmp_path / 'sonant.yaml'}"]
    name, _, text = variable.partition("=")
    assert num_pages(file, {}) == num_pages(flag.split(), {}) == num_pages([], {name: text}) == 64
    server = config_from_args(ServerConfig, parser.parse_args(file), environ={})
    assert server.port == 50052


def test_modules_and_names_of_the_changelog_exist() -> None:
    changes = section("Unreleased (0.2.0)", DOCUMENTS["CHANGELOG.md"])
    rows = [line.split("|") for line in changes.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`(\w+\.[\w.]+)`", row[2])}
    assert len(names) > 100
    assert [name for name in sorted(names) if not is_importable(name)] == []


def test_names_of_the_interface_exist() -> None:
    page = DOCUMENTS["docs/interface.md"]
    names = set(re.findall(r"`((?:llm|tts|decoder)\.[A-Za-z_]\w*)`", page))
    assert len(names) > 30
    roots = {name: import_module(name) for name in ("llm", "tts", "decoder")}
    missing = [n for n in names if n.partition(".")[2] not in roots[n.partition(".")[0]].__all__]
    assert missing == []


def is_importable(name: str) -> bool:
    """A module, or a name in one."""
    home, _, attribute = name.rpartition(".")
    try:
        is_module = find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module, no package
        is_module = False
    return is_module or hasattr(import_module(home), attribute)
