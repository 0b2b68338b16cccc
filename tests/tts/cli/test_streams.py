"""The command line in unusual shells: closed and full streams, locales, endless files, FIFOs.

What depends on streams and locale is a process of its own: they are settled when Python starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deadlines import HANG_S
from tests.tts.command_line import STORY, command, error_line, frames_of, wait_for
from tts.say import main


def shell(redirection: str, *arguments: object, **environment: str) -> tuple[int, bytes, list[str]]:
    """Run the command in a shell; return its status, output and lines of standard error."""
    inherited = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {redirection}', "bash", *command(*arguments)],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env={**inherited, **environment},
        timeout=HANG_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr.decode().splitlines()


# --- closed and full


@pytest.mark.parametrize(
    ("redirection", "arguments", "words"),
    [
        (">&-", ["hi", "-o", "-"], "standard output is closed"),
        (">&-", ["-v", "?"], "standard output is closed"),
        (">&-", ["--phonemes", "hi"], "standard output is closed"),
        ("<&-", ["-o", "x.wav"], "standard input is closed"),
        ("<&-", ["--stream-stdin", "-o", "x.wav"], "standard input is closed"),
    ],
)
def test_a_closed_stream_that_is_needed_is_a_usage_error(
    redirection: str, arguments: list[str], words: str
) -> None:
    status, _, errors = shell(redirection, *arguments)
    assert (status, len(errors)) == (2, 1)
    assert words in errors[0]


@pytest.mark.parametrize("redirection", [">&-", "<&-", "<&- >&- 2>&-", "2>&-", "2>/dev/full"])
def test_streams_that_are_not_needed_may_be_closed_or_full(
    redirection: str, server: str, tmp_path: Path
) -> None:
    assert shell(redirection, "hi", "-o", tmp_path / "x.wav", "--server", server)[0] == 0
    assert frames_of(tmp_path / "x.wav")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_messages_are_not_redirected_when_standard_error_is_closed(redirection: str) -> None:
    assert shell(redirection, "hi", "--loud") == (2, b"", [])


@pytest.mark.parametrize("arguments", [["-v", "?"], ["hi", "-q", "-o", "-"]], ids=["list", "say"])
def test_a_full_standard_output_is_a_failure(arguments: list[str], server: str) -> None:
    status, _, errors = shell(">/dev/full", *arguments, "--server", server)
    assert status == 1
    assert errors[-1] == "say: cannot write the output: No space left on device"


@pytest.mark.parametrize("program", ["tts.say -v ? --server {}", "tts completion bash"])
def test_a_reader_that_has_ended_ends_a_list_silently(program: str, server: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", *program.format(server).split()],
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=HANG_S,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


# --- interrupted


def test_an_interrupt_ends_waiting_for_lines(server: str, tmp_path: Path) -> None:
    out = tmp_path / "x.wav"
    with subprocess.Popen(
        command("--stream-stdin", "-q", "-o", out, "--server", server),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"Hello there.\n")
        process.stdin.flush()
        wait_for(lambda: out.exists() and out.stat().st_size > 1000)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 130
        assert process.stderr.read() == b""
    assert frames_of(out)


def test_an_interrupt_ends_a_blocked_write(server: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    (tmp_path / "text.txt").write_text(STORY)
    with subprocess.Popen(
        command("-q", "-f", tmp_path / "text.txt", "-r", "0.25", "-o", "-", "--server", server),
        stdout=writing,
    ) as process:
        os.close(writing)
        assert os.read(reading, 1)
        time.sleep(1)  # by then the pipe is full; what is tested holds before that, too
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 130
    os.close(reading)


# --- locales and bytes


@pytest.mark.parametrize("environment", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0"}], ids=["own", "C"])
def test_umlauts_are_decoded_in_any_locale(
    environment: dict[str, str], server: str, tmp_path: Path
) -> None:
    times = tmp_path / "süß.json"
    out = ["-o", tmp_path / "süß.wav", "--timestamps", times, "--server", server]
    assert shell("", "Schöne Grüße.", *out, **environment)[0] == 0
    assert "Schöne Grüße." in times.read_text(encoding="utf-8")
    assert frames_of(tmp_path / "süß.wav")


def test_a_text_that_is_not_text_is_refused() -> None:
    done = subprocess.run(
        [*map(os.fsencode, command()), b"\xff", b"-o", b"x.wav"],
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, b"say: TEXT is not UTF-8 text\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([b"hi", b"-v", b"\xff"], "--voice is not UTF-8 text"),
        ([b"hi", b"--language", b"\xff"], "--language is not UTF-8 text"),
        ([b"hi", b"--server", b"\xff:1"], "--server is not UTF-8 text"),
        ([b"hi", b"--server", b"x:1", b"--token", b"\xff"], "--token may hold printable ASCII"),
        ([b"hi", b"--server", b"x:1", b"--token", b"a\nb"], "--token may hold printable ASCII"),
    ],
)
def test_arguments_that_are_not_text_are_refused(
    arguments: list[bytes], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*map(os.fsdecode, arguments), "-o", "x.wav"]) == 2
    assert words in error_line(capfd)


def test_file_names_may_be_any_bytes(server: str, tmp_path: Path) -> None:
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.wav"))
    assert main(["hi", "-q", "-o", str(out), "--server", server]) == 0
    assert frames_of(out)


# --- files without an end, without a reader, with two writers


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "standard input has more than"),
        (["--stream-stdin", "-q"], "control character U+0000"),
    ],
)
def test_an_endless_input_is_not_read_to_its_end(
    arguments: list[str], words: str, server: str, tmp_path: Path
) -> None:
    where = ["-o", tmp_path / "x.wav", "--server", server]
    status, _, errors = shell("</dev/zero", *arguments, *where)
    assert (status, len(errors)) == (2, 1)
    assert words in errors[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["-f", "/dev/zero"],
        ["hi", "--ref-audio", "/dev/zero", "--ref-text", "x"],
        ["hi", "--tls-ca", "/dev/zero"],
    ],
)
def test_an_endless_file_is_not_read_to_its_end(
    arguments: list[str], server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "-o", str(tmp_path / "x.wav"), "--server", server]) == 2
    assert "/dev/zero has more than" in error_line(capfd)


def test_a_fifo_without_a_reader_is_reported(
    server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fifo = tmp_path / "fifo.wav"
    os.mkfifo(fifo)
    assert main(["hi", "-o", str(fifo), "--server", server]) == 2
    assert error_line(capfd) == f"say: cannot write {fifo}: no program reads it"


def test_timestamps_into_a_fifo_are_refused(
    server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fifo = tmp_path / "times.srt"
    os.mkfifo(fifo)
    where = ["-o", str(tmp_path / "x.wav"), "--timestamps", str(fifo), "--server", server]
    assert main(["hi", *where]) == 2
    assert error_line(capfd) == f"say: cannot write {fifo}: timestamps need a regular file"


def test_a_fifo_with_a_reader_gets_the_audio(
    server: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    fifo, copy = tmp_path / "fifo.wav", tmp_path / "copy.pcm"
    os.mkfifo(fifo)
    with copy.open("wb") as target, subprocess.Popen(["cat", fifo], stdout=target) as reader:
        what = ["hi", "-q", "--seed", "7", "--format", "s16le", "--server", server]
        assert main([*what, "-o", str(fifo)]) == 0
        assert reader.wait(HANG_S) == 0
    assert main([*what, "-o", "-"]) == 0
    assert copy.read_bytes() == capfdbinary.readouterr().out != b""


def test_a_second_process_writing_the_same_file_is_refused(server: str, tmp_path: Path) -> None:
    out, text = tmp_path / "x.wav", tmp_path / "text.txt"
    text.write_text(STORY)
    with (
        text.open() as lines,
        subprocess.Popen(
            command("-q", "--stream-stdin", "-o", out, "-r", "0.25", "--server", server),
            stdin=lines,
        ) as first,
    ):
        wait_for(lambda: out.exists() and out.stat().st_size > 10_000)
        status, _, errors = shell("", "hi", "-o", out, "--server", server)
        assert first.poll() is None
        first.send_signal(signal.SIGINT)
        assert first.wait(HANG_S) == 130
    assert (status, errors) == (2, [f"say: cannot write {out}: another program is writing it"])
    assert frames_of(out)
