"""Damaged files of a checkpoint or a configuration: each error names the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llm import CheckpointError, ConfigError
from tests.fakes import tiny_config
from tts.config.pipeline import ServerConfig, load_config
from tts.config.serve import WRONG_CONFIGURATION
from tts.factory import create_service

DEEP = "[" * 100_000
VOICE = {"name": "x", "control_token": "<|voice_0|>"}
TEMPLATES = [{"name": "default", "template": "{{ messages"}]


@pytest.fixture
def folder(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "damaged"))


def change(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("config.json", {"architectures": "Llama"}, "config.json names no architecture"),
        ("config.json", {"max_position_embeddings": "long"}, "max_position_embeddings='long'"),
        ("config.json", {"rope_scaling": 5}, "config.json: rotary scaling must be an object"),
        ("config.json", {"eos_token_id": [[1]]}, "config.json: eos_token_id"),
        ("generation_config.json", {"eos_token_id": ["x"]}, "generation_config.json: eos_token"),
        ("generation_config.json", {"top_k": float("inf")}, "top_k cannot be used"),
        ("generation_config.json", {"top_p": 10**400}, "top_p cannot be used"),
        ("tokenizer.json", {"added_tokens": 5}, "tokenizer.json: an added token needs"),
        ("tokenizer.json", {"added_tokens": [{"id": 1}]}, "tokenizer.json: an added token needs"),
        ("tokenizer.json", {"normalizer": 5}, "tokenizer.json cannot be read"),
        ("tokenizer_config.json", {"chat_template": [5, *TEMPLATES]}, "chat template fails"),
        ("speech.json", {"codec": "c" * 300}, "speech.json: codec has more than 255 bytes"),
        ("speech.json", {"code_token": "{}{"}, "no token 0{"),
        ("voices.json", {"default": "none"}, "voices.json: the default voice 'none'"),
        ("voices.json", {"voices": [{**VOICE, "language_codes": 5}]}, "must be a list"),
        ("voices.json", {"voices": [{**VOICE, "audio": "a" * 300}]}, "in its folder"),
        ("voices.json", {"voices": [{**VOICE, "audio": "a\0"}]}, "in its folder"),
        ("codec/config.json", {"levels": "x"}, "codec config: levels"),
        ("codec/config.json", {"decoder_layers": None, "decoder_dim": "x"}, "config: decoder_dim"),
        ("codec/config.json", {"decoder_heads": 3}, "a multiple of twice decoder_heads"),
        ("codec/config.json", {"decoder_dim": 32_000}, "codec config: the sizes are too large"),
        ("codec/config.json", {"encoder_layers": 2**31}, "codec config: the sizes are too large"),
        ("codec/config.json", {"decoder_ff": 2**70}, "codec config: the sizes are too large"),
        ("codec/config.json", {"streaming": 5}, "codec config: streaming"),
        ("codec/config.json", {"streaming": {"buffer": "x"}}, "codec config: streaming: buffer"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    folder: Path, name: str, values: dict[str, Any], message: str
) -> None:
    change(folder / name, values)
    with pytest.raises(WRONG_CONFIGURATION, match=message):
        create_service(tiny_config(folder)).prompts.check_chat()


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "codec/config.json", "model.safetensors.index.json"],
)
def test_unlimited_nesting_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text(DEEP)
    with pytest.raises(WRONG_CONFIGURATION, match=Path(name).name):
        create_service(tiny_config(folder))


def test_an_eos_token_that_is_in_neither_file_is_refused(folder: Path) -> None:
    change(folder / "generation_config.json", {"eos_token_id": None})
    change(folder / "config.json", {"eos_token_id": 1.5})
    with pytest.raises(CheckpointError, match=r"config.json: eos_token_id"):
        create_service(tiny_config(folder))


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_lone_surrogate_in_a_configuration_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"config{suffix}"
    path.write_text('{"server_config": {"\\ud800": 5}}')
    with pytest.raises(ConfigError, match=r"this is not Unicode text: .*\\ud800"):
        load_config(ServerConfig, {}, config_file=str(path), environ={})


@pytest.mark.parametrize("key", ["model_path", "weight_path"])
def test_a_path_longer_than_any_file_has_is_refused(key: str) -> None:
    values = {"model_path": "."} | {key: ["x" * 300] if key == "weight_path" else "x" * 300}
    with pytest.raises(ConfigError, match="cannot be used: File name too long"):
        tiny_config(Path(), model=values)
