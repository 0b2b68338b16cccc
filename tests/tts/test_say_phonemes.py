"""`tts.say --phonemes`: the shipped model's second task, in process and over gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import build_text_checkpoint, wait_until_idle
from tests.tts.saying import Say, error_line
from tests.tts.serving import Serving, serve_and
from tts.factory import embedded_folder
from tts.say import main
from tts.say_client import RemoteClient, SpeechClient
from tts.say_local import LocalClient
from tts.say_options import Credentials, ModelChoice
from tts.say_phonemes import PHONES, print_phonemes

TEXT = "Hello world. On the 2nd day, they left."
REFUSED = "say: this model does not turn letters into phonemes; the built-in voice's does"


@pytest.fixture(scope="module")
def local() -> Iterator[LocalClient]:
    client = LocalClient(ModelChoice(str(embedded_folder())))
    yield client
    asyncio.run(client.close())


def printed(client: SpeechClient, text: str, capfd: pytest.CaptureFixture[str]) -> list[str]:
    asyncio.run(print_phonemes(client, text))
    return capfd.readouterr().out.splitlines()


def test_a_line_for_each_sentence(local: LocalClient, capfd: pytest.CaptureFixture[str]) -> None:
    hello, left = printed(local, TEXT, capfd)
    assert hello == "hh ax0 l ow1 / w er1 l d"
    assert len(left.split(" / ")) == len(["On", "the", "second", "day", "they", "left"])
    assert PHONES.fullmatch(left)


def test_the_answer_is_greedy_and_the_same_over_grpc(
    local: LocalClient, capfd: pytest.CaptureFixture[str]
) -> None:
    once = printed(local, TEXT, capfd)
    assert printed(local, TEXT, capfd) == once

    async def ask(served: Serving) -> None:
        remote = RemoteClient(served.server.address, Credentials())
        await print_phonemes(remote, TEXT)
        await remote.close()

    serve_and(local._service, ask)
    assert capfd.readouterr().out.splitlines() == once
    asyncio.run(wait_until_idle(local._service.client))


def test_the_command_prints_phones_and_plays_nothing(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--phonemes", "Hello", "world."]) == 0
    told = capfd.readouterr()
    assert (told.out, told.err) == ("hh ax0 l ow1 / w er1 l d\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_the_task_is_told(say: Say, capfd: pytest.CaptureFixture[str]) -> None:
    assert say("--phonemes", "hello") == 2
    assert error_line(capfd) == REFUSED


def test_a_model_that_cannot_chat_is_told(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = build_text_checkpoint(tmp_path / "text")
    (folder / "tokenizer_config.json").unlink()
    assert main(["--phonemes", "hello", "--model", str(folder)]) == 2
    assert error_line(capfd) == REFUSED


def test_control_characters_are_refused(say: Say, capfd: pytest.CaptureFixture[str]) -> None:
    assert say("--phonemes", "a\x00b") == 2
    assert "control" in error_line(capfd)


@pytest.mark.parametrize(("variables", "rows"), [({}, 8), ({"SONANT_MAX_BATCH_SIZE": "3"}, 3)])
def test_one_speaker_needs_few_rows(
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: dict[str, str],
    rows: int,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, logger="llm.config"):
        asyncio.run(LocalClient(ModelChoice(str(tiny_checkpoint))).close())
    assert f"max_batch_size: {rows}" in caplog.messages
