"""Output files of the command line, in process and against a real server."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import soundfile

from tests.deadlines import HANG_S
from tests.speech_server import Server
from tests.tts.command_line import (
    LONG_TEXT,
    RATE,
    SENTENCES,
    STORY,
    TEXT,
    Say,
    command,
    frames_of,
    pipe_in,
)
from tests.tts.serving import hum, wav
from tts.cli import options
from tts.cli.request import in_flags
from tts.cli.timestamps import (
    Segment,
    SegmentTimes,
    cues_of,
    to_json,
    to_srt,
    write_timestamps,
)
from tts.say import main


@pytest.fixture(scope="module")
def samples(tiny_server: Server, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Samples of TEXT with seed 3, as s16le."""
    out = tmp_path_factory.mktemp("said") / "x.wav"
    assert main([TEXT, "-o", str(out), "--seed", "3", "-q", "--server", tiny_server.address]) == 0
    return frames_of(out)


def test_a_file_and_one_line_about_it(
    say: Say, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "x.wav"
    assert say(TEXT, "-o", out, "--seed", "3") == 0
    seconds = len(frames_of(out)) / 2 / RATE
    *warnings, line = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{out}: {seconds:.2f} s of audio, time to first audio ")
    assert "real-time factor " in line
    assert all(warning.startswith("say: warning: ") for warning in warnings)


def test_lexicons_change_what_is_said(tiny_checkpoint: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.pls"
    first.write_text("SQL\tess\nhere\tnow\n")
    lexeme = "<lexeme><grapheme>SQL</grapheme><alias>sequel</alias></lexeme>"
    second.write_text(f"<lexicon>{lexeme}</lexicon>")
    flags = ["--seed", "5", "-q", "--model", str(tiny_checkpoint)]
    said = ["We speak SQL here.", "--lexicon", str(first), "--lexicon", str(second)]
    assert main([*said, "-o", str(tmp_path / "a.wav"), *flags]) == 0
    assert main(["We speak sequel now.", "-o", str(tmp_path / "b.wav"), *flags]) == 0
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()


def test_the_same_seed_gives_the_same_audio_locally_and_over_grpc(
    server: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    where = {"a.wav": ["--model", str(tiny_checkpoint)], "b.wav": ["--server", server]}
    for name, arguments in where.items():
        assert main([TEXT, "-o", str(tmp_path / name), "--seed", "5", "-q", *arguments]) == 0
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()
    assert frames_of(tmp_path / "a.wav")


def test_markup(say: Say, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain, tags, ssml = (tmp_path / f"{name}.wav" for name in ("plain", "tags", "ssml"))
    assert say(TEXT, "-o", plain, "--seed", "3") == 0
    assert say(f"{TEXT} [pause:1s]", "--markup", "tags", "-o", tags, "--seed", "3") == 0
    document = f"<speak>{TEXT}<break time='1s'/><mark name='end'/></speak>"
    dated = tmp_path / "x.json"
    markup = ["--markup", "ssml", "--timestamps", dated]
    assert say(document, *markup, "-o", ssml, "--seed", "3") == 0
    assert frames_of(tags) == frames_of(ssml) == frames_of(plain) + bytes(2 * RATE)
    (mark,) = json.loads(dated.read_text())["marks"]
    assert (mark["kind"], mark["name"]) == ("mark", "end")
    assert mark["time_s"] == pytest.approx(len(frames_of(ssml)) / 2 / RATE, abs=1e-6)
    capfd.readouterr()
    assert say("hello", "--markup", "ssml", "-o", ssml) == 2
    assert "line 1, column 1: syntax error" in capfd.readouterr().err


def test_a_script(say: Say, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script, out, dated = (tmp_path / name for name in ("talk.txt", "x.wav", "x.json"))
    script.write_text("\ufeffHazel: Oh yes.\n\nowen:\n  Not yet.\n  At 12:30: no!\n", "utf-8")
    assert say("--script", script, "-o", out, "--seed", "3", "--timestamps", dated) == 0
    found = json.loads(dated.read_text())
    assert [(mark["kind"], mark["name"]) for mark in found["marks"]] == [
        ("turn", "hazel"),
        ("turn", "owen"),
    ]
    texts = [" ".join(segment["text"].split()) for segment in found["segments"]]
    assert texts == ["Oh yes.", "Not yet.", "At 12:30: no!"]
    capfd.readouterr()
    script.write_text("hazel: Oh yes.\n\nNemo: Not yet.\n")
    assert say("--script", script, "-o", out) == 2
    assert f"say: {script}, line 3: no voice 'nemo'; there are: edith, hazel" in (
        capfd.readouterr().err
    )
    script.write_text("hazel: Oh yes.\nOwen: Not\0 yet.\n")
    assert say("--script", script, "-o", out) == 2
    assert f"say: {script}, line 2: control character" in capfd.readouterr().err


@pytest.mark.parametrize("suffix", ["flac", "ogg", "opus", "mp3"])
def test_the_suffix_picks_the_container(
    server: str, samples: bytes, suffix: str, tmp_path: Path
) -> None:
    out = tmp_path / f"x.{suffix}"
    assert main([TEXT, "-o", str(out), "--seed", "3", "-q", "--server", server]) == 0
    info = soundfile.info(str(out))
    assert {"flac": "FLAC", "mp3": "MP3"}.get(suffix, "OGG") == info.format
    frames = len(samples) // 2
    assert frames <= info.frames <= frames + 3 * 1152
    if suffix == "flac":
        assert info.frames == frames


@pytest.mark.parametrize(("suffix", "size"), [("raw", 2), ("f32", 4), ("ul", 1), ("alaw", 1)])
def test_the_suffix_picks_the_sample_format(
    server: str, samples: bytes, suffix: str, size: int, tmp_path: Path
) -> None:
    out = tmp_path / f"x.{suffix}"
    assert main([TEXT, "-o", str(out), "--seed", "3", "-q", "--server", server]) == 0
    assert out.stat().st_size == len(samples) // 2 * size
    if size == 2:
        assert out.read_bytes() == samples


def test_the_format_option_overrides_the_suffix_and_the_rate_is_used(
    server: str, tmp_path: Path
) -> None:
    out = tmp_path / "x.bin"
    arguments = ["--format", "flac", "--sample-rate", "8000", "-q", "--server", server]
    assert main([TEXT, "-o", str(out), *arguments]) == 0
    assert soundfile.info(str(out)).samplerate == 8000


def test_text_comes_from_arguments_a_file_or_a_pipe(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("\ufeffNot yet, you.", encoding="utf-8")
    sources = (
        ["Not", "yet,", "you."],
        ["-f", str(tmp_path / "text.txt")],
        ["-f", "-"],
        ["-"],
        [],
    )
    said = []
    for number, source in enumerate(sources):
        pipe_in(monkeypatch, b"Not yet, you.")
        out = tmp_path / f"{number}.wav"
        assert main([*source, "-o", str(out), "--seed", "1", "-q", "--server", server]) == 0
        said.append(out.read_bytes())
    assert len(set(said)) == 1


def test_standard_output_gets_the_samples(server: str, samples: bytes) -> None:
    piped = subprocess.run(
        command(TEXT, "-o", "-", "--seed", "3", "--server", server), capture_output=True, check=True
    )
    assert piped.stdout == samples
    assert piped.stderr.splitlines()[-1].startswith(b"standard output: ")


def test_a_closed_pipe_is_reported_in_one_line(server: str) -> None:
    with subprocess.Popen(
        command(STORY, "-o", "-", "-q", "--server", server),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(100)
        process.stdout.close()
        assert process.wait(HANG_S) == 1
        assert process.stderr.read() == b"say: cannot write the output: Broken pipe\n"


def test_voice_and_language_are_listed(say: Say, capfd: pytest.CaptureFixture[str]) -> None:
    assert say("-v", "?") == 0
    assert [line.split() for line in capfd.readouterr().out.splitlines()] == [
        ["hazel", "en-US", "Hazel"],
        ["owen", "en-US", "Owen"],
        ["edith", "en-US", "Edith"],
    ]
    assert say("--list-voices", "--language", "de") == 0
    assert capfd.readouterr().out == ""


def test_the_voice_changes_the_audio(say: Say, tmp_path: Path) -> None:
    for voice in ("hazel", "owen"):
        assert say(TEXT, "-v", voice, "--seed", "1", "-q", "-o", tmp_path / f"{voice}.wav") == 0
    assert frames_of(tmp_path / "hazel.wav") != frames_of(tmp_path / "owen.wav")


def test_a_reference_recording_changes_the_voice(say: Say, tmp_path: Path) -> None:
    (tmp_path / "ref.wav").write_bytes(wav(hum(1.5)))
    reference = ["--ref-audio", tmp_path / "ref.wav", "--ref-text", "Mmm."]
    chunking = [
        *("--chunk-size", "2,4", "--buffer", "4", "--block-causal"),
        *("--prepend-prompt-speech-tokens", "rolling"),
        "--no-prepend-prompt-speech-tokens-causal",
    ]
    assert say(TEXT, "-q", "-o", tmp_path / "x.wav", *reference, *chunking) == 0
    assert frames_of(tmp_path / "x.wav")


def test_a_slower_rate_lasts_longer(say: Say, tmp_path: Path) -> None:
    for name, rate in (("fast", "2"), ("slow", "0.5")):
        assert say(TEXT, "-r", rate, "--seed", "3", "-q", "-o", tmp_path / f"{name}.wav") == 0
    fast, slow = (len(frames_of(tmp_path / f"{name}.wav")) for name in ("fast", "slow"))
    assert 3 < slow / fast < 5


def test_chunks_have_the_requested_sizes(
    server: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    counts = []
    for sizes in ("1", "50"):
        arguments = ["--chunk-size", sizes, "--progress", "--seed", "3", "--server", server]
        assert main([TEXT, "-o", str(tmp_path / "x.wav"), *arguments]) == 0
        counts.append(len(capfd.readouterr().err.splitlines()))
    assert counts[0] > counts[1] >= 2


def test_every_segment_has_times(say: Say, tmp_path: Path) -> None:
    out, dated = tmp_path / "x.wav", tmp_path / "x.json"
    assert say(TEXT, "-q", "--seed", "3", "-o", out, "--timestamps", dated) == 0
    segments = json.loads(dated.read_text())["segments"]
    assert [segment["text"] for segment in segments] == ["Oh yes.", "Not yet."]
    assert segments[0]["start_s"] == 0
    assert segments[0]["end_s"] == segments[1]["start_s"]
    assert segments[1]["end_s"] == len(frames_of(out)) / 2 / RATE


def test_a_long_text_is_synthesized_to_its_end(say: Say, tmp_path: Path) -> None:
    out, dated = tmp_path / "x.wav", tmp_path / "x.srt"
    assert len(LONG_TEXT) > options.LONG_TEXT
    assert say(LONG_TEXT, "-q", "-o", out, "--timestamps", dated) == 0
    blocks = dated.read_text().strip().split("\n\n")
    assert [block.splitlines()[2] for block in blocks] == SENTENCES
    assert frames_of(out)


def test_text_without_words_gives_an_empty_file_and_a_warning(
    say: Say, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "x.wav"
    assert say("\N{GRINNING FACE}\N{GRINNING FACE}", "-o", out) == 0
    assert frames_of(out) == b""
    warning, line = capfd.readouterr().err.splitlines()
    assert warning == "say: warning: the text holds nothing that can be spoken"
    assert line.startswith(f"{out}: 0.00 s of audio")


def test_fields_become_options() -> None:
    assert in_flags("config.voice.prompt.audio: no") == "--ref-audio: no"
    assert in_flags("config.synthesis.chunking.buffer: no") == "--buffer: no"
    assert (
        in_flags("config.request_id: no; my config.voice")
        == "config.request_id: no; my config.voice"
    )


def test_segments_grow_and_are_written() -> None:
    times = SegmentTimes()
    times.add(0, (0.0, 0.5), (0, 5))
    times.add(0, (0.5, 1.25), (0, 5))
    times.add(1, (1.25, 3661.001), (5, 11))
    segments = times.segments("Oh\nno. Yes.")
    assert segments == (
        Segment(0, 0.0, 1.25, 0, 5, "Oh\nno"),
        Segment(1, 1.25, 3661.001, 5, 11, ". Yes."),
    )
    assert json.loads(to_json(segments))["segments"][1]["end_s"] == 3661.001
    assert "marks" not in json.loads(to_json(segments))
    assert to_srt(segments) == (
        "1\n00:00:00,000 --> 00:00:01,250\nOh no\n\n2\n00:00:01,250 --> 01:01:01,001\n. Yes.\n"
    )


SENTENCE = (
    "When the sun had set behind the hills, the boats came back to the harbour; "
    "the nets were full, and the men were tired and wet."
)


def spoken(text: str) -> SegmentTimes:
    """Return times of a text in which each character takes 0.1 s, with those of its words."""
    times = SegmentTimes()
    times.add(0, (0.0, len(text) / 10), (0, len(text)))
    for word in re.finditer(r"\S+", text):
        times.add_word((word.start() / 10, word.end() / 10), word.span())
    return times


@pytest.mark.parametrize("has_words", [True, False])
def test_cues_have_two_lines_and_end_with_clauses(has_words: bool) -> None:
    times = spoken(SENTENCE)
    if not has_words:
        times = SegmentTimes()
        times.add(0, (0.0, len(SENTENCE) / 10), (0, len(SENTENCE)))
    cues = cues_of(times, SENTENCE)
    assert [cue.text for cue in cues] == [SENTENCE[:75].strip(), SENTENCE[75:]]
    assert [round(cue.start_s, 6) for cue in cues] == [0.0, 7.5]
    assert [round(cue.end_s, 6) for cue in cues] == [7.4, len(SENTENCE) / 10]
    lines = [block.splitlines()[2:] for block in to_srt(cues).split("\n\n")]
    assert [len(line) for line in lines] == [2, 2]
    assert max(len(line) for block in lines for line in block) <= 42


@pytest.mark.parametrize("text", ["word " * 200, "x" * 200 + " y", "一二三四五六" * 40])
def test_cues_lose_nothing(text: str) -> None:
    cues = cues_of(spoken(text), text)
    assert "".join("".join(cue.text.split()) for cue in cues) == "".join(text.split())
    if text[0] == "w":
        assert max(len(cue.text) for cue in cues) <= 84


def test_webvtt_and_words(tmp_path: Path) -> None:
    text = "A <b> & c."
    times = spoken(text)
    write_timestamps(tmp_path / "a.vtt", times, text, by_word=False)
    assert (tmp_path / "a.vtt").read_text() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nA &lt;b&gt; &amp; c.\n\n"
    )
    write_timestamps(tmp_path / "a.srt", times, text, by_word=True)
    blocks = (tmp_path / "a.srt").read_text().strip().split("\n\n")
    assert [block.splitlines()[2] for block in blocks] == text.split()
    write_timestamps(tmp_path / "a.json", times, text, by_word=False)
    assert len(json.loads((tmp_path / "a.json").read_text())["segments"]) == 1


def test_cues_of_two_sentences_are_apart() -> None:
    text = "Oh. Not yet."
    times = SegmentTimes()
    times.add(0, (0.0, 0.3), (0, 3))
    times.add(1, (0.3, 1.2), (3, 12))
    for word in re.finditer(r"\S+", text):
        times.add_word((word.start() / 10, word.end() / 10), word.span())
    assert [cue.text for cue in cues_of(times, text)] == ["Oh.", "Not yet."]
