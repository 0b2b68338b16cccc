"""A speech model by its published name: language model and codec in two repositories."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm import CheckpointError
from tests.decoder.small_codecs import write_snac
from tests.tts.checkpoint.hub_server import Hub, Repo, serving_hub
from tests.tts.family_checkpoints import write_orpheus
from tests.tts.serving import Serving, collect_speech, run_with_server
from tts import serve
from tts.config.pipeline import AudioGenerationConfig
from tts.factory import create_service

MODEL, CODEC = "canopylabs/orpheus-3b-0.1-ft", "hubertsiuzdak/snac_24khz"


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repo]:
    """Return repositories as published: a gated model without a codec, a pickled codec."""
    folder = tmp_path_factory.mktemp("orpheus")
    write_orpheus(folder / "model")
    shutil.rmtree(folder / "model" / "codec")
    write_snac(folder / "codec", codebook_size=4096)
    model = Repo.of_folder(folder / "model", gated=True, token="right")
    return {MODEL: model, CODEC: Repo.of_folder(folder / "codec")}


@pytest.fixture
def hub(repos: dict[str, Repo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub() as hub:
        hub.repos |= repos
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_TOKEN", "right")
        yield hub


def config_of(*flags: str) -> AudioGenerationConfig:
    more = ("--model.kv-cache.num-pages", "64")
    return serve.read_config(serve.build_parser().parse_args([*flags, *more])).model


def test_a_published_name_is_sufficient(hub: Hub) -> None:
    config = config_of("--model", MODEL, "--allow-pickle")
    assert config.model.served_model_name == MODEL
    assert Path(config.audio_decoder).is_dir()
    service = create_service(config)
    assert (service.model, service.family) == (MODEL, "orpheus")
    assert service.codec is not None
    assert service.codec.sample_rate == 24_000

    async def ask(served: Serving) -> int:
        spoken = await collect_speech(served, "hello", max_tokens=28)
        return len(spoken.data)

    try:
        assert run_with_server(service, ask) >= 2 * 2048
    finally:
        asyncio.run(service.client.close())
    hub.status = 503
    again = config_of("--model", MODEL, "--allow-pickle", "--offline")
    assert again.audio_decoder == config.audio_decoder


def test_a_pickled_codec_needs_permission(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=rf"{CODEC} are pickles.*--allow-pickle"):
        config_of("--model", MODEL)
    assert not [name for name in hub.downloads if name.endswith(".safetensors")]


def test_the_codec_may_have_another_revision(hub: Hub) -> None:
    given = ("--model", MODEL, "--allow-pickle", "--audio-decoder")
    config = config_of(*given, f"{CODEC}@{'a' * 40}")
    assert Path(config.audio_decoder).name == "a" * 40
    with pytest.raises(CheckpointError, match=f"{CODEC} has no revision 'v9'"):
        config_of(*given, f"{CODEC}@v9")


def test_another_codec_may_be_named(hub: Hub, tmp_path: Path) -> None:
    write_snac(tmp_path / "mine", codebook_size=4096)
    config = config_of("--model", MODEL, "--audio-decoder", str(tmp_path / "mine"))
    assert config.audio_decoder == str(tmp_path / "mine")
    assert not [name for name in hub.downloads if name.endswith(".bin")]


def test_a_folder_without_its_codec_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    """A local folder causes no download; the error names the missing file."""
    write_orpheus(tmp_path / "local")
    shutil.rmtree(tmp_path / "local" / "codec")
    with pytest.raises(CheckpointError, match=CODEC):
        create_service(config_of("--model", str(tmp_path / "local")))
    assert hub.downloads == []
