"""Players and sinks, with small programs in place of the loudspeaker."""

from __future__ import annotations

import threading
import time
import wave
from pathlib import Path

import pytest

from tts.cli.player import PlayerError, open_player
from tts.cli.sinks import FileSink, PlayerSink

RATE = 16_000
PCM = bytes(range(256)) * 40


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of programs, and the only one that is searched."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(folder: Path, name: str, script: str) -> None:
    """Install a shell script as a program; it may use /bin."""
    program = folder / name
    program.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    program.chmod(0o755)


def read_wav(path: Path) -> tuple[int, bytes]:
    with wave.open(str(path), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return file.getframerate(), file.readframes(file.getnframes())


@pytest.mark.parametrize("name", ["ffplay", "aplay", "paplay"])
def test_players_that_read_standard_input_get_every_byte(
    name: str, programs: Path, tmp_path: Path
) -> None:
    install(programs, name, f'echo "$@" > {tmp_path}/arguments; cat > {tmp_path}/heard')
    player = open_player(RATE, tmp_path / "recording.wav", [name])
    assert player is not None
    player.write(PCM[:1000])
    player.write(PCM[1000:])
    player.finish()
    assert (tmp_path / "heard").read_bytes() == PCM
    assert str(RATE) in (tmp_path / "arguments").read_text()


def test_afplay_gets_the_finished_file(programs: Path, tmp_path: Path) -> None:
    install(programs, "afplay", f'cp "$1" {tmp_path}/heard.wav')
    sink = PlayerSink(["afplay"], tmp_path / "out.wav")
    sink.open(RATE)
    sink.write(PCM, len(PCM) // 2)
    assert sink.close() == "played with afplay"
    assert read_wav(tmp_path / "heard.wav") == (RATE, PCM)
    assert not (tmp_path / "out.wav").exists()


def test_the_first_player_that_exists_is_used(programs: Path, tmp_path: Path) -> None:
    for name in ("aplay", "paplay"):
        install(programs, name, "cat > /dev/null")
    player = open_player(RATE, tmp_path / "x.wav", ["ffplay", "aplay", "paplay"])
    assert player is not None
    assert player.name == "aplay"
    player.finish()


def test_without_a_player_the_file_is_written_and_named(programs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    sink = PlayerSink(["ffplay", "aplay"], out)
    sink.open(RATE)
    sink.write(PCM, len(PCM) // 2)
    assert sink.close() == f"{out} (no audio player found)"
    assert read_wav(out) == (RATE, PCM)


@pytest.mark.parametrize("script", ["exit 3", "head -c 10 > /dev/null; exit 3"])
def test_no_audio_is_lost_when_a_player_exits_early(
    script: str, programs: Path, tmp_path: Path
) -> None:
    install(programs, "aplay", script)
    out = tmp_path / "out.wav"
    sink = PlayerSink(["aplay"], out)
    sink.open(RATE)
    for _ in range(50):
        sink.write(PCM, len(PCM) // 2)
        time.sleep(0.002)
    said = sink.close()
    assert said.startswith(f"{out} (aplay ")
    assert read_wav(out) == (RATE, PCM * 50)


def test_interrupting_ends_a_player_that_does_not_finish(programs: Path, tmp_path: Path) -> None:
    install(programs, "aplay", "exec sleep 1000")
    out = tmp_path / "out.wav"
    sink = PlayerSink(["aplay"], out)
    sink.open(RATE)
    timer = threading.Timer(0.2, sink.interrupt)
    timer.start()
    for _ in range(20):  # more than a pipe holds
        sink.write(PCM, len(PCM) // 2)
    sink.abort()
    timer.join()
    assert not out.exists()


def test_interrupting_without_a_player_keeps_the_audio_so_far(
    programs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.wav"
    sink = PlayerSink(["aplay"], out)
    sink.open(RATE)
    sink.write(PCM, len(PCM) // 2)
    sink.interrupt()
    sink.abort()
    assert read_wav(out) == (RATE, PCM)


def test_the_error_for_a_failed_player_names_the_player(programs: Path, tmp_path: Path) -> None:
    install(programs, "aplay", "exit 1")
    player = open_player(RATE, tmp_path / "x.wav", ["aplay"])
    assert player is not None
    time.sleep(0.1)
    with pytest.raises(PlayerError, match="aplay failed with exit status 1"):
        player.finish()
    player.abort()


def test_aborting_before_a_file_is_opened_leaves_no_file(tmp_path: Path) -> None:
    file, player = FileSink(tmp_path / "a.wav"), PlayerSink([], tmp_path / "b.wav")
    for sink in (file, player):
        sink.abort()
    assert list(tmp_path.iterdir()) == []
