"""PipelineConfig beyond keywords: files, sections, the chat template, log output."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from llm.config import PipelineConfig, RunningPlan
from llm.errors import ConfigError

FILE_VALUES = {"max_length": 44, "model": {"kv_cache": {"kv_cache_page_size": 32}}}
FILE_TEXTS = {
    "values.json": json.dumps({"pipeline_config": FILE_VALUES, "other": {"max_length": 55}}),
    "values.yaml": (
        "pipeline_config:\n  max_length: 44\n  model: {kv_cache: {kv_cache_page_size: 32}}\n"
        "other: {max_length: 55}\n"
    ),
    "values.toml": (
        "[pipeline_config]\nmax_length = 44\n[pipeline_config.model.kv_cache]\n"
        "kv_cache_page_size = 32\n[other]\nmax_length = 55\n"
    ),
}


@pytest.fixture
def config_file(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    path = tmp_path / request.param
    path.write_text(FILE_TEXTS[request.param])
    return str(path)


@pytest.mark.parametrize("config_file", FILE_TEXTS, indirect=True)
def test_a_file_gives_values_and_keywords_win(config_file: str) -> None:
    config = PipelineConfig(config_file=config_file)
    assert (config.max_length, config.model.kv_cache.kv_cache_page_size) == (44, 32)
    assert config.config_file == config_file
    mixed = PipelineConfig(
        config_file=config_file, max_length=2, model={"kv_cache": {"num_pages": 9}}
    )
    cache = mixed.model.kv_cache
    assert (mixed.max_length, cache.kv_cache_page_size, cache.num_pages) == (2, 32, 9)
    assert PipelineConfig(config_file=config_file, section_name="other").max_length == 55


@pytest.mark.parametrize("config_file", ["values.yaml"], indirect=True)
def test_an_absent_section_lists_those_there_are(config_file: str) -> None:
    with pytest.raises(
        ConfigError, match="no section 'mine'; its sections: pipeline_config, other"
    ):
        PipelineConfig(config_file=config_file, section_name="mine")


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("flat.yaml", "max_length: 3\nbufer: 4\n", ValidationError, "unknown key 'bufer'"),
        ("broken.yaml", "a: [", ConfigError, "cannot read"),
        ("broken.json", "{", ConfigError, "cannot read"),
        ("deep.json", "[" * 100_000, ConfigError, "nested too deeply"),
        ("deep.yaml", "[" * 20_000, ConfigError, "nested too deeply"),
        ("broken.toml", "=", ConfigError, "cannot read"),
        ("list.json", "[1]", ConfigError, "holds no keys"),
        ("section.json", '{"pipeline_config": 3}', ConfigError, "holds no keys"),
        ("other.json", '{"a": {}, "b": {}}', ConfigError, "its sections: a, b"),
        ("values.ini", "", ConfigError, "must end in .yaml"),
    ],
)
def test_files_that_cannot_be_used(
    tmp_path: Path, name: str, text: str, error: type[Exception], message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        PipelineConfig(config_file=str(tmp_path / name))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\xfa")
    for name in ("folder.yaml", "bytes.json"):
        with pytest.raises(ConfigError, match="cannot read"):
            PipelineConfig(config_file=str(tmp_path / name))


def test_a_missing_file_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PipelineConfig(config_file=str(tmp_path / "none.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    assert PipelineConfig(config_file=str(tmp_path / "empty.yaml")).max_length is None


@pytest.mark.parametrize(
    ("text", "template"),
    [
        ("{{ messages }}", "{{ messages }}"),
        ('{"chat_template": "{{ x }}"}', "{{ x }}"),
        ('{"other": 1}', '{"other": 1}'),
    ],
)
def test_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, template: str
) -> None:
    (tmp_path / "chat.jinja").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert PipelineConfig(chat_template="chat.jinja").retrieve_chat_template() == template
    assert (
        PipelineConfig(chat_template="chat.jinja", defer_resolve=True).retrieve_chat_template()
        == template
    )
    assert PipelineConfig().retrieve_chat_template() is None


def test_a_chat_template_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chat.jinja").write_text("hello")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PipelineConfig(chat_template="~/chat.jinja").retrieve_chat_template() == "hello"


def test_a_chat_template_must_be_text(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="cannot read chat_template"):
        PipelineConfig(chat_template=path)


@pytest.fixture
def logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """Return the log output of a configuration after an engine has planned the memory."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))

    def log(method: str, plan: RunningPlan | None = PLAN, **values: Any) -> str:
        model = {"model_path": str(tmp_path)} | values.pop("model", {})
        config = PipelineConfig(model=model, **values)
        if plan is not None:
            config.note_plan(plan)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            getattr(config, method)()
        return "\n".join(" ".join(line.split()) for line in caplog.messages)

    return log


PLAN = RunningPlan("SomePipeline", "float32", 4000, 24, 3 * 2**20, 2**20, attention="gathered")


def test_the_basic_log(logged: Callable[..., str], tmp_path: Path) -> None:
    weights = [tmp_path / f"{i}.safetensors" for i in range(7)]
    for path in weights:
        path.touch()
    lines = logged("log_basic_config", max_batch_size=11, model={"weight_path": weights})
    for line in (
        f"model: {tmp_path.name}",
        "architecture: LlamaForCausalLM",
        "task: text generation",
        "pipeline: SomePipeline",
        f"weights: {', '.join(map(str, weights[:5]))} and 2 more",
        "devices: cpu",
        "max_batch_size: 24",
        "max_seq_len: 4000",
        "reserved memory: 3 MiB",
    ):
        assert line in lines.splitlines()
    assert "KV" not in lines


def test_the_whole_log(logged: Callable[..., str]) -> None:
    cache = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 1.5}
    lines = logged("log_pipeline_info", model={"kv_cache": cache}, draft_model={})
    for line in (
        "max_batch_size: 24, from KV memory",
        "max_queue_size_tg: 24",
        "max_seq_len: 4000",
        "encoding: float32",
        "modules: as written",
        "attention: gathered",
        "KV page size: 128",
        "prefix caching: True",
        "swapping to host: 1.5 GiB",
        "memory utilization: 90%",
        f"available cache memory: {2 * 2**20} bytes",
        "KV watermark: 95%",
        "draft KV: 1 MiB",
    ):
        assert line in lines.splitlines()
    assert "swapping to host: False" in logged("log_pipeline_info")
    assert "draft" not in logged("log_pipeline_info")


@pytest.mark.parametrize("method", ["log_basic_config", "log_pipeline_info"])
def test_logging_needs_an_architecture_and_a_memory_plan(
    tmp_path: Path, logged: Callable[..., str], method: str
) -> None:
    with pytest.raises(ConfigError, match="the memory of the KV cache is not planned"):
        logged(method, plan=None)
    config = PipelineConfig(model={"model_path": str(tmp_path)}, defer_resolve=True)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no architecture"):
        getattr(config, method)()
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        getattr(config, method)()
