"""The benchmarks at small sizes: they run, and they detect differences."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from types import ModuleType

import grpc
import numpy as np
import pytest
import soundfile
import torch

import tts
from benchmarks import (
    attention,
    batch_invariance,
    blends,
    cold_start,
    emphasis,
    first_audio,
    front_end,
    hard_texts,
    host,
    idle,
    ipc_latency,
    lexicon,
    long_text,
    memory,
    pacing,
    pitch,
    planted,
    prompts,
    replicas,
    roles,
    sampling,
    scheduler,
    seams,
    skipped,
    speech_judges,
    speed,
    spoken_text,
    streams,
    understood,
)
from benchmarks.report import (
    Figure,
    Report,
    arguments,
    lines_of,
    publish,
    this_machine,
    until_interrupted,
)
from benchmarks.speech_judges import Acoustics
from benchmarks.stub_engine import stub_engine_server
from benchmarks.word_errors import (
    WordErrors,
    edit_distance,
    slips,
    total,
    word_errors,
)
from llm import FinishReason
from tests.decoder.small_codecs import to_safetensors, write_snac
from tests.speech_server import Server, SpeechClient, serving
from tests.tts.engine.simulated_device import SHAPES, Shape
from tts.api.load import load, load_service
from tts.engine.pacer import DeadlinePacer, DecodePacer
from tts.factory import Service
from tts.speech.check import CheckResult
from tts.text.segmenter import TextSegment
from tts.v1.text_pb2_grpc import TextServiceStub
from tts.voices.types import Voice

pytestmark = pytest.mark.usefixtures("only_new_objects")
Pacer = type[DecodePacer]

ROOT = Path(__file__).parent.parent
CODE_POINTS = 127 / speech_judges.PEAK  # of a clip whose peak is the last character
NOT_COMMANDS = {"__init__", "stub_engine", "report", "speech_judges", "word_errors"}
NOT_COMMANDS |= {"engine_load", "peers", "shapes", "trace", "vllm_peer"}
NOT_COMMANDS |= {"client_pool", "listeners", "playback", "server_metrics", "speech_shapes"}
NOT_COMMANDS |= {"block_readers", "kernel_shapes", "process_samples"}
NOT_COMMANDS |= {"hard_texts", "core_steps", "core_subject"}
NOT_COMMANDS |= {"packed_shapes", "soak_calls", "soak_ledger", "soak_report", "soak_vanish"}


def test_each_command_has_a_main_and_a_place_in_the_documentation() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    commands = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - NOT_COMMANDS
    assert commands == {
        "attention",
        "batch_invariance",
        "blends",
        "decode_interference",
        "codec_calls",
        "cold_start",
        "core",
        "divergence",
        "emphasis",
        "first_audio",
        "frames",
        "front_end",
        "ipc_latency",
        "host",
        "idle",
        "kernels",
        "lexicon",
        "long_text",
        "memory",
        "pacing",
        "path",
        "pitch",
        "planted",
        "prompts",
        "reading",
        "replicas",
        "results",
        "roles",
        "sampling",
        "scheduler",
        "seams",
        "serve",
        "skipped",
        "soak",
        "speed",
        "spoken_text",
        "streams",
        "understood",
        "watermark",
    }
    assert [name for name in commands if f"benchmarks.{name}" not in page] == []


def test_a_lexicon_adds_to_the_first_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    lexicon.main(["--repeat", "1", "--largest", "10"])  # the status depends on the machine
    names = [figure["name"] for figure in json.loads(capsys.readouterr().out)["figures"]]
    assert names == [
        "a sentence without a lexicon",
        *(f"10 entries: {part}" for part in ("reading", "memory", "added to a sentence")),
    ]


# --- prosody


class ToneVoice:
    """A voice of sawtooth tones, a second for each word, which does what it is asked exactly."""

    LOUDER = 2.0

    def say(self, text: str, *, voice: str, pitch: float = 0.0, **_: object) -> tts.Speech:
        first, _, rest = voice.partition("+")
        hertz = {"low": 120.0, "high": 240.0}[first] if not rest else 170.0
        bare = re.sub("<.*?>", "", text)
        gains = [self.LOUDER if "emphasis" in w else 1.0 for w in re.split(r" (?!level)", text)]
        words = bare.split()
        seconds = [1.0 / gain for gain in gains]
        tones = [
            gain * saw(hertz * 2 ** (pitch / 12), length)
            for gain, length in zip(gains, seconds, strict=True)
        ]
        ends = np.cumsum(seconds)
        times = tuple(
            tts.WordTime(word, end - length, end, 0, 0)
            for word, end, length in zip(words, ends, seconds, strict=True)
        )
        return tts.Speech(np.concatenate(tones), 24_000, 0, FinishReason.STOP, words=times)


def saw(hertz: float, seconds: float) -> np.ndarray:
    time = np.arange(round(24_000 * seconds)) / 24_000
    return (0.2 * (2 * (hertz * time % 1) - 1)).astype(np.float32)


def test_a_pitch_is_heard_as_it_was_asked() -> None:
    found = {f.name: f for f in pitch.figures(ToneVoice(), ["one two"], ["low", "high"])}  # type: ignore[arg-type]
    for asked in pitch.ASKED:
        assert found[f"heard for {asked:+g}"].value == pytest.approx(asked, abs=0.1)
    assert max(found["error"].values) < 0.1


def test_an_emphasised_word_is_measured_and_so_are_those_next_to_it() -> None:
    found = {
        f.name: f.values
        for f in emphasis.figures(ToneVoice(), ["a tremendous day, we say"], ["low"])  # type: ignore[arg-type]
    }
    for level in emphasis.LEVELS:
        assert found[f"{level}, the word: length"] == (0.5,)
        assert found[f"{level}, the word: level"] == pytest.approx((6.02,), abs=0.1)
        assert found[f"{level}, next to it: length"] == (1.0, 1.0)
        assert found[f"{level}, next to it: level"] == pytest.approx((0.0, 0.0), abs=0.1)


def test_the_emphasised_word_has_words_next_to_it_and_its_text_stays() -> None:
    words = ["Salt", "&", "pepper", "taste", "wonderful."]
    assert emphasis.chosen(words) == 2
    assert emphasis.chosen(["Stop", "it", "now"]) == 1
    assert emphasis.marked(words, 2, "strong") == (
        '<speak>Salt &amp; <emphasis level="strong">pepper</emphasis> taste wonderful.</speak>'
    )


def test_a_blend_is_compared_with_its_parts() -> None:
    def speaker(clip: np.ndarray) -> np.ndarray:  # by pitch alone
        crossings = int((np.diff(np.sign(clip)) != 0).sum()) / len(clip)
        return np.array([np.cos(100 * crossings), np.sin(100 * crossings)])

    found = {
        f.name: f.value
        for f in blends.figures(ToneVoice(), ["low+high"], ["one", "two"], speaker)  # type: ignore[arg-type]
    }
    assert found["low+high: a part and itself"] == pytest.approx(1.0)
    assert found["low+high: both parts"] < 0.5
    mixed = [found[f"low(1)+high(1): to {part}"] for part in ("low", "high")]
    assert found["low+high: both parts"] < min(mixed) < 0.99


# --- report


def test_a_figure_is_its_median_against_its_bar() -> None:
    fast = Figure("a", (1.0, 9.0, 2.0), "s", bar=2.0)
    assert (fast.value, fast.reached) == (2.0, True)
    assert Figure("a", (2.1,), "s", bar=2.0).reached is False
    assert Figure("a", (2.1,), "x", bar=2.0, at_least=True).reached is True
    assert Figure("a", (1.9,), "x", bar=2.0, at_least=True).reached is False
    assert Figure("a", (1.9,), "x").reached is None


def test_a_report_is_json_on_one_side_and_a_table_on_the_other() -> None:
    report = Report("toy", (Figure("one", (1.0, 3.0), "s", bar=1.5), Figure("two", (7.0,), "x")))
    out, err = io.StringIO(), io.StringIO()
    assert publish(report, out, err) == 1
    record = json.loads(out.getvalue())
    assert record["benchmark"] == "toy"
    assert record["reached"] is False
    assert [figure["value"] for figure in record["figures"]] == [2.0, 7.0]
    assert record["machine"]["cores"] >= 1
    assert record["date"] == datetime.now(UTC).date().isoformat()
    title, header, first, _ = err.getvalue().splitlines()
    assert title == f"toy: {this_machine()}"
    assert header.split() == ["figure", "median", "range", "bar", "verdict", "note"]
    assert first.split() == ["one", "2", "s", "1", "-", "3", "<=", "1.5", "MISSED"]
    assert publish(Report("toy", ()), io.StringIO(), io.StringIO()) == 0


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--audio-decoder-config", '{"look_ahead": 7}']
    monkeypatch.setattr("sys.argv", [str(ROOT / "benchmarks" / "serve.py"), *arguments])
    command = Report("toy", ()).command
    assert shlex.split(command) == ["python", "-m", "benchmarks.serve", *arguments]


def test_a_repetition_is_at_least_one() -> None:
    options = arguments("toy", repeat=3)
    assert options.parse_args([]).repeat == 3
    with pytest.raises(SystemExit, match="2"):
        options.parse_args(["--repeat", "0"])


def test_an_interruption_keeps_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    def measured() -> Iterator[Figure]:
        yield Figure("one", (1.0,), "s", bar=2.0)
        raise KeyboardInterrupt

    assert [figure.name for figure in until_interrupted(measured())] == ["one"]
    first, second = capsys.readouterr().err.splitlines()
    assert first == "one  1 s  <= 2  reached"
    assert second.startswith("interrupted")


# --- word errors


@pytest.mark.parametrize(
    ("meant", "heard", "wrong"),
    [
        ("", "", 0),
        ("a b c", "a b c", 0),
        ("a b c", "a x c", 1),
        ("a b c", "a c", 1),
        ("a b c", "a b x c", 1),
        ("a b c", "", 3),
        ("", "a b", 2),
        ("a b c d", "b c d e", 2),
        ("k i t t e n", "s i t t i n g", 3),
    ],
)
def test_edit_distance(meant: str, heard: str, wrong: int) -> None:
    assert edit_distance(meant.split(), heard.split()) == wrong
    assert edit_distance(heard.split(), meant.split()) == wrong


def test_case_and_punctuation_of_words_are_ignored() -> None:
    assert word_errors("It's nine o'clock, Tom!", "it's nine o'clock tim") == WordErrors(1, 4)
    assert total([WordErrors(1, 4), WordErrors(2, 8)]).rate == 0.25
    assert WordErrors().rate == 0


def test_held_out_sentences_are_sixty_different_ones() -> None:
    sentences = lines_of(understood.HELD_OUT)
    assert len(set(sentences)) == 60
    assert all(5 <= len(sentence.split()) <= 15 for sentence in sentences)
    assert all(sentence[0].isupper() and sentence[-1] in ".?" for sentence in sentences)


# --- understood


class SpellingJudges:
    """Reads the text that a sound spells: its mean is naturalness."""

    def naturalness(self, clip: np.ndarray) -> float:
        return float(clip.max())

    def words(self, clip: np.ndarray) -> str:
        return "".join(map(chr, np.round(clip * CODE_POINTS).astype(int))).strip("\0")


def test_understood_counts_the_words_of_each_voice() -> None:
    """A speaker whose samples spell the text; in one voice the first word is missing."""

    def speak(text: str, voice: str) -> understood.Clip:
        said = text.split(" ", 1)[1] if voice == "owen" else text
        spelled = np.frombuffer(f"{said}\x7f".encode(), np.uint8)  # the largest sets the level
        return understood.Clip(spelled.astype(np.float32), speech_judges.RATE)

    sentences = ["One two three four.", "Five six seven eight."]
    judges, voices = SpellingJudges(), ("hazel", "owen")
    found = understood.judge(speak, judges, voices, sentences)
    rows = {figure.name: figure for figure in understood.figures(found, "our ")}
    rates = {name: row.value for name, row in rows.items() if "misheard" in name}
    assert rates == {
        "our hazel, misheard words": 0.0,
        "our owen, misheard words": 0.25,
        "our all, misheard words": 0.125,
    }
    assert rows["our all, misheard words"].note == "16 words"
    assert rows["our all, naturalness"].values == (np.float32(speech_judges.PEAK),) * 4
    assert [line.split()[0] for line in understood.worst(found)] == ["owen"] * 2 + ["hazel"] * 2


def test_figures_are_words_to_the_recogniser() -> None:
    assert word_errors("Six of 1,204.", "6 of one thousand two hundred and four") == WordErrors(
        0, 8
    )


# --- skipped


@pytest.mark.parametrize(
    ("meant", "heard", "counts"),
    [
        ("It was very very very cold.", "It was very very cold.", (1, 0)),
        ("It was very cold.", "It was very, very cold.", (0, 1)),
        ("Zero, zero, zero, eight.", "008", (1, 0)),
        ("Nineteen ninety-five had twelve hundred.", "1995 had 1200", (0, 0)),
        ("Sold by nineteen oh three.", "Sold by 1903.", (0, 0)),
        ("Agnes Henderson overloads it.", "Agnesson over loads it.", (0, 0)),
        ("We need apples, ropes and wheels.", "We need wheels.", (3, 0)),
        ("Hello.", "", (1, 0)),
    ],
)
def test_words_that_are_missing_or_too_many(
    meant: str, heard: str, counts: tuple[int, int]
) -> None:
    found = slips(meant, heard)
    assert (found.missing, found.extra) == counts


def test_hard_texts_have_every_kind_and_are_the_same_again() -> None:
    found = list(hard_texts.hard_texts(700))
    assert found == list(hard_texts.hard_texts(700)) != list(hard_texts.hard_texts(700, seed=2))
    assert {kind for kind, _ in found} == hard_texts.KINDS.keys()
    assert 700 <= sum(len(text.split()) for _, text in found) < 760
    assert max(len(text) for _, text in found) <= hard_texts.LONGEST


def clip_of(said: str) -> understood.Clip:
    """Return a clip that spells what is said."""
    spelled = np.frombuffer(f"{said}\x7f".encode(), np.uint8)
    return understood.Clip(spelled.astype(np.float32), speech_judges.RATE)


class LengthListener:
    """Recognises a word in a clip, for each second that has begun."""

    def words(self, clip: np.ndarray) -> str:
        return " ".join(["yes"] * -(-len(clip) // speech_judges.RATE))


def test_skipped_compares_speech_with_and_without_the_check() -> None:
    """Clips that spell what is said: one text is repaired, one is spoken again for nothing."""

    def spoken(kind: str, said: str, before: str | None) -> skipped.Spoken:
        text = skipped.Text(kind, "One two three four.", "hazel", 0)
        other = clip_of(before) if before else None
        return skipped.Spoken(text, clip_of(said), other, 2, bool(before))

    one, two, three = "One two three four.", "One two four.", "One two two three four."
    cases = (("names", one, None), ("long", one, two), ("long", three, one), ("single", two, None))
    found = [skipped.compare(spoken(*case), SpellingJudges()) for case in cases]
    rows = {figure.name: figure for figure in skipped.figures(found)}
    assert rows["unchecked"].note == "2 missing, 0 too many of 16"
    assert rows["checked"].note == "1 missing, 1 too many of 16"
    assert (rows["checked"].bar, rows["checked"].reached) == (62.5, False)
    assert rows["unchecked, long"].value == 125.0
    assert rows["segments spoken again"].value == 25.0
    assert rows["of them unnecessarily"].value == 12.5


def test_a_voice_is_compared_with_the_teacher() -> None:
    words = " ".join(["one two"] * 25)
    text = skipped.Text("names", words, "hazel", 0)
    others = [skipped.Compared(text, words, words, 1, 1, words)] * 9
    for missing, above, is_reached in ((2, 2.0, True), (1, 4.0, False)):
        unchecked, checked, theirs = (words.split()[count:] for count in (4, 3, missing))
        found = [
            skipped.Compared(text, *map(" ".join, (unchecked, checked)), 1, 1, " ".join(theirs)),
            *others,
        ]
        teacher, without, ours = skipped.above_teacher(found)
        assert teacher.value == 2.0 * missing
        assert without.value == pytest.approx(above + 2)
        assert (ours.value, ours.reached) == (pytest.approx(above), is_reached)


def test_a_log_continues_where_a_run_ended(tmp_path: Path) -> None:
    path = tmp_path / "skipped.jsonl"
    text, other = (skipped.Text("names", "One two — three.", "hazel", seed) for seed in (0, 1))
    log = skipped.Log(path)
    log.add(skipped.Compared(text, "One two.", "One two three.", 1, 1))
    taught = skipped.Compared(text, "One two.", "One two three.", 1, 1, "One “two” three.")
    log.add(taught)
    with path.open("ab") as file:
        file.write(b'{"text": {"kind": "na')  # as after a kill
    log = skipped.Log(path)
    assert (log.get(text), log.get(other)) == (taught, None)
    log.add(replace(taught, text=other))
    assert skipped.Log(path).get(other) == replace(taught, text=other)


def test_what_is_in_the_log_is_not_spoken_again(tmp_path: Path) -> None:
    path, judges = tmp_path / "skipped.jsonl", LengthListener()
    asked = [skipped.Text("single", "Yes.", "hazel", seed) for seed in (0, 1)]
    skipped.Log(path).add(skipped.Compared(asked[0], "yes", "yes", 1, 0))

    def lines() -> int:
        return path.read_text(encoding="utf-8").count("\n")

    with load("") as voice:
        known, said = skipped.compared(voice, asked, judges, skipped.Log(path))
        assert (known.heard_checked, said.num_segments, lines()) == ("yes", 1, 2)
        again = skipped.compared(voice, asked, judges, skipped.Log(path), lambda text: text.voice)
        assert [one.heard_teacher for one in again] == ["hazel", "hazel"]
        assert [replace(known, heard_teacher="hazel"), replace(said, heard_teacher="hazel")] == [
            skipped.Log(path).get(text) for text in asked
        ]
    assert lines() == 4


# --- planted


def test_planted_faults_are_what_they_are_called() -> None:
    places, draw = [(2, 4), (5, 8)], Random(1)
    expected = {
        planted.Fault.MISSING: {0: [0, 1, 4, 5, 6, 7, 8, 9], 1: [0, 1, 2, 3, 4, 8, 9]},
        planted.Fault.DOUBLED: {0: [0, 1, 2, 3, *range(2, 10)], 1: [*range(8), *range(5, 10)]},
        planted.Fault.EARLY: {0: [0, 1], 1: [0, 1, 2, 3, 4]},
        planted.Fault.RUNAWAY: {n: [*range(10), *range(10), 0, 1, 2] for n in (0, 1)},
    }
    for fault, codes in expected.items():
        found = dict(planted.plant(fault, places, 10, 23, draw) for _ in range(20))
        assert {n: [c for a, b in ranges for c in range(a, b)] for n, ranges in found.items()} == (
            codes
        )


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of `voice`."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def voice(runner: asyncio.Runner) -> Iterator[Service]:
    service = load_service({})
    yield service
    runner.run(service.close())


PLANTED = ("The ferry leaves at noon.", "Bring the yellow lantern.")


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_planted_faults_are_counted(runner: asyncio.Runner, voice: Service, rate: float) -> None:
    """Real speech: no fault is planted or found, or each attempt has one and almost all are."""
    assert voice.synthesizer is not None
    found = list(planted.cases(voice.synthesizer, PLANTED))
    assert [case.segment.text for case in found] == [*PLANTED]
    outcomes = runner.run(planted.measure(voice, found, rate, has_clips=bool(rate)))
    rows = {figure.name: figure for figure in planted.figures(outcomes)}
    sent = [rows[f"sentences with a fault, {name}"].value for name in ("unchecked", "checked")]
    if rate:
        assert rows["found: all"].note == f"of {2 * (3 + planted.DRAWS)}"
        assert rows["found: all"].value >= 60
        assert sent == [100, 100]  # other attempts are no better
        clips = [[clip.samples.tobytes() for clip in one.clips] for one in outcomes]
        assert all(good != faulty for good, faulty, _ in clips)
    else:
        assert rows["found: all"].note == f"of {2 * planted.DRAWS}"
        assert rows["false alarms"].value <= 50
        assert sent == [0, 0]


def test_the_cost_is_that_of_all_sentences_but_the_first(
    runner: asyncio.Runner, voice: Service
) -> None:
    assert voice.synthesizer is not None
    found = list(planted.cases(voice.synthesizer, ("Not yet.", "We leave.")))
    rows = runner.run(planted.costs(voice.synthesizer, found))
    assert [(len(row.values), row.unit) for row in rows] == [(1, "ms")] * 3
    assert min(row.value for row in rows) > 0


def test_what_the_check_finds_and_mends_is_told_apart() -> None:
    case = planted.Case("0", "", TextSegment(0, "One two.", 0, 8), Voice("x"), 0)
    sound, missed, skips = CheckResult.SOUND, CheckResult.SOUND, CheckResult.SKIPPED
    long, short = (planted.Planted(planted.Fault.MISSING, word) for word in ("three", "of"))
    good, faulty, mended = (clip_of(said) for said in ("One two.", "One.", "One two."))
    outcomes = [
        planted.Outcome(case, (None,), (sound,), (), (good, good, good)),
        planted.Outcome(case, (None, None), (skips, sound), (), (good, good, good)),
        planted.Outcome(
            case,
            (long, None),
            (skips, sound),
            ((long, True), (short, False)),
            (good, faulty, mended),
        ),
        planted.Outcome(case, (short,), (missed,), (), (good, faulty, faulty)),
        planted.Outcome(case, (long,), (skips,), (), (good, faulty, faulty)),
    ]
    rows = {figure.name: figure for figure in planted.figures(outcomes)}
    assert rows["found: a word cut out"].value == 60
    assert rows["found: a word cut out"].note == "of 5; 100 % of 3 with 4 letters or more"
    assert rows["false alarms"].value == 25
    assert rows["sentences with a fault, unchecked"].value == 60
    checked = rows["sentences with a fault, checked"]
    assert (checked.value, checked.bar, checked.reached) == (40, 30, False)
    rates = [figure.value for figure in planted.heard(outcomes, SpellingJudges())]
    assert rates == [0, 300, 200]


@pytest.mark.parametrize("hertz", [110, 220])
def test_acoustics_of_a_tone_that_glides_and_of_its_overtone(hertz: int) -> None:
    """A glide of an octave has a range of 9.6 semitones between its tenths, whatever its pitch."""
    rate = 24_000
    at = np.arange(2 * rate) / rate
    phase = 2 * np.pi * np.cumsum(hertz * 2 ** (at / 2)) / rate
    low = Acoustics.of(np.sin(phase), rate)
    assert low.pitch_range == pytest.approx(9.6, abs=1.0)
    assert low.high < -40
    both = Acoustics.of(np.sin(phase) + np.sin(2 * np.pi * 8_000 * at), rate)
    assert both.high == pytest.approx(-3, abs=0.2)
    assert both.seconds == 2


def test_clips_of_the_service_have_its_samples(tiny_server: Server) -> None:
    with SpeechClient(tiny_server.address) as client:
        clip = understood.served(client)("Hello there.", "owen")
        speech = client.synthesize("Hello there.", voice="owen", seed=understood.SEED)
    assert clip.sample_rate == speech.sample_rate
    assert np.array_equal(clip.samples * 32768, np.frombuffer(speech.pcm, "<i2"))


# --- the others


def test_speed_reports_all_its_figures(tiny_checkpoint: Path) -> None:
    report = asyncio.run(speed.run(str(tiny_checkpoint), repeat=1, text="Oh."))
    one, eight, same, unary = report.figures
    assert one.value > 0
    assert eight.bar == pytest.approx(speed.GAIN_BAR * one.value, abs=0.01)
    assert same.value == speed.STREAMS
    assert unary.value == 1


def test_the_scheduler_is_measured_under_its_load() -> None:
    for ahead in (False, True):
        load = scheduler.Load(running=8, waiting=20, ahead=ahead)
        for _ in range(150):  # enough steps for requests to end and be replaced
            load.step()
            made = load.scheduler
            assert (made.num_running, made.num_waiting) in {(8, 20), (7, 20)}
        made.check_integrity()
    report = scheduler.measure(repeat=2, steps=200, running=8, waiting=20)
    gc.freeze()  # as before: it unfreezes all objects
    step, decode, mixed, planned, wall = report.figures
    assert {len(figure.values) for figure in report.figures} == {2}
    assert min(decode.value, mixed.value) > 0
    assert decode.values != mixed.values
    assert planned.value > 0
    assert wall.value > 0
    assert step.bar == planned.bar == scheduler.BAR_MS


def test_a_turn_of_the_host_is_shared_out_among_its_parts() -> None:
    with host.load(host.Kind("short", 3), 4) as turns:
        spent = turns.measure(12)
    assert len(spent) == 12
    for turn in spent:
        whole = turn.pop(host.WHOLE)
        assert sum(turn.values()) == pytest.approx(whole)
        assert turn.keys() == {*host.PHASES, host.REST}
        assert min(turn.values()) >= 0
    report = host.measure(repeat=2, rows=(2,), steps=3)
    decode, streams = report.figures
    assert len(decode.values) == len(streams.values) == 2
    assert all(f"{phase} " in decode.note for phase in (*host.PHASES, host.REST))


def test_streams_cost_the_engines_process_something() -> None:
    report = streams.measure(repeat=2, streams=(6,), readers=2, warm_up_s=0.2, span_s=0.5)
    assert {len(figure.values) for figure in report.figures} == {2}
    code, engine, loop, _ = report.figures
    assert 0 < code.value < engine.value
    assert loop.value > 0
    assert "/s, " in engine.note


def test_streams_are_scheduled_on_a_simulated_device() -> None:
    report = pacing.measure(SHAPES["qwen"], (20, 60), seconds=1.0, warm_up_s=0.5)
    late, rows, windows, *_, more_rows, more_windows = report.figures
    assert late.value == 0
    assert "first sound p50/p95/p99" in late.note
    assert 1 <= rows.value < more_rows.value
    assert 1 <= windows.value < more_windows.value


def test_a_simulation_may_have_other_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for more in ([], ["--chunk-size", "5,10,25,50"]):
        options = ["--shape", "a", "--streams", "30", "--seconds", "1", "--warm-up-s", "0.5"]
        assert pacing.main([*options, *more]) == 0
        figures = json.loads(capsys.readouterr().out)["figures"]
        assert "a, 30 simulated streams: late" in [figure["name"] for figure in figures]
        windows = figures[2]
        counts.append(windows["value"] * float(windows["note"].removesuffix("/s")))
    assert counts[1] < 0.75 * counts[0]  # fewer windows


@pytest.mark.parametrize(("more", "pacer"), [([], DeadlinePacer), (["--plain"], DecodePacer)])
def test_a_simulation_is_paced_unless_it_is_plain(
    more: list[str], pacer: Pacer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Pacer] = []
    original = pacing.measure

    def measure(
        shape: Shape, streams: Sequence[int], seconds: float, warm_up_s: float, pacer: Pacer
    ) -> Report:
        found.append(pacer)
        return original(shape, streams, seconds, warm_up_s, pacer)

    monkeypatch.setattr(pacing, "measure", measure)
    options = ["--shape", "b", "--streams", "20", "--seconds", "1", "--warm-up-s", "0.5"]
    assert pacing.main([*options, *more]) == 0
    assert found == [pacer]


def test_on_the_cpu_the_batch_changes_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shape", "toy", "--device", "cpu", "--requests", "5", "--tokens", "6"]
    assert batch_invariance.main([*options, "--model.kv-cache.num-pages", "60"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    shares = [figure for figure in figures if "other tokens" in figure["name"]]
    assert [figure["value"] for figure in shares] == [0.0] * 8
    assert [figure["reached"] for figure in shares] == [None] * 4 + [True, None] * 2
    costs = {figure["name"]: figure["value"] for figure in figures if figure["unit"] == "x"}
    assert costs.keys() == {
        f"toy, {kind}: batch-invariant, {how}"
        for kind in ("greedy", "sampled")
        for how in ("alone", "5 together")
    }
    assert min(costs.values()) > 0


def test_tokens_that_differ_in_a_batch_are_counted() -> None:
    alone = tuple(batch_invariance.Outcome([tokens], 2.0) for tokens in ((1, 2, 3), (4, 5, 6)))
    together = batch_invariance.Outcome([(1, 7, 8), (4, 5, 6)], 3.0)
    found = batch_invariance.Comparison(alone, together)
    tokens, requests, first, apart, beside = found.figures("toy", bar=0.0)
    assert tokens.value == pytest.approx(100 / 3)
    assert tokens.reached is False
    assert (requests.value, first.values) == (50, (1.0,))
    assert (apart.values, beside.value) == ((1.5, 1.5), 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu measures it there")
@pytest.mark.parametrize("command", [attention, prompts, sampling])
def test_some_things_are_only_measured_on_a_device(command: ModuleType) -> None:
    with pytest.raises(SystemExit, match="there is none"):
        command.main([])


def test_first_audio_comes_before_the_rest(tiny_server: Server) -> None:
    assert {len(text) for text in first_audio.TEXTS} == {60}
    with SpeechClient(tiny_server.address) as client:
        started = time.perf_counter()
        report = first_audio.measure(client, repeat=2, texts=["Hello there."])
        wall_ms = 1000 * (time.perf_counter() - started)
    first, audio = report.figures
    assert 0 < first.value < wall_ms
    assert audio.value > 0


def test_eager_speech_is_measured_from_the_fifth_word(tiny_server: Server) -> None:
    with SpeechClient(tiny_server.address) as client:
        report = first_audio.measure_eager(client, repeat=1, word_s=0.01)
    assert [figure.name[-1] for figure in report.figures] == ["0", "1", "2"]
    assert all(len(figure.values) == 1 for figure in report.figures)


@pytest.mark.long
def test_the_first_audio_of_a_generated_text_is_divided(
    tiny_checkpoint: Path, text_checkpoint: Path
) -> None:
    flags = ["--text-model", str(text_checkpoint)]
    with (
        serving(str(tiny_checkpoint), flags) as server,
        SpeechClient(server.address) as client,
        grpc.insecure_channel(server.address) as channel,
    ):
        report = spoken_text.measure(TextServiceStub(channel), client, repeat=2)
    clause, first, usual, rest, share = (figure.values for figure in report.figures)
    for number in range(2):
        assert 0 < clause[number] < first[number]
        assert rest[number] == pytest.approx(first[number] - clause[number] - usual[number])
        assert 0 < share[number] <= 100


def test_http_is_compared_with_grpc_in_pairs(tiny_server: Server) -> None:
    with SpeechClient(tiny_server.address) as client:
        report = first_audio.compare_protocols(tiny_server, client, repeat=2)
    by_grpc, by_http, added = report.figures
    assert added.values == tuple(b - a for a, b in zip(by_grpc.values, by_http.values, strict=True))
    assert min(by_http.values) > 0


def test_memory_is_that_of_the_server(tiny_server: Server) -> None:
    with SpeechClient(tiny_server.address) as client:
        report = memory.measure(tiny_server, client, repeat=1, text="Hi.")
    ready, idle = report.figures
    assert 0.05 < ready.value <= idle.value + 0.05
    assert idle.value < 4


def test_a_front_end_passes_every_message_on() -> None:
    with stub_engine_server(num_blocks=20, period_s=0.002) as server:
        started = time.monotonic()
        load = asyncio.run(front_end.load(server.address, num_streams=4, ramp_s=0.01))
        wall_s = time.monotonic() - started
    assert len(load.latencies_s) == 4 * 20
    assert all(0 < latency_s < wall_s for latency_s in load.latencies_s)
    assert 0 < load.percentile_ms(50) <= load.percentile_ms(99)


def test_the_rate_is_that_of_the_time_in_which_all_streams_run() -> None:
    early = [front_end.Message(0, second / 4) for second in range(9)]  # 0 to 2 s
    late = [front_end.Message(0, 1 + second / 4) for second in range(9)]  # 1 to 3 s
    load = front_end.summed([early, late])
    assert load.rate == 8.0  # two streams, four messages a second each
    assert len(load.latencies_s) == 18


def test_the_hop_is_the_difference_of_pairs(tiny_server: Server) -> None:
    with SpeechClient(tiny_server.address) as one, SpeechClient(tiny_server.address) as other:
        near, far, added = ipc_latency.measure(one, other, repeat=3, texts=["Hi."]).figures
    pairs = zip(near.values, far.values, strict=True)
    assert added.values == tuple(behind - inside for inside, behind in pairs)
    assert near.value > 0


def test_replicas_are_compared_with_one_engine(tiny_server: Server) -> None:
    servers = tiny_server, tiny_server
    report = replicas.measure(servers, 2, repeat=1, streams=2, text="Hi.")
    one, _, several, cost, gain = report.figures
    assert min(one.value, several.value, cost.value) > 0
    assert gain.values == (several.value / one.value,)
    assert gain.bar == replicas.BAR


@pytest.mark.long
def test_roles_are_compared_with_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--shape toy --devices cpu,cpu --streams 2 --rate 4 --prompt 300 --seconds 1 --repeat 1"
    pages = "--max-length 2048 --model.kv-cache.num-pages 200"
    assert roles.main([*small.split(), *pages.split()]) == 0
    figures = {f["name"]: f for f in json.loads(capsys.readouterr().out)["figures"]}
    assert min(figure["value"] for figure in figures.values()) > 0
    gain = figures["step, p99: roles against replicas"]
    step = [figures[f"{name}: step, p99"]["value"] for name in ("roles", "replicas")]
    assert gain["value"] == pytest.approx(step[0] / step[1])


def test_one_engine_can_have_a_share_of_the_cores() -> None:
    cores = os.sched_getaffinity(0)
    with replicas.on_share(len(cores)):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == cores


def test_an_idle_server_is_the_sum_of_its_processes(tiny_server: Server) -> None:
    assert len(tiny_server.pids) == 3
    total, *each = idle.measure(tiny_server, repeat=1, window_s=0.2).figures
    assert total.value == pytest.approx(sum(figure.value for figure in each))
    assert len(each) == 3
    assert idle.cpu_s(tiny_server.pid) > 0.05


@pytest.mark.long
def test_a_cold_start_is_a_whole_process(tiny_checkpoint: Path) -> None:
    report = cold_start.measure(str(tiny_checkpoint), repeat=1, text="Hi.")
    assert len(report.figures) == 4
    assert min(figure.value for figure in report.figures) > 0.2


def test_missing_context_changes_samples(tmp_path: Path) -> None:
    write_snac(tmp_path)
    to_safetensors(tmp_path)
    found = seams.measure(seams.Subject(tmp_path), 0.6, repeat=2)
    best, half, hasty, no_look_ahead, nothing = found
    assert (best.name, best.bar, half.bar) == ("snac: recommended", seams.BAR_DB, None)
    assert min(best.values) > 100 > hasty.value >= half.value > no_look_ahead.value > nothing.value
    sizes = "7,7,14,21,28,42,56"
    assert best.note.startswith(f"chunks {sizes}, buffer 21, look-ahead 21; first block after 28")


def test_identical_audio_has_no_infinite_ratio() -> None:
    assert seams.decibels(np.ones(4), np.ones(4)) == seams.SAME_DB
    assert seams.decibels(np.ones(4), np.ones(4) * 0.9) == pytest.approx(20)


def test_a_server_that_cannot_start_is_reported(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"did not start \(exit status 2\)"),
        serving(str(tmp_path)),
    ):
        pass


# --- long texts


def bands(clip: np.ndarray) -> np.ndarray:
    """Return a unit vector of the power in 64 bands: another one for another pitch."""
    power = np.abs(np.fft.rfft(clip))[:8000].reshape(64, -1).sum(1)
    return power / np.linalg.norm(power)


@pytest.mark.parametrize(("pitch", "level"), [(300, 0.1), (900, 0.1), (300, 0.3)])
def test_a_voice_that_changes_in_a_long_text_is_found(
    pitch: int, level: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_text, "MINUTE_S", 1)
    at = 2 * np.pi * np.arange(16_000) / 16_000
    minutes = [0.1 * np.sin(300 * at)] * 4 + [level * np.sin(pitch * at)] * 2 + [np.zeros(9)]
    soundfile.write(tmp_path / "x.flac", np.concatenate(minutes), 16_000)
    cosines, fall, change = long_text.figures(tmp_path / "x.flac", bands)
    assert len(cosines.values) == len(change.values) == 5
    assert fall.reached is (pitch == 300)
    assert max(change.values) == pytest.approx(20 * np.log10(level / 0.1), abs=0.1)


def test_a_long_text_has_the_length_that_was_asked_for() -> None:
    text = long_text.book_of(10)
    assert 9_300 <= len(text) < 9_800
    assert len(text.split("\n\n")) > 20
