"""Every field has the same value from the command line, a file and the environment."""

from __future__ import annotations

import json
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from llm import ConfigError, StrictModel
from tts import serve
from tts.config.pipeline import AudioGenerationConfig, config_from_args, load_config
from tts.config.server import ServerConfig
from tts.config.sources import inner_type, is_section, nested_values, walk_fields

ROOT = Path(__file__).parents[3]
CASES: tuple[tuple[type[StrictModel], str], ...] = (
    (AudioGenerationConfig, "none"),
    (ServerConfig, "speech_server"),  # excludes a text model of this server
    (ServerConfig, "text_model"),
)
"""Classes, and the beginning of names that are left out."""
WHERE_TO_READ = {"config_file", "section_name"}
TEXTS = {  # where not any text will do
    "zmq_endpoint_base": "ipc:///tmp/sonant-test",
    "prefill_endpoints": "ipc:///tmp/sonant-one,tcp://two.example:5555",
    "prefill_devices": "cuda:1,cuda:3",
    "model.device_specs": "cuda:3",
    "draft_model.device_specs": "cuda:3",
    "audio_decoder_config": '{"max_batch": 3}',
    "text_model_config": '{"max_batch_size": 3}',
    "unload_after_s": "900",
    "chunk_size": "7,8",
    "max_num_steps": "3",
    "max_prompt_duration_s": "0.25",
    "max_message_bytes": "5000",
    "host": "::1",
    "speech_server": "one.example:9000",
    "http_cors_origins": "https://one.example,http://two.example:81",
}


def text_of(name: str, field: FieldInfo) -> str:
    """A text, as on a command line, of a value that is not the field's default."""
    kind = inner_type(field.annotation)
    default = field.get_default(call_default_factory=True)
    if name in TEXTS:
        return TEXTS[name]
    if kind is bool:
        return str(not default).lower()
    if get_origin(kind) is Literal:
        return str(next(value for value in get_args(kind) if value != default))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return str(next(member.value for member in kind if member is not default))
    number = (default or 0) if isinstance(default, int | float) else 0
    return {int: str(number + 3), float: "0.125", list[str]: "one,two"}.get(kind, "some/text")


def given_texts(model_class: type[StrictModel], without: str) -> dict[str, str]:
    """A text for every field but the sections and those that say where to read."""
    fields = dict(walk_fields(model_class))
    return {
        name: text_of(name, field)
        for name, field in fields.items()
        if name not in WHERE_TO_READ
        and not name.startswith(without)
        and not is_section(inner_type(field.annotation))
    }


def from_flags(model_class: type[StrictModel], line: list[str], **environ: str) -> StrictModel:
    return config_from_args(model_class, serve.build_parser().parse_args(line), environ=environ)


def as_flags(texts: dict[str, str]) -> list[str]:
    line = []
    for name, text in texts.items():
        flag = name.replace("_", "-")
        switch = {"true": f"--{flag}", "false": f"--no-{flag}"}
        line.append(switch.get(text, f"--{flag}={text}"))
    return line


def dumped(config: BaseModel) -> dict[str, Any]:
    return {k: v for k, v in config.model_dump(mode="json").items() if k not in WHERE_TO_READ}


@pytest.mark.parametrize(("model_class", "without"), CASES)
def test_command_line_file_and_environment_are_equivalent(
    model_class: type[StrictModel], without: str, tmp_path: Path
) -> None:
    texts = given_texts(model_class, without)
    by_flags = dumped(from_flags(model_class, as_flags(texts)))

    variables = {f"SONANT_{n.replace('.', '__').upper()}": t for n, t in texts.items()}
    assert dumped(from_flags(model_class, [], **variables)) == by_flags

    plain = {n: yaml.safe_load(t) if t in ("true", "false") else t for n, t in texts.items()}
    path = tmp_path / "values.yaml"
    assert len(plain) == len(texts) > 30
    path.write_text(yaml.safe_dump({model_class.SECTION: nested_values(model_class, plain)}))
    assert dumped(from_flags(model_class, [f"--config-file={path}"])) == by_flags


@pytest.mark.parametrize(("model_class", "without"), CASES)
def test_each_of_these_values_differs_from_the_default(
    model_class: type[StrictModel], without: str
) -> None:
    """Otherwise the test above could not fail."""
    needed = {"audio_decoder": "embedded", "defer_resolve": True, "zmq_endpoint_base": "tcp://x:1"}
    if model_class is ServerConfig:
        needed = {}
    plain = model_class(
        **needed, **{s: {} for s in ("draft_model", "lora", "speculative") if needed}
    )
    changed = from_flags(model_class, as_flags(given_texts(model_class, without)))
    for name, field in walk_fields(model_class):
        if name in WHERE_TO_READ | {"defer_resolve"} or is_section(inner_type(field.annotation)):
            continue
        if name.startswith(without):
            continue
        values = []
        for config in (plain, changed):
            found: Any = config
            for part in name.split("."):
                found = getattr(found, part)
            values.append(found)
        assert values[0] != values[1], name


def test_a_value_inside_creates_an_optional_section() -> None:
    line = ["--audio-decoder=embedded", "--defer-resolve"]
    assert from_flags(AudioGenerationConfig, line).lora is None  # type: ignore[attr-defined]
    inside = [*line, "--lora.max-lora-rank=4"]
    config = from_flags(AudioGenerationConfig, [*inside, '--lora={"max_num_loras": 2}'])
    assert isinstance(config, AudioGenerationConfig)
    assert config.lora is not None
    assert (config.lora.max_lora_rank, config.lora.max_num_loras) == (4, 2)
    config = from_flags(AudioGenerationConfig, inside, SONANT_LORA__MAX_LORA_RANK="9")
    assert isinstance(config, AudioGenerationConfig)
    assert config.lora is not None
    assert config.lora.max_lora_rank == 4
    assert from_flags(AudioGenerationConfig, [*line, "--lora=none"]).lora is None  # type: ignore[attr-defined]


def test_help_loads_no_model() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "tts.serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("usage: python -m tts.serve [options]")
    assert not any(line.endswith(" torch") for line in done.stderr.splitlines())


@pytest.mark.parametrize(
    ("text", "is_deferred"), [("1", True), ("true", True), ("yes", True), ("0", False)]
)
def test_resolving_may_be_deferred_by_the_environment(text: str, is_deferred: bool) -> None:
    config = from_flags(
        AudioGenerationConfig, ["--audio-decoder=embedded"], SONANT_DEFER_RESOLVE=text
    )
    assert isinstance(config, AudioGenerationConfig)
    assert config.is_resolved != is_deferred


def test_features_that_the_model_refuses_are_refused_for_its_draft() -> None:
    line = ["--audio-decoder=embedded", "--draft-model.trust-remote-code"]
    with pytest.raises(ConfigError, match=r"draft_model\.trust_remote_code=True is not available"):
        from_flags(AudioGenerationConfig, line)


def test_the_command_resolves_deferred_values() -> None:
    args = serve.build_parser().parse_args(["--defer-resolve"])
    assert serve.read_config(args).model.is_resolved


NUMBERS = (
    "buffer",
    "max_length",
    "max_num_steps",
    "model.kv_cache.num_pages",
    "lora.max_num_loras",
)
LAYERS = ("flag", "file", "environment", "base")  # the first one that sets a field wins
values_by_layer = st.dictionaries(
    st.sampled_from(NUMBERS),
    st.dictionaries(st.sampled_from(LAYERS), st.integers(2, 99), min_size=1),
)


SHARED_FOLDER = [HealthCheck.function_scoped_fixture]  # each example overwrites its file


@settings(max_examples=60, suppress_health_check=SHARED_FOLDER)
@given(said=values_by_layer)
def test_the_first_layer_that_sets_a_field_wins(
    said: dict[str, dict[str, int]], tmp_path: Path
) -> None:
    def texts(layer: str) -> dict[str, str]:
        return {name: str(by[layer]) for name, by in said.items() if layer in by}

    def nested(layer: str) -> dict[str, Any]:
        return nested_values(AudioGenerationConfig, texts(layer))

    path = tmp_path / "values.json"
    path.write_text(json.dumps({"audio_generation_config": nested("file")}))
    config = load_config(
        AudioGenerationConfig,
        nested("flag") | {"audio_decoder": "embedded", "defer_resolve": True},
        config_file=str(path),
        environ={
            f"SONANT_{name.replace('.', '__').upper()}": text
            for name, text in texts("environment").items()
        },
        base=nested("base"),
    )
    for name, by_layer in said.items():
        found: Any = config
        for part in name.split("."):
            found = getattr(found, part)
        assert found == next(by_layer[layer] for layer in LAYERS if layer in by_layer)
    assert "lora.max_num_loras" in said or config.lora is None
