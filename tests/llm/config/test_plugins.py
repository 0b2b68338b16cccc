"""`custom_architectures`: modules that add architectures, and invalid ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm.config import Architecture, PipelineConfig, supported_architectures
from llm.config.architectures import find_architecture, register_architecture
from llm.errors import ConfigError

NAME = "PluginForCausalLM"


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules, which are removed from Python afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


GOOD = f"import llm\nARCHITECTURES = [llm.Architecture({NAME!r}, 'a:B')]\n"


def test_a_plugin_adds_an_architecture(plugins: Path) -> None:
    (plugins / "sonant_plugin_one.py").write_text(GOOD)
    assert NAME not in supported_architectures()
    PipelineConfig(custom_architectures=[f"{plugins}:sonant_plugin_one"])
    assert NAME in supported_architectures()
    register_architecture(Architecture(NAME, "other:Model"))
    PipelineConfig(custom_architectures=["sonant_plugin_one"])  # its folder is on the path now
    assert find_architecture(NAME, "here").model == "a:B"


def test_of_two_with_one_name_the_later_counts(plugins: Path) -> None:
    for index in range(2):
        text = GOOD.replace("a:B", f"a{index}:B")
        (plugins / f"sonant_plugin_same{index}.py").write_text(text)
    names = [f"{plugins}:sonant_plugin_same{index}" for index in range(2)]
    PipelineConfig(custom_architectures=names)
    assert find_architecture(NAME, "here").model == "a1:B"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise OSError('no disk')", r"cannot import it: OSError\('no disk'\)"),
        ("import sonant_nothing_such", "cannot import it: ModuleNotFoundError"),
        ("def", "cannot import it: SyntaxError"),
        ("x = 1", "it has no list ARCHITECTURES, or an empty one"),
        ("ARCHITECTURES = []", "it has no list ARCHITECTURES, or an empty one"),
        ("ARCHITECTURES = 'LlamaModel'", "it has no list ARCHITECTURES"),
        ("ARCHITECTURES = ['LlamaModel']", "'LlamaModel' is no architecture"),
    ],
)
def test_plugins_that_cannot_be_used(plugins: Path, text: str, message: str) -> None:
    (plugins / "sonant_plugin_bad.py").write_text(text)
    name = f"{plugins}:sonant_plugin_bad"
    with pytest.raises(ConfigError, match=f"custom_architectures={name}.*{message}"):
        PipelineConfig(custom_architectures=[name])


@pytest.mark.parametrize("name", ["a:b:c", "folder:", ":module", ""])
def test_names_of_plugins(name: str) -> None:
    with pytest.raises(ConfigError, match=f"custom_architectures={name} must be module or folder"):
        PipelineConfig(custom_architectures=[name])
