"""The command line during synthesis: streamed input, interrupts, progress, players."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.deadlines import HANG_S
from tests.tts.command_line import (
    LONG_TEXT,
    RATE,
    STORY,
    TEXT,
    Say,
    command,
    error_line,
    frames_of,
    pipe_in,
    read_all,
    wait_for,
)
from tts.cli.sinks import PlayerSink
from tts.say import main


def test_lines_are_synthesized_while_standard_input_stays_open(server: str, tmp_path: Path) -> None:
    out = tmp_path / "x.pcm"
    with subprocess.Popen(
        command(
            "--stream-stdin", "-o", out, "--timestamps", tmp_path / "x.json", "--server", server
        ),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"Hello there\n")  # no full stop: spoken after a moment all the same
        process.stdin.flush()
        wait_for(lambda: out.exists() and out.stat().st_size > 0)
        first = out.stat().st_size
        process.stdin.write("Caf\u00e9 is open.\n".encode())
        process.stdin.close()
        assert process.wait(HANG_S) == 0
    assert out.stat().st_size > first
    segments = json.loads((tmp_path / "x.json").read_text())["segments"]
    assert [segment["text"] for segment in segments] == ["Hello there", "Caf\u00e9 is open."]


def test_eager_speech_begins_while_a_line_is_written(server: str, tmp_path: Path) -> None:
    out = tmp_path / "x.pcm"
    flags = ("--stream-stdin", "--eager", "1", "-q", "-o", out, "--server", server)
    with subprocess.Popen(
        command(*flags, "--timestamps", tmp_path / "x.json"), stdin=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        process.stdin.write("When the caf\u00e9 is open again, we go ".encode())
        process.stdin.flush()
        wait_for(lambda: out.exists() and out.stat().st_size > 0)
        process.stdin.write(b"there.")
        process.stdin.close()
        assert process.wait(HANG_S) == 0
    segments = json.loads((tmp_path / "x.json").read_text())["segments"]
    assert segments[0]["text"] == "When the caf\u00e9 is open again,"


def test_invalid_utf8_is_reported_after_the_valid_text(
    say: Say, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe_in(monkeypatch, b"Hello there.\n\xff\xfe\nNever said.\n")
    assert say("--stream-stdin", "-q", "-o", tmp_path / "x.wav") == 2
    assert error_line(capfd) == "say: standard input is not UTF-8 text"
    assert frames_of(tmp_path / "x.wav")


@pytest.mark.parametrize("way", ["local", "remote"])
def test_an_interrupt_leaves_a_valid_file(
    way: str, server: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    where = ["--model", tiny_checkpoint] if way == "local" else ["--server", server]
    out, text = tmp_path / "x.wav", tmp_path / "text.txt"
    text.write_text(STORY)
    with (
        text.open() as lines,
        subprocess.Popen(
            command(
                *(
                    "--stream-stdin",
                    "-o",
                    out,
                    "-r",
                    "0.25",
                    "--timestamps",
                    tmp_path / "x.srt",
                    *where,
                )
            ),
            stdin=lines,
            stderr=subprocess.PIPE,
        ) as process,
    ):
        wait_for(lambda: out.exists() and out.stat().st_size > 10_000)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 130
        assert process.stderr is not None
        errors = process.stderr.read().decode()
    seconds = len(frames_of(out)) / 2 / RATE
    assert seconds > 0.3
    assert errors.startswith(f"stopped early: {seconds:.2f} s of audio")
    assert errors.count("\n") == 1
    assert (tmp_path / "x.srt").read_text().startswith("1\n00:00:00,000 --> ")


@pytest.mark.parametrize("text", [TEXT * 8, LONG_TEXT], ids=["request", "book"])
def test_progress_is_a_bar_on_a_terminal(text: str, server: str, tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    done = subprocess.run(
        command(text, "--progress", "-o", tmp_path / "x.wav", "--server", server),
        stderr=terminal,
        check=False,
    )
    os.close(terminal)
    shown = read_all(master)
    assert done.returncode == 0
    assert re.search(r"100% of the text \|.*\|, \d+\.\d s of audio, 00:0\d left", shown)
    assert shown.splitlines()[-1].startswith(f"{tmp_path / 'x.wav'}: ")


def test_without_an_output_file_a_player_is_started(
    server: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr("tts.cli.run.PlayerSink", partial(PlayerSink, ["aplay"]))
    arguments = [TEXT, "--seed", "4", "--server", server]
    assert main(arguments) == 0
    assert "out.wav (no audio player found): " in capfd.readouterr().err
    (programs / "aplay").write_text(f"#!/bin/sh\n/bin/cat > {tmp_path}/heard\n")
    (programs / "aplay").chmod(0o755)
    assert main(arguments) == 0
    assert "played with aplay: " in capfd.readouterr().err
    assert (tmp_path / "heard").read_bytes() == frames_of(tmp_path / "out.wav")
