"""Usage errors of the command line: one line that says what to change, and the exit status."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.deadlines import HANG_S
from tests.tts.command_line import LONG_TEXT, Say, command, error_line, frames_of, pipe_in
from tests.tts.serving import serving
from tts import __version__
from tts.cli.script import read_script
from tts.factory import Service
from tts.say import main

TLS = Path(__file__).parents[1] / "tls"

# --- refused before anything is loaded


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["", "-o", "x.wav"], "the text is empty"),
        (["hi", "-o", "x.doc"], "no format has the suffix '.doc'"),
        (["hi", "-o", "nowhere/x.wav"], "there is no folder nowhere"),
        (["hi", "-o", "nowhere/x/"], "there is no folder nowhere"),
        (["hi", "-o", ".", "--timestamps", "x.srt"], "with a folder it is srt, vtt or json"),
        (["hi", "-o", ".", "--timestamps", "txt"], "with a folder it is srt, vtt or json"),
        (["hi", "-o", ".", "--markup", "tags"], "no --markup, --stream-stdin, --phonemes"),
        (["hi", "-o", "x.wav", "--resume", "--restart"], "--resume or --restart, not both"),
        (["hi", "--resume"], "are for -o FILE and -o FOLDER/"),
        (["hi", "--jobs", "2", "-o", "-"], "are for -o FILE and -o FOLDER/"),
        (["hi", "--jobs", "0", "-o", "x.wav"], "--jobs: 0: must be 1 or more"),
        (["hi", "--format", "flac"], "--format needs -o"),
        (["hi", "--format", "mp4", "-o", "x"], "invalid choice: 'mp4'"),
        (["hi", "-f", "missing.txt"], "give the text once"),
        (["-f", "missing.txt"], "cannot read missing.txt: No such file"),
        (["hi", "--stream-stdin"], "give the text once"),
        (["hi", "--eager", "1"], "--eager needs --stream-stdin"),
        (["hi", "--phonemes", "-o", "x.wav"], "--phonemes prints those of US"),
        (["hi", "--phonemes", "--lexicon", "x.pls"], "--phonemes prints those of US"),
        (["hi", "--server", "x:1", "--lexicon", "x.pls"], "--lexicon is for speaking without"),
        (["hi", "--lexicon", "none.pls"], "lexicon=none.pls is not a file"),
        (["--phonemes", "--stream-stdin"], "no --stream-stdin"),
        (["hi", "--markup", "ssml", "--phonemes"], "no --phonemes, no --stream-stdin"),
        (["--markup", "tags", "--stream-stdin"], "no --phonemes, no --stream-stdin"),
        (["hi", "--markup", "html"], "invalid choice: 'html'"),
        (["hi", "--script", "talk.txt"], "give the text once"),
        (["--script", "talk.txt"], "cannot read talk.txt: No such file"),
        (["--script", "talk.txt", "-v", "owen"], "--script has plain text and names its voices"),
        (["hi", "--ref-text", "a"], "--ref-text needs --ref-audio"),
        (["hi", "--ref-audio", "a.wav"], "cannot read a.wav"),
        (["hi", "--ref-audio", "a.wav", "--ref-text", "a"], "cannot read a.wav"),
        (["hi", "-v", "hazel", "--ref-audio", "a.wav", "--ref-text", "a"], "not both"),
        (["hi", "--token", "secret"], "need --server"),
        (["hi", "--server", "x:1", "--model", "y"], "--model is for speaking without"),
        (["hi", "--server", "x:1", "--watermark"], "--watermark is for speaking without"),
        (["hi", "--server", "x:1", "--tls-cert", "a"], "--tls-cert and --tls-key"),
        (["hi", "--chunk-size", "4,0"], "--chunk-size: 0: must be 1 or more"),
        (["hi", "--chunk-size", "a"], "--chunk-size"),
        (["hi", "--seed", "-1"], "--seed: -1: must be in [0, 18446744073709551615]"),
        (["hi", "--buffer", "x"], "--buffer: invalid number value: 'x'"),
        (["hi", "--sample-rate", "9" * 20], "must be at most 2147483647"),
        (["hi", "--chunk-size", "4," + "9" * 20], "must be at most 2147483647"),
        (["hi", "-o", "x.srt", "--format", "wav", "--timestamps", "x.srt"], "the same file"),
        (["hi", "-o", "x.srt", "--format", "wav", "--timestamps", "srt"], "the same file"),
        (["hi", "--timestamps", "x.txt"], "timestamps are written as .json or .srt or .vtt"),
        (["hi", "--loud"], "unrecognized arguments: --loud"),
        (["hi", "--model", "nowhere"], "nowhere"),
        (["hi", "--family", "orpheus"], "need --model"),
        (["hi", "--audio-decoder", "snac"], "need --model"),
    ],
)
def test_a_wrong_request_is_reported_in_one_line(
    arguments: list[str],
    words: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert words in error_line(capfd)
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_not_utf8_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe_in(monkeypatch, b"caf\xe9")
    assert main(["-o", str(tmp_path / "x.wav")]) == 2
    assert error_line(capfd) == "say: standard input is not UTF-8 text (byte 3)"


def test_the_version_is_that_of_the_package(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capfd.readouterr().out == f"sonant {__version__}\n"


def test_a_terminal_gets_no_audio_and_is_not_read() -> None:
    master, terminal = pty.openpty()
    try:
        for arguments, words in (
            (["hi", "-o", "-"], b"standard output is a terminal"),
            ([], b"there is no text"),
        ):
            done = subprocess.run(
                command(*arguments),
                stdin=terminal,
                stdout=terminal,
                stderr=subprocess.PIPE,
                check=False,
            )
            assert done.returncode == 2
            assert words in done.stderr
    finally:
        os.close(master)
        os.close(terminal)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("", "talk.txt has no text"),
        ("\n\nHello there.\n", "talk.txt, line 3: begins without a name; write NAME: text"),
        ("hazel:\nowen: Hi.\n", "talk.txt, line 1: hazel has no text"),
        ("hazel: Hi.\nowen:  \n", "talk.txt, line 2: owen has no text"),
        ("http://host 12:30 a b: c", "talk.txt, line 1: begins without a name"),
    ],
)
def test_a_wrong_line_of_a_script_is_named(
    script: str,
    words: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.txt").write_text(script)
    assert main(["--script", "talk.txt"]) == 2
    assert words in error_line(capfd)


def test_lines_of_a_script_are_joined_in_linear_time() -> None:
    """CR LF ends a line, too; a turn of many lines is not copied for each of them."""
    (turn,) = read_script("hazel: One.\r\n" + " Two.\r\n" * 500_000, "talk.txt")
    assert turn.text == "One." + "\nTwo." * 500_000


# --- refused by the voice


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-v", "unknown"], "no voice 'unknown'; there are: edith, hazel, owen"),
        (["-v", "../x"], "--voice: is no voice name"),
        (["-r", "9"], "--rate: must be in [0.25, 4]"),
        (["--temperature", "3"], "--temperature: must be in [0, 2]"),
        (["--instructions", "Sing."], "this model takes no instructions"),
        (["--sample-rate", "1"], "--sample-rate: must be 0"),
        (["--buffer", "9999"], "--buffer: must be in"),
        (["--language", "??"], "--language: must be a BCP-47 tag"),
        (["--timestamps", "t.json", "--timestamp-level", "word"], "no word timings"),
    ],
)
def test_a_refusal_names_the_users_option(
    server: str,
    arguments: list[str],
    words: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.wav").write_bytes(b"kept")
    assert main(["hi", "-o", "x.wav", "--server", server, *arguments]) == 2
    assert words in error_line(capfd)
    assert (tmp_path / "x.wav").read_bytes() == b"kept"
    assert not (tmp_path / "t.json").exists()


def test_a_long_text_is_refused_in_the_same_words(
    say: Say, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert say(LONG_TEXT, "-r", "9", "-o", tmp_path / "x.wav") == 2
    assert error_line(capfd) == "say: --rate: must be in [0.25, 4]"


def test_a_reference_that_is_not_audio_is_refused(
    say: Say, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "ref.wav").write_bytes(b"no sound at all")
    reference = ["--ref-audio", tmp_path / "ref.wav", "--ref-text", "hello"]
    assert say("hi", "-o", tmp_path / "x.wav", *reference) == 2
    assert "--ref-audio: not a WAV, FLAC or Ogg file" in error_line(capfd)


def test_an_unreachable_server_is_a_failure(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["hi", "-o", str(tmp_path / "x.wav"), "--server", "127.0.0.1:1"]) == 1
    assert error_line(capfd).startswith("say: 127.0.0.1:1: ")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def guarded(tiny_service: Service) -> Iterator[str]:
    """The address of a server that asks for a token and for a certificate; it has a thread."""
    files = {name: TLS / f"server.{end}" for name, end in (("tls_cert", "pem"), ("tls_key", "key"))}
    flags = {**files, "tls_client_ca": TLS / "ca.pem", "auth_token": "open sesame"}
    address: Future[str] = Future()

    async def scenario() -> None:
        async with serving(tiny_service, host="localhost", **flags) as served:
            address.set_result(served.server.address)
            await asyncio.to_thread(ended.wait)

    ended, thread = Event(), Thread(target=lambda: asyncio.run(scenario()))
    thread.start()
    yield address.result(HANG_S)
    ended.set()
    thread.join()


def test_a_guarded_server_requires_the_token_and_the_certificate(
    guarded: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "x.wav"
    base = ["Hi.", "-o", out, "-q", "--server", guarded, "--tls-ca", TLS / "ca.pem"]
    ours = ["--cert", TLS / "client.pem", "--key", TLS / "client.key"]

    def status(*more: object) -> int:
        return main([str(argument) for argument in (*base, *more)])

    assert status(*ours, "--token", "open sesame") == 0
    assert frames_of(out)
    assert status(*ours, "--token", "wrong") == 1
    assert "token" in error_line(capfd)
    assert status("--token", "open sesame") == 1
    assert "say: localhost:" in capfd.readouterr().err


@pytest.mark.parametrize("ca", ["other", "garbage"])
def test_an_untrusted_server_is_reported_in_one_line(ca: str, guarded: str, tmp_path: Path) -> None:
    """The command runs in a separate process: gRPC's core writes to standard error directly."""
    roots = TLS / "client.pem" if ca == "other" else tmp_path / "garbage.pem"
    (tmp_path / "garbage.pem").write_text("no certificate")
    arguments = command("Hi.", "-o", tmp_path / "x.wav", "--server", guarded, "--tls-ca", roots)
    said = subprocess.run(arguments, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert said.returncode == 1
    (line,) = said.stderr.splitlines()
    assert line.startswith(f"say: {guarded}: ")
