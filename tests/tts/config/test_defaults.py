"""`--model`: values are resolved to a configuration whose model is a local folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm import CheckpointError, ConfigError
from tests.deadlines import HANG_S
from tests.tts.checkpoint.hub_server import Hub, Repo, serving_hub
from tts import say, serve
from tts.checkpoint.hub import HubOptions
from tts.config.defaults import complete_values, embedded_folder
from tts.config.pipeline import AudioGenerationConfig, hub_options, load_config
from tts.factory import create_service

REVISION = "b" * 40


@pytest.fixture
def hub(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the tiny voice, in one repository and with a separate codec."""
    whole = Repo.of_folder(tiny_checkpoint, revisions={"main": "a" * 40, "v2": REVISION})
    apart = Repo({n: d for n, d in whole.files.items() if not n.startswith("codec/")})
    codec = Repo.of_folder(tiny_checkpoint / "codec")
    with serving_hub(tiny=whole, apart=apart, codec=codec) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield hub


def config_of(*flags: str) -> AudioGenerationConfig:
    return serve.read_config(serve.build_parser().parse_args(flags)).model


def test_the_default_is_the_embedded_model(hub: Hub) -> None:
    config = config_of()
    assert config.model.model_path == str(embedded_folder())
    assert hub.downloads == []


def test_a_folder_is_used_as_it_is(hub: Hub, tiny_checkpoint: Path) -> None:
    config = config_of("--model", str(tiny_checkpoint), "--buffer", "3")
    assert (config.model.model_path, config.buffer) == (str(tiny_checkpoint), 3)
    assert config.model.served_model_name is None
    assert hub.downloads == []


def test_a_repository_name_resolves_to_a_folder_and_is_kept(hub: Hub, tmp_path: Path) -> None:
    config = config_of("--model", "acme/tiny")
    folder = Path(config.model.model_path)
    assert folder.is_relative_to(tmp_path / "home" / "hub")
    assert folder.name == "a" * 40
    assert config.model.served_model_name == "acme/tiny"
    named = config_of("--model", "acme/tiny", "--model.served-model-name", "mine")
    assert named.model.served_model_name == "mine"
    other = config_of("--model", "acme/tiny", "--revision", "v2")
    assert Path(other.model.model_path).name == REVISION


def test_the_environment_and_files_may_name_the_model(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SONANT_MODEL__MODEL_PATH", "acme/tiny")
    assert config_of().model.served_model_name == "acme/tiny"
    file = tmp_path / "sonant.yaml"
    file.write_text("model: {model_path: acme/tiny, huggingface_revision: v2}\n")
    assert Path(config_of("--config-file", str(file)).model.model_path).name == REVISION


def test_offline_by_flag_and_by_variable(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="run once without --offline"):
        config_of("--model", "acme/tiny", "--offline")
    config_of("--model", "acme/tiny")
    hub.status = 503
    assert config_of("--model", "acme/tiny", "--offline").offline
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert Path(config_of("--model", "acme/tiny").model.model_path).name == "a" * 40


def test_the_hubs_own_variables_are_read(tiny_checkpoint: Path) -> None:
    config = load_config(
        AudioGenerationConfig, {"model": {"model_path": str(tiny_checkpoint)}}, base=complete_values
    )
    assert hub_options(config, {}) == HubOptions()
    assert hub_options(config, {"HF_ENDPOINT": "http://hub/"}).endpoint == "http://hub"
    environ = {"HF_TOKEN": "t", "HF_HUB_OFFLINE": "yes", "HF_HUB_CACHE": "/c", "HF_HOME": "/h"}
    expected = HubOptions(offline=True, token="t", cache_dir=Path("/c"))
    assert hub_options(config, environ) == expected


def test_the_command_reports_a_gated_model(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos["acme/tiny"].gated, hub.repos["acme/tiny"].token = True, "right"
    assert serve.main(["--model", "acme/tiny"]) == 2
    errors = capsys.readouterr().err
    assert "set HF_TOKEN" in errors
    assert "tts.checkpoint.hub: acme/tiny at" in errors
    assert "HTTP" not in errors.replace(hub.url, "")  # not a line for every request of a download
    monkeypatch.setenv("HF_TOKEN", "right")
    assert config_of("--model", "acme/tiny").model.served_model_name == "acme/tiny"


def test_a_codec_may_have_a_name_of_its_own(hub: Hub) -> None:
    config = config_of("--model", "acme/apart", "--audio-decoder", "acme/codec")
    assert Path(config.audio_decoder).is_dir()
    service = create_service(config)
    asyncio.run(service.client.close())
    assert service.codec is not None
    assert service.codec.codebook_size == 64


def test_a_draft_model_may_have_a_name(hub: Hub) -> None:
    given = {"model": {"model_path": "acme/tiny"}, "draft_model": {"model_path": "acme/tiny"}}
    draft = complete_values(given)["draft_model"]["model_path"]
    assert Path(draft).name == "a" * 40


def test_adapters_may_have_names(hub: Hub, tiny_checkpoint: Path) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x" * 9, "x.pt": b""}
    hub.repos["acme/brogue"] = Repo(files)
    paths = ["acme/brogue", "mine=acme/brogue", str(tiny_checkpoint)]
    given = {"model": {"model_path": "acme/tiny"}, "lora": {"lora_paths": paths}}
    named, renamed, local = complete_values(given)["lora"]["lora_paths"]
    name, _, folder = named.partition("=")
    assert (name, renamed, local) == ("brogue", f"mine={folder}", str(tiny_checkpoint))
    assert {path.name for path in Path(folder).iterdir()} == set(files) - {"x.pt"}


def test_a_model_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--model", "./nowhere"]) == 2
    assert "nowhere is neither a folder nor a model of the hub" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is not a folder"):
        AudioGenerationConfig("auto", model={"model_path": "acme/tiny"})


def test_a_model_from_the_hub_synthesizes(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "x.wav"
    assert say.main(["--model", "acme/tiny", "--revision", "v2", "Hi.", "-o", str(target)]) == 0
    with wave.open(str(target), "rb") as file:
        assert file.getnframes() > 0
    shutil.rmtree(tmp_path / "home")
    assert say.main(["--model", "acme/tiny", "--offline", "Hi.", "-o", str(target)]) == 2


def test_a_download_is_logged_and_can_be_interrupted(hub: Hub, tmp_path: Path) -> None:
    """Ctrl-C ends a command process that downloads an endless file."""
    environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    hub.stuck = "model.safetensors"
    command = [sys.executable, "-m", "tts.serve", "--port", "0", "--model", "acme/tiny"]
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        assert hub.waits.wait(HANG_S)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        hub.released.set()
    assert process.returncode == 128 + signal.SIGINT
    assert "tts.checkpoint.hub: acme/tiny at aaaa" in errors
    assert "tts.checkpoint.hub: acme/tiny: tokenizer.json" in errors
    assert "Traceback" not in errors
