"""`sonant`: its commands are the programs of the package, with their options and exit status."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.tts.command_line import TEXT, frames_of
from tests.tts.serving import run
from tts import __version__, say, serve
from tts.__main__ import COMMANDS, SHELLS, completion_script, main
from tts.cli.local import LocalClient
from tts.cli.options import read_options
from tts.cli.request import synthesis_config
from tts.config.server import ServerConfig
from tts.factory import Service
from tts.server.server import SpeechServer
from tts.v1 import speech_pb2 as pb

TLS = Path(__file__).parents[1] / "tls"
GUARDED = {
    "host": "localhost",
    "auth_token": "secret",
    "tls_cert": TLS / "server.pem",
    "tls_key": TLS / "server.key",
    "tls_client_ca": TLS / "ca.pem",
}
CLIENT = ("--tls-ca", TLS / "ca.pem", "--tls-cert", TLS / "client.pem")
CLIENT = (*CLIENT, "--tls-key", TLS / "client.key")


def ended(*arguments: object) -> int | str | None:
    """Run a command that argparse ends; return its exit status."""
    with pytest.raises(SystemExit) as caught:
        main([*map(str, arguments)])
    return caught.value.code


def test_the_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert not ended("--help")
    output = capsys.readouterr().out
    assert re.findall(r"^    (\w+) ", output, re.MULTILINE) == [*COMMANDS]
    assert max(map(len, output.splitlines())) <= 80


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert not ended("--version")
    assert capsys.readouterr().out == f"sonant {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not ended(name, "--help")
    assert capsys.readouterr().out.startswith(f"usage: sonant {name} ")


@pytest.mark.parametrize(("name", "program"), [("say", say), ("serve", serve)])
def test_a_command_has_the_options_of_its_program(
    name: str, program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not ended(name, "--help-all")
    expected = program.build_parser(show_all=True).format_help()
    assert capsys.readouterr().out == expected.replace(f"python -m tts.{name}", f"sonant {name}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: COMMAND"),
        (["sing"], "invalid choice: 'sing'"),
        (["voices", "Hello."], "unrecognized arguments: Hello."),
        (["voices", "-o", "x.wav"], "unrecognized arguments: -o x.wav"),
        (["completion", "dos"], "invalid choice: 'dos'"),
        (["health", "--token", "x"], "unrecognized arguments: --token x"),
    ],
)
def test_wrong_commands_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(*arguments) == 2
    assert words in capsys.readouterr().err


def test_speech_and_voices_of_a_server(
    server: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ("--server", server)
    assert main(["say", TEXT, "-q", "-o", str(tmp_path / "x.wav"), *where]) == 0
    assert frames_of(tmp_path / "x.wav")
    assert main(["say", "-v", "?", *where]) == 0
    expected = capfd.readouterr().out
    assert main(["voices", *where]) == 0
    assert capfd.readouterr().out == expected != ""


def test_an_error_of_a_command_is_its_exit_status(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["say", "", "-o", "x.wav"]) == 2
    assert capfd.readouterr().err == "say: the text is empty\n"
    assert main(["serve", "--port", "-1"]) == 2
    assert capfd.readouterr().err.startswith("serve: port: ")


@pytest.mark.parametrize("values", [{}, GUARDED], ids=["open", "guarded"])
def test_health_is_that_of_the_server(
    values: dict[str, Any], service: Service, capfd: pytest.CaptureFixture[str]
) -> None:
    """It needs no token; the exit status is 0 while the server takes calls only."""
    more = CLIENT if values else ()

    async def scenario() -> None:
        server = SpeechServer(ServerConfig(port=0, **values))
        arguments = ["health", "--server"]

        async def status() -> tuple[int, str]:
            line = [*arguments, server.address, *map(str, more)]
            return await asyncio.to_thread(main, line), capfd.readouterr().out

        await server.start()
        assert await status() == (1, f"{server.address}: NOT_SERVING\n")
        await server.serve(service)
        assert await status() == (0, f"{server.address}: SERVING\n")
        await server.drain(0, 5)
        assert await status() == (1, f"{server.address}: NOT_SERVING\n")
        await server.stop()
        assert await status() == (1, "")

    run(scenario())


def test_health_without_the_key_of_a_certificate(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--tls-cert", "x.pem"]) == 2
    assert capfd.readouterr().err == "health: --tls-cert and --tls-key go together\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_completion_script_has_every_command_and_the_shown_options(shell: str) -> None:
    script = completion_script(shell)
    assert [name for name in COMMANDS if name not in script] == []
    options = serve.build_parser(show_all=True).format_help()
    flags = re.findall(r"^  --([a-z.-]+)", options, re.MULTILINE)
    assert len(flags) > 60
    assert [flag for flag in flags if flag not in script] == []


ON, OFF, LEFT = pb.SPEECH_CHECK_ON, pb.SPEECH_CHECK_OFF, pb.SPEECH_CHECK_UNSPECIFIED


@pytest.mark.parametrize(
    ("arguments", "checks"),
    [
        ([], (LEFT, LEFT)),
        (["--check"], (ON, ON)),
        (["-o", "x.wav"], (LEFT, ON)),
        (["-o", "x.wav", "--check"], (ON, ON)),
        (["-o", "x.wav", "--no-check"], (OFF, OFF)),
        (["-o", os.devnull, "--format", "wav"], (LEFT, LEFT)),
        (["-o", "chapters/"], (LEFT, ON)),
    ],
)
def test_speech_in_files_is_checked_if_the_model_has_word_times(
    arguments: list[str], checks: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = read_options(say.build_parser().parse_args(["Hello.", *arguments]))
    found = [synthesis_config(options, has_word_times=has).speech_check for has in (False, True)]
    assert tuple(found) == checks


@pytest.mark.parametrize("model", ["", "tiny"])
def test_a_run_asks_the_model_whether_its_file_is_checked(
    model: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in voice has word times, the tiny checkpoint has none."""
    asked: list[int] = []
    synthesize = LocalClient.synthesize

    def noted(
        client: LocalClient, request: pb.SynthesizeStreamRequest
    ) -> AsyncGenerator[pb.SynthesizeStreamResponse, None]:
        asked.append(request.config.speech_check)
        return synthesize(client, request)

    monkeypatch.setattr(LocalClient, "synthesize", noted)
    where = ["--model", str(tiny_checkpoint)] if model else []
    assert say.main(["Hello.", "-q", "-o", str(tmp_path / "x.wav"), *where]) == 0
    assert asked == [LEFT if model else ON]
