"""Checkpoints by name: folders, downloads, the cache, and error messages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llm import CheckpointError
from tests.tts.checkpoint.hub_server import Hub, Repo, serving_hub
from tts.checkpoint.hub import (
    HubFile,
    HubOptions,
    files_to_fetch,
    find_checkpoint,
    is_hub_name,
    is_intact,
    missing_weights,
)

WEIGHTS = bytes(range(256)) * 400
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "codec/config.json": b'{"type": "x"}',
    "README.md": b"# read me",
    "original/params.json": b"{}",
}
FETCHED = {"config.json", "tokenizer.json", "model.safetensors", "codec/config.json"}
OLD = "b" * 40


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving_hub(tiny=Repo(dict(FILES), {"main": "a" * 40, "v1": OLD})) as hub:
        yield hub


@pytest.fixture
def options(hub: Hub, tmp_path: Path) -> HubOptions:
    return HubOptions(endpoint=hub.url, cache_dir=tmp_path / "cache")


def names_in(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_is_returned_unchanged(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path)) == tmp_path
    assert not is_hub_name(str(tmp_path))
    assert is_hub_name("acme/tiny-1.5B_x")


@pytest.mark.parametrize("name", ["nowhere", "/no/such/folder", "./a/b", "a/b/c", "../x", "a/.b"])
def test_a_name_that_is_neither_folder_nor_repository_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="is neither a folder nor a model of the hub"):
        find_checkpoint(name)


def test_a_model_is_downloaded_once(hub: Hub, options: HubOptions) -> None:
    folder = find_checkpoint("acme/tiny", options)
    assert names_in(folder) == FETCHED
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert sorted(hub.downloads) == sorted(FETCHED)
    hub.downloads.clear()
    assert find_checkpoint("acme/tiny", options) == folder
    assert hub.downloads == []


def test_revisions_are_kept_apart(hub: Hub, options: HubOptions) -> None:
    main = find_checkpoint("acme/tiny", options)
    by_tag = find_checkpoint("acme/tiny", replace(options, revision="v1"))
    by_commit = find_checkpoint("acme/tiny", replace(options, revision=OLD))
    assert (main.name, by_tag.name) == ("a" * 40, OLD)
    assert by_commit == by_tag
    with pytest.raises(CheckpointError, match="acme/tiny has no revision 'v2'"):
        find_checkpoint("acme/tiny", replace(options, revision="v2"))


def test_a_new_commit_is_fetched(hub: Hub, options: HubOptions) -> None:
    first = find_checkpoint("acme/tiny", options)
    hub.repos["acme/tiny"].revisions["main"] = "c" * 40
    hub.repos["acme/tiny"].files["tokenizer.json"] = b'{"new": 1}'
    hub.downloads.clear()
    second = find_checkpoint("acme/tiny", options)
    assert (second.name, hub.downloads) == ("c" * 40, ["tokenizer.json"])  # the rest is the same
    assert (first / "tokenizer.json").read_bytes() == b"{}"
    assert (second / "tokenizer.json").read_bytes() == b'{"new": 1}'


def test_offline_mode_uses_only_the_cache(hub: Hub, options: HubOptions) -> None:
    offline = replace(options, offline=True)
    with pytest.raises(CheckpointError, match="not been downloaded; run once without --offline"):
        find_checkpoint("acme/tiny", offline)
    folder = find_checkpoint("acme/tiny", options)
    hub.status = 500  # every request fails from here
    hub.downloads.clear()
    assert find_checkpoint("acme/tiny", offline) == folder
    assert hub.downloads == []


def test_the_earlier_download_is_used_when_the_hub_is_down(
    hub: Hub, options: HubOptions, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = replace(options, endpoint="http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"cannot get acme/tiny from http://127\.0\.0\.1:9"):
        find_checkpoint("acme/tiny", nowhere)
    folder = find_checkpoint("acme/tiny", options)
    with caplog.at_level(logging.WARNING, "tts.checkpoint.hub"):
        assert find_checkpoint("acme/tiny", nowhere) == folder
    assert "using the earlier download" in caplog.text


def test_the_error_for_a_gated_model_says_how_to_get_access(hub: Hub, options: HubOptions) -> None:
    hub.repos["acme/gated"] = Repo(dict(FILES), gated=True, token="right")
    with pytest.raises(
        CheckpointError, match=r"gated: accept its terms at .*/acme/gated.*HF_TOKEN"
    ):
        find_checkpoint("acme/gated", options)
    folder = find_checkpoint("acme/gated", replace(options, token="right"))
    assert names_in(folder) == FETCHED
    assert "right" not in repr(replace(options, token="right"))


def test_a_private_model_and_a_wrong_token(hub: Hub, options: HubOptions) -> None:
    hub.repos["acme/private"] = Repo(dict(FILES), token="right")
    with pytest.raises(CheckpointError, match=r"no public model acme/private.*set HF_TOKEN"):
        find_checkpoint("acme/private", options)
    with pytest.raises(CheckpointError, match="HF_TOKEN may not read acme/private"):
        find_checkpoint("acme/private", replace(options, token="wrong"))
    with pytest.raises(CheckpointError, match="no folder acme/absent here and no public model"):
        find_checkpoint("acme/absent", options)


def test_a_broken_connection_is_resumed(
    hub: Hub, options: HubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    hub.cut_after = 1000
    folder = find_checkpoint("acme/tiny", options)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "model.safetensors from 1000" in hub.downloads


def test_an_interrupted_download_keeps_complete_files(
    hub: Hub, options: HubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C the partial file is not used, and the next run downloads only that one."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.file_download.time.sleep", interrupt)
        hub.cut_after = 70_000
        with pytest.raises(KeyboardInterrupt):
            find_checkpoint("acme/tiny", options)
    with pytest.raises(CheckpointError, match=r"incomplete, \*\.safetensors is missing"):
        find_checkpoint("acme/tiny", replace(options, offline=True))
    hub.downloads.clear()
    folder = find_checkpoint("acme/tiny", options)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads == ["model.safetensors"]


def test_a_damaged_file_is_removed(hub: Hub, options: HubOptions) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        hub.damaged = name
        with pytest.raises(CheckpointError, match=f"{name} of acme/tiny is not the file"):
            find_checkpoint("acme/tiny", options)
    hub.damaged = ""
    assert names_in(find_checkpoint("acme/tiny", options)) == FETCHED


def test_an_incomplete_download_is_not_served_offline(hub: Hub, options: HubOptions) -> None:
    index = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": index,
        "model-1.safetensors": WEIGHTS,
        "model-2.safetensors": WEIGHTS[::-1],
    }
    hub.repos["acme/shards"] = Repo(files)
    folder = find_checkpoint("acme/shards", options)
    assert missing_weights(folder) == []
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete, model-2\.safetensors is missing"):
        find_checkpoint("acme/shards", replace(options, offline=True))


def test_a_repository_without_a_model_is_refused(hub: Hub, options: HubOptions) -> None:
    hub.repos["acme/notes"] = Repo({"README.md": b"", "notes.txt": b"x"})
    with pytest.raises(CheckpointError, match=r"acme/notes has no config\.json"):
        find_checkpoint("acme/notes", options)
    hub.repos["acme/config"] = Repo({"config.json": b"{}", "model.gguf": b"x"})
    with pytest.raises(CheckpointError, match=r"acme/config has no \*\.safetensors"):
        find_checkpoint("acme/config", options)


def test_pickles_are_fetched_only_when_allowed(hub: Hub, options: HubOptions) -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": b"pickle", "training_args.bin": b"other"}
    hub.repos["acme/old"] = Repo(files)
    with pytest.raises(CheckpointError, match=r"acme/old are pickles \(pytorch_model.*--allow-p"):
        find_checkpoint("acme/old", options)
    assert not [name for name in hub.downloads if name.endswith(".bin")]
    folder = find_checkpoint("acme/old", replace(options, allow_pickle=True))
    assert names_in(folder) == {"config.json", "pytorch_model.bin"}


def test_a_progress_bar_shows_the_downloaded_share(
    options: HubOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQDM_POSITION", "-1")  # as on a terminal
    find_checkpoint("acme/tiny", options)
    assert "model.safetensors: 100%" in capsys.readouterr().err


def listed(*names: str) -> list[HubFile]:
    return [HubFile(name, 1) for name in names]


def test_which_files_are_downloaded() -> None:
    files = listed(
        "config.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "onnx/model.safetensors",
        "checkpoint-500/model.safetensors",
        "../outside.json",
        "/etc/passwd.json",
        ".cache/x.json",
        "a\\b.json",
        "model.py",
        "codec/model.safetensors",
    )
    assert [file.name for file in files_to_fetch("x", files, allow_pickle=True)] == [
        "config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "codec/model.safetensors",
    ]
    samples = listed("samples/jo.mp3", "samples/jo.pt", "codes.pt", "model.safetensors")
    safe = [file.name for file in files_to_fetch("x", samples, allow_pickle=False)]
    assert safe == ["samples/jo.mp3", "model.safetensors"]
    with_pickles = [file.name for file in files_to_fetch("x", samples, allow_pickle=True)]
    assert with_pickles == ["samples/jo.mp3", "samples/jo.pt", "model.safetensors"]
    two = listed("model.safetensors", "transformers-00001-of-00001.safetensors")
    assert list(files_to_fetch("x", two, allow_pickle=False)) == two[1:]
    only = listed("consolidated.safetensors")
    assert list(files_to_fetch("x", only, allow_pickle=False)) == only


def test_hashes_identify_files(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"hello\n")
    sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
    git = "ce013625030ba8dba906f756967f9e9ca394464a"
    assert is_intact(path, HubFile("x", 6, sha256))
    assert is_intact(path, HubFile("x", 6, git_id=git))
    assert is_intact(path, HubFile("x", 0, git_id=git))
    assert not is_intact(path, HubFile("x", 5, sha256))
    assert not is_intact(path, HubFile("x", 6, sha256[::-1]))
    assert not is_intact(path, HubFile("x", 6, git_id=git[::-1]))
