"""What the README says is so: commands parse, links lead somewhere, tables are complete."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import core
from benchmarks.report import arguments
from training.run import build_parser as training_parser
from tts.config import AudioGenerationConfig, ServerConfig, config_from_args
from tts.families.registry import supported_families
from tts.say import build_parser as say_parser
from tts.serve import build_parser as serve_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHON = ".venv/bin/python -m "

MODULES = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "googleapis-common-protos": "google.rpc",
    "protobuf": "google.protobuf",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
}
"""What a distribution is imported as, where that is not its name."""


def section(title: str) -> str:
    """The text under a heading."""
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_cells(table: str) -> list[str]:
    """The first column of a table, without its head."""
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    return [row.split("|")[1].strip() for row in rows[1:]]


def commands() -> list[str]:
    """Every line of the code blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def dependencies() -> list[str]:
    names = (re.match(r"[\w.-]+", line) for line in PROJECT["project"]["dependencies"])
    return [name.group() for name in names if name]


def test_the_dependency_table_is_the_projects() -> None:
    assert first_cells(section("Dependencies")) == dependencies()


def test_every_extra_is_named() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert [name for name in extras if f"`{name}`" not in section("Dependencies")] == []


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
    part = README[README.index("### Speech families") : README.index("## Codecs")]
    assert tuple(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)) == supported_families()


def test_the_test_command_is_what_make_runs() -> None:
    (command,) = re.findall(rf"`({re.escape(PYTHON)}pytest[^`]*)`", section("Tests"))
    test_run = re.search("^PYTEST = (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert test_run is not None
    assert test_run[1].replace("$(BIN)", ".venv/bin") == command
    for target in ("test", "check"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
        assert recipe is not None
        assert recipe.group(1).splitlines()[-1].strip() == "$(PYTEST)"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    named = re.findall(r"^make ([a-z-]+)", README + CONTRIBUTING, flags=re.MULTILINE)
    named += re.findall(r"`make ([a-z-]+)`", README + CONTRIBUTING)
    assert {"say", "test", "check", "test-gpu"} <= set(named) <= targets
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert phony is not None
    assert targets <= set(phony.group(1).split())


def test_modules_that_are_run_exist() -> None:
    modules = set(re.findall(r"python -m ([\w.]+)", README + CONTRIBUTING))
    assert {"tts.say", "tts.serve", "pytest"} <= modules
    assert [module for module in modules if find_spec(module) is None] == []


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith(PYTHON)])
def test_commands_parse(command: str) -> None:
    module, *words = shlex.split(command.split(" > ", maxsplit=1)[0].removeprefix(PYTHON))
    parsers = {
        "tts.say": say_parser, "tts.serve": serve_parser, "training.run": training_parser
    }  # fmt: skip
    if module in parsers:
        parsers[module]().parse_args(words)
    else:
        assert module.startswith("samples.")
        source = (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        assert all(f'"{word}"' in source for word in words if word.startswith("--"))


def test_flags_that_are_named_exist() -> None:
    known = "".join((say_parser().format_help(), serve_parser().format_help()))
    known += arguments("", repeat=1).format_help() + core.parser().format_help()
    known += training_parser().format_help()
    flags = set(re.findall(r"`[^`\n]*?(--[a-z][a-z.-]+)", README))
    assert {"--host", "--model.model-path"} <= flags
    assert [flag for flag in flags if flag not in known] == []


def test_links_lead_somewhere() -> None:
    targets = set(re.findall(r"\]\(([^)#]+)\)", README + CONTRIBUTING))
    assert {"CONTRIBUTING.md", "LICENSE", "proto/tts/v1", "tts/embedded"} <= targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_streaming_option_is_explained_with_its_default() -> None:
    rows = [line for line in section("Streaming options").splitlines() if line.startswith("| `")]
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
    picture = section("How it works")
    sources = {
        package: "".join(p.read_text(encoding="utf-8") for p in (ROOT / package).rglob("*.py"))
        for package in ("llm", "decoder", "tts")
    }
    for package, name in re.findall(r"(llm|decoder|tts): (\w+)", picture):
        assert f"class {name}" in sources[package]
    for name in ("Scheduler", "TextGenerationPipeline", "KVCacheManager", "TokenChunk"):
        assert name in picture
        assert f"class {name}" in sources["llm"]
    assert "class DecodeWindow" in sources["decoder"]


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


def test_the_configuration_file_shown_says_what_the_flag_and_the_variable_say(
    tmp_path: Path,
) -> None:
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "sonant.yaml").write_text(shown)
    (flag,) = re.findall(r"`(--model\.kv-cache\.num-pages \d+)`", README)
    (variable,) = re.findall(r"`(SONANT_MODEL__\w+=\d+)`", README)
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
