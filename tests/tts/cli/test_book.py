"""Books: files, chapters, subtitles; runs that end early; servers that are busy or gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import soundfile

from tests.deadlines import HANG_S
from tests.tts.command_line import RATE, TEXT, command, error_line, frames_of, wait_for
from tests.tts.serving import Serving, run_with_server
from tts.cli.book import run as book_run
from tts.cli.book.chapters import BREAK_S, PARAGRAPH_S
from tts.cli.book.run import say_book
from tts.cli.client import RemoteClient, SayError
from tts.cli.options import Credentials, SayOptions, read_options
from tts.factory import Service
from tts.leftovers import lock
from tts.say import build_parser, main

BOOK = """Oh yes.

# One *and* all

Not yet. Oh.

***

Yes.

## Two: a/b?

No.
"""
STORY = ("\n" * 200).join(f"Line {n}." for n in range(12))  # pieces; long enough for a book


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "my book.md").write_text(BOOK)
    return tmp_path / "my book.md"


@pytest.fixture
def story(tmp_path: Path) -> Path:
    (tmp_path / "story.txt").write_text(STORY)
    return tmp_path / "story.txt"


def arguments(text: Path, out: Path, *more: object) -> list[str]:
    return [*map(str, ("-f", text, "-o", out, "-q", "--seed", "3", *more))]


def options_of(text: Path, out: Path, *more: object) -> SayOptions:
    return read_options(build_parser().parse_args(arguments(text, out, *more)))


# --- files


def test_a_folder_has_a_file_and_subtitles_per_chapter_and_a_playlist(
    book: Path, server: str, tmp_path: Path
) -> None:
    out, whole = tmp_path / "audio book", tmp_path / "book.wav"
    where = ["--server", server]
    more = ["--format", "wav", "--timestamps", "vtt", *where]
    assert main([*arguments(book, out, *more), "-o", f"{out}/"]) == 0
    names = ["01 my book", "02 One and all", "03 Two a b"]
    expected = {f"{name}.{suffix}" for name in names for suffix in ("wav", "vtt")}
    assert {path.name for path in out.iterdir()} == expected | {"audio book.m3u8"}
    lines = (out / "audio book.m3u8").read_text().splitlines()
    assert lines[0] == "#EXTM3U"
    assert lines[2::2] == [f"{name}.wav" for name in names]
    seconds = len(frames_of(out / "01 my book.wav")) / 2 / RATE
    assert lines[1] == f"#EXTINF:{round(seconds)},my book"
    assert main(arguments(book, whole, "--jobs", 1, *where)) == 0
    assert frames_of(whole) == b"".join(frames_of(out / f"{name}.wav") for name in names)
    cues = (out / "02 One and all.vtt").read_text().strip().split("\n\n")
    assert cues[0] == "WEBVTT"
    assert [cue.splitlines()[1] for cue in cues[1:]] == ["One and all", "Not yet.", "Oh.", "Yes."]
    assert cues[1].startswith("00:00:00.000 --> ")


def test_the_default_format_of_a_folder_is_mp3(server: str, tmp_path: Path) -> None:
    assert main([TEXT, "-q", "-o", f"{tmp_path}", "--server", server]) == 0
    assert soundfile.info(str(tmp_path / "01 Text.mp3")).format == "MP3"
    assert not (tmp_path / ".parts").exists()


def test_pauses_are_exact_and_jobs_change_nothing(
    book: Path, server: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    outs = [tmp_path / f"{n}.wav" for n in range(3)]
    times = tmp_path / "times.json"
    assert main(arguments(book, outs[0], "--jobs", 1, "--server", server)) == 0
    assert main(arguments(book, outs[1], "--jobs", 5, "--server", server)) == 0
    more = ["--timestamps", times, "--model", tiny_checkpoint]
    assert main(arguments(book, outs[2], "--jobs", 5, *more)) == 0
    frames = frames_of(outs[0])
    assert frames == frames_of(outs[1]) == frames_of(outs[2])
    segments = json.loads(times.read_text())["segments"]
    said = ["Oh yes.", "One and all", "Not yet.", "Oh.", "Yes.", "Two: a/b?", "No."]
    assert [segment["text"] for segment in segments] == said
    assert [segment["index"] for segment in segments] == [*range(len(said))]
    gaps = [round(after["start_s"] - before["end_s"], 6) for before, after in pairwise(segments)]
    assert gaps == [BREAK_S, PARAGRAPH_S, 0, BREAK_S, BREAK_S, PARAGRAPH_S]
    first_s = segments[0]["end_s"]
    silence = frames[2 * round(first_s * RATE) :][: 2 * round(BREAK_S * RATE)]
    assert silence == bytes(len(silence)) != b""


def test_raw_floats_and_trimmed_ends(book: Path, server: str, tmp_path: Path) -> None:
    where = ["--jobs", 4, "--server", server]
    whole, trimmed, floats = (tmp_path / name for name in ("a.wav", "b.wav", "c.f32"))
    assert main(arguments(book, whole, *where)) == 0
    assert main(arguments(book, floats, *where)) == 0
    assert floats.stat().st_size == 2 * len(frames_of(whole))
    times = tmp_path / "times.json"
    assert main(arguments(book, trimmed, "--trim-silence", "--timestamps", times, *where)) == 0
    assert 0 < len(frames_of(trimmed)) <= len(frames_of(whole)) - 2 * RATE
    assert frames_of(trimmed) in frames_of(whole)


def test_short_markdown_is_read_as_prose_through_a_pipe(
    book: Path, server: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    prose = "Oh yes.\n\nOne and all\n\nNot yet. Oh.\n\n\n\nYes.\n\nTwo: a/b?\n\nNo."
    assert main(arguments(book, Path("-"), "--server", server)) == 0
    audio = capfdbinary.readouterr().out
    assert main([prose, "-o", "-", "-q", "--seed", "3", "--server", server]) == 0
    assert audio == capfdbinary.readouterr().out != b""


# --- ended early


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_ended_is_continued_sample_for_sample(
    ending: signal.Signals, story: Path, server: str, tmp_path: Path
) -> None:
    """The process ends while it speaks; the rest is spoken with its seed, which was random."""
    out, whole, times = tmp_path / "x.flac", tmp_path / "whole.flac", tmp_path / "times.json"
    parts = tmp_path / "x.flac.parts"
    line = ["-f", story, "-o", out, "-r", "0.25", "--server", server]
    with subprocess.Popen(command(*line, "--jobs", 1), stderr=subprocess.PIPE) as process:
        wait_for(lambda: any(parts.glob("*.piece")))
        process.send_signal(ending)
        status = process.wait(HANG_S)
        assert process.stderr is not None
        errors = process.stderr.read().decode()
    stored = [*parts.glob("*.piece")]
    assert 1 <= len(stored) < 12
    assert not out.exists()
    assert status == (130 if ending is signal.SIGINT else -signal.SIGKILL)
    if ending is signal.SIGINT:
        left = f"{len(stored)} of 12 pieces are in {parts}, and --resume continues"
        assert errors == f"stopped early; {left}\n"
    seed = json.loads((parts / "manifest.json").read_text())["seed"]
    assert main([*map(str, line), "-q", "--resume", "--timestamps", str(times)]) == 2
    assert main([*map(str, line), "-q", "--resume"]) == 0
    assert not parts.exists()
    if ending is signal.SIGINT:
        return  # the pieces that are stored are the same
    assert main([*map(str, ("-f", story, "-o", whole, *line[4:])), "-q", "--seed", str(seed)]) == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.fixture
def unfinished(
    story: Path,
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Path:
    """The output of a run with seed 3 that stored its pieces, before the disk was full."""
    out, parts = tmp_path / "x.wav", tmp_path / "x.wav.parts"
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", _no_space_for_audio)
        assert main(arguments(story, out, "--server", server)) == 1
    assert error_line(capfd) == (
        f"say: cannot write {out}: No space left on device; 12 of 12 pieces are in {parts}, "
        "and --resume continues"
    )
    assert len([*parts.glob("*.piece")]) == 12
    return out


def _no_space_for_audio(source: Path, target: Path) -> None:
    if target.suffix == ".wav":
        raise OSError(28, "No space left on device", str(target))
    source.rename(target)


def test_damaged_pieces_are_spoken_again(unfinished: Path, story: Path, server: str) -> None:
    parts = Path(f"{unfinished}.parts")
    (parts / "000003.piece").write_bytes(b"damaged")
    (parts / "000002.piece").write_bytes(b'{"key":"\xff"}\n')
    damaged = (parts / "000004.piece").read_bytes()
    (parts / "000004.piece").write_bytes(damaged[:-2] + b"xx")
    assert main(arguments(story, unfinished, "--resume", "--server", server)) == 0
    again = unfinished.with_name("again.wav")
    assert main(arguments(story, again, "--server", server)) == 0
    assert unfinished.read_bytes() == again.read_bytes()


def test_what_cannot_be_continued_is_refused_in_one_line(
    unfinished: Path,
    story: Path,
    server: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    parts = Path(f"{unfinished}.parts")
    manifest = parts / "manifest.json"
    known = manifest.read_bytes()

    def refused(*more: str) -> str:
        assert main([*arguments(story, unfinished, "--server", server), *more]) == 2
        line = error_line(capfd)
        assert line.startswith(f"say: {parts}")
        assert "--restart" in line
        return line

    assert "unfinished run; continue it with --resume" in refused()
    assert "another --seed" in refused("--resume", "--seed", "4")
    assert "another voice" in refused("--resume", "-v", "owen")
    assert "other settings" in refused("--resume", "-r", "2")
    story.write_text(STORY + " More.")
    assert "the text has changed" in refused("--resume")
    story.write_text(STORY)
    no_text = known.replace(b'"version":"', b'"version":"\xff')
    deep = b'{"a":' + b"[" * 100_000
    for damaged in (b"{", b"{}", known.replace(b'"seed":3', b'"seed":-3'), no_text, deep):
        manifest.write_bytes(damaged)
        assert "manifest.json is damaged" in refused("--resume")
    manifest.write_bytes(known.replace(b'"seed":3', b'"seed":5'))
    assert "another --seed" in refused("--resume")
    assert "belongs to another run" in refused("--resume", "--seed", "5")
    manifest.unlink()
    (parts / "notes.txt").write_text("kept")
    assert main([*arguments(story, unfinished, "--server", server), "--resume"]) == 2
    assert "has no manifest.json, but other files" in error_line(capfd)
    assert (parts / "notes.txt").read_text() == "kept"


def test_a_run_begins_again_and_two_at_once_are_refused(
    unfinished: Path, story: Path, server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = Path(f"{unfinished}.parts")
    story.write_text(STORY[:-7])
    line = arguments(story, unfinished, "--restart", "--server", server)
    held = lock(parts / "lock", b"")
    assert main(line) == 2
    assert error_line(capfd) == f"say: {parts} is in use by another run"
    os.close(held)
    assert main(line) == 0
    assert not parts.exists()
    assert frames_of(unfinished)


# --- servers


def test_a_busy_server_is_asked_again(
    service: Service, story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book_run, "RETRY_S", (0.01, 0.5))
    out, alone = tmp_path / "x.wav", tmp_path / "alone.wav"

    async def ask(served: Serving, out: Path, jobs: int) -> None:
        client = RemoteClient(served.server.address, Credentials())
        address = served.server.address
        await say_book(client, options_of(story, out, "--jobs", jobs, "--server", address), 0.0)
        await client.close()

    limits = {"max_concurrent_requests": 1, "max_queued_requests": 0}
    run_with_server(service, lambda served: ask(served, out, 4), **limits)
    run_with_server(service, lambda served: ask(served, alone, 1))
    assert frames_of(out) == frames_of(alone) != b""


def test_a_server_that_is_gone_leaves_what_can_be_continued(
    service: Service, story: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.wav"
    parts = tmp_path / "x.wav.parts"

    async def ask(served: Serving) -> str:
        address = served.server.address
        client = RemoteClient(address, Credentials())
        options = options_of(story, out, "--jobs", 1, "--server", address, "-r", 0.25)
        speaking = asyncio.ensure_future(say_book(client, options, 0.0))
        while not [*parts.glob("*.piece")]:
            await asyncio.sleep(0.01)
        await served.server.stop()
        with pytest.raises(SayError) as caught:
            await speaking
        await client.close()
        return str(caught.value)

    message = run_with_server(service, ask)
    assert "pieces are in" in message
    assert message.endswith("--resume continues")
    assert [*parts.glob("*.piece")]


# --- bad input


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "out", "more", "words"),
    [
        ("# One\n\n## Two\n", "x.wav", ["--jobs", "1"], "the text has headings only"),
        ("```\ncode\n```\n", "x.wav", [], "the text holds nothing that can be spoken"),
        ("...\n", "x/", [], "the text holds nothing that can be spoken"),
        ("# A\n\nb\n\n" * 1001, "x/", [], "1001 chapters, and a folder at most 1000 files"),
        ("a\x00b", "x/", [], "control character U+0000 at position 1"),
        ("Hi.", "x.opus", ["--jobs", "1", "--sample-rate", "44100"], "opus has no 44100 Hz"),
        ("Hi.", "x/", ["-v", "unknown"], "no voice 'unknown'"),
        ("Hi.", "/proc/none/", [], "cannot write /proc/none"),
        ("Hi.", "text.md/x/", [], "there is no folder text.md"),
    ],
)
def test_a_wrong_text_or_output_is_one_line(
    text: str,
    out: str,
    more: list[str],
    words: str,
    server: str,
    capfd: pytest.CaptureFixture[str],
    folder: Path,
) -> None:
    (folder / "text.md").write_text(text)
    assert main([*arguments(Path("text.md"), Path("x")), "-o", out, *more, "--server", server]) == 2
    assert words in error_line(capfd)
    assert not (folder / "x.wav.parts").exists()
    assert [*folder.rglob("*.piece")] == []
