"""PipelineConfig beyond keywords: files, sections, the chat template, what is logged."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from pydantic import ValidationError

from llm.config import PipelineConfig
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
        ("broken.toml", "=", ConfigError, "cannot read"),
        ("list.json", "[1]", ConfigError, "holds no keys"),
        ("section.json", '{"pipeline_config": 3}', ConfigError, "holds no keys"),
        ("stranger.json", '{"a": {}, "b": {}}', ConfigError, "its sections: a, b"),
        ("values.ini", "", ConfigError, "must end in .yaml"),
    ],
)
def test_files_that_cannot_be_used(
    tmp_path: Path, name: str, text: str, error: type[Exception], message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
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


def test_a_chat_template_must_be_text(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="cannot read chat_template"):
        PipelineConfig(chat_template=path)


def test_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096})
    )
    weights = [tmp_path / f"{i}.safetensors" for i in range(7)]
    for path in weights:
        path.touch()
    config = PipelineConfig(
        max_batch_size=11, model={"model_path": str(tmp_path), "weight_path": weights}
    )
    with caplog.at_level(logging.INFO):
        config.log_basic_config(reserved_bytes=3 * 2**20)
        basic = caplog.text
        config.log_pipeline_info()
    for part in ("LlamaForCausalLM", tmp_path.name, "4096", "11", "3 MiB", "cpu", "and 2 more"):
        assert part in basic
    assert "KV page size" not in basic
    for part in ("KV page size", "128", "90%", "95%", "prefix caching"):
        assert part in caplog.text


def test_logging_needs_an_architecture(tmp_path: Path) -> None:
    config = PipelineConfig(model={"model_path": str(tmp_path)}, defer_resolve=True)
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        config.log_basic_config()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no architecture"):
        config.log_pipeline_info()
