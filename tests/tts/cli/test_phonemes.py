"""`tts.say --phonemes`: the shipped model's second task, in process and over gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import build_text_checkpoint, wait_until_idle
from tests.tts.command_line import Say, error_line
from tests.tts.serving import Serving, run_with_server
from tts.cli.client import RemoteClient, SpeechClient
from tts.cli.local import LocalClient, load_model
from tts.cli.options import Credentials, ModelChoice
from tts.cli.run import print_phonemes, words_in_ipa
from tts.config.defaults import embedded_folder
from tts.factory import Service
from tts.say import main

TEXT = "Hello world. On the 2nd day, they left."
REFUSED = "say: this model does not turn letters into phonemes; the built-in voice's does"


@pytest.fixture(scope="module")
def service() -> Service:
    return load_model(ModelChoice(str(embedded_folder())))


@pytest.fixture(scope="module")
def local(service: Service) -> Iterator[LocalClient]:
    client = LocalClient(service)
    yield client
    asyncio.run(client.close())


def printed(client: SpeechClient, text: str, capfd: pytest.CaptureFixture[str]) -> list[str]:
    asyncio.run(print_phonemes(client, text))
    return capfd.readouterr().out.splitlines()


def test_a_line_for_each_sentence(local: LocalClient, capfd: pytest.CaptureFixture[str]) -> None:
    hello, left = printed(local, TEXT, capfd)
    assert hello == "həlˈoʊ wˈɜɹld"
    assert len(left.split()) == len(["On", "the", "second", "day", "they", "left"])


def test_the_article_is_a_word(local: LocalClient, capfd: pytest.CaptureFixture[str]) -> None:
    (line,) = printed(local, "A cat sat on a mat.", capfd)
    assert line == "ɐ kˈæt sˈæt ˌɔn ɐ mˈæt"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("h ə l ˈ oʊ / w ˈ ɜ ɹ l d . ", "həlˈoʊ wˈɜɹld"),
        ("j ˈ ɛ s , / s ˈ ɜ ɹ ! ", "jˈɛs sˈɜɹ"),
        ("ə / — / dʒ ˈ ɔɪ", "ə dʒˈɔɪ"),
    ],
)
def test_an_answer_is_read_as_words(answer: str, words: str) -> None:
    assert words_in_ipa(answer) == words


def test_phonemes_are_decoded_greedily_and_equal_over_grpc(
    local: LocalClient, service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    once = printed(local, TEXT, capfd)
    assert printed(local, TEXT, capfd) == once

    async def ask(served: Serving) -> None:
        remote = RemoteClient(served.server.address, Credentials())
        await print_phonemes(remote, TEXT)
        await remote.close()

    run_with_server(service, ask)
    assert capfd.readouterr().out.splitlines() == once
    asyncio.run(wait_until_idle(service.client))


def test_the_command_prints_phonemes_and_plays_no_audio(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--phonemes", "Hello", "world."]) == 0
    output = capfd.readouterr()
    assert (output.out, output.err) == ("həlˈoʊ wˈɜɹld\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_the_task_is_reported(say: Say, capfd: pytest.CaptureFixture[str]) -> None:
    assert say("--phonemes", "hello") == 2
    assert error_line(capfd) == REFUSED


def test_a_model_without_a_chat_template_is_reported(
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
def test_the_local_client_plans_few_batch_rows(
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: dict[str, str],
    rows: int,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, logger="llm.config"):
        asyncio.run(LocalClient.load(ModelChoice(str(tiny_checkpoint))).close())
    assert f"max_batch_size: {rows}" in caplog.messages
