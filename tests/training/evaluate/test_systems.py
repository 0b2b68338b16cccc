"""The two systems that are compared: a teacher of random weights, and the built-in voice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import skipped
from benchmarks.speech_judges import RATE
from benchmarks.understood import SEED, Clip
from tests.training.speech_lm.tokens import KNOWN
from training.evaluate import cloning, codes, prosody, spanish, voices
from training.evaluate.cloning import cloned, of_people, read, wav
from training.evaluate.melody import DecoderPitch, planned_pitch
from training.evaluate.phonemes import asked_of_teacher, asked_of_us, of_letters, pronounced
from training.evaluate.pitch import pitch_of
from training.evaluate.reading import CodeClient, PhoneReader, load_with_codes
from training.evaluate.skipped import hearing
from training.evaluate.systems import THEIRS, Teacher, each, looked_up, speaker_of
from training.evaluate.timings import coded, neighbour, of_codes, spoken, words_of
from training.kokoro.network import FRAME, SAMPLE_RATE, STYLE, Kokoro
from training.kokoro.phonemes import write_table
from training.kokoro.studio import Studio
from training.kokoro.style import StyleBook, Voice
from training.speech_codec.coder import CODER_FILE, Reader, load_coder
from training.speech_codec.config import DESIGNS, coder_sizes
from training.speech_lm.names import NAMES
from training.speech_lm.vocabulary import Symbols
from training.speech_lm.writer import Writer, prompt_of, tokens_of
from tts.api.voice import LoadedVoice
from tts.cli.local import LocalClient
from tts.cli.options import ModelChoice
from tts.config.defaults import embedded_folder
from tts.speech.aligner import FOLDER, Aligner

LM = "model.safetensors"
SPELLING = {"bad cab": "bˈad fab.", "a long clip": "bˈad fab " * 5}


def spell(text: str) -> str:
    """Return phonemes of a text; those of one word for most."""
    return SPELLING.get(text, "bˈad")


@pytest.fixture(scope="module")
def teacher(kokoro: Kokoro) -> Teacher:
    device, rng = torch.device("cpu"), np.random.default_rng(0)
    lent = ("ef_dora", "ff_siwis", "em_alex", "im_nicola")
    rows = {name: rng.normal(0, 0.3, (20, STYLE)).astype(np.float16) for name in (*NAMES, *lent)}
    studio = Studio(kokoro, StyleBook(rows, device), device)
    return Teacher(studio, KNOWN, dict.fromkeys("abe", spell))


@pytest.fixture(scope="module")
def ours() -> Iterator[tuple[LoadedVoice, CodeClient]]:
    voice, codes = load_with_codes("")
    with voice:
        yield voice, codes


class LengthListener:
    """Recognises a word in a clip, for each second that has begun."""

    def words(self, clip: np.ndarray) -> str:
        return " ".join(["bad"] * -(-len(clip) // RATE))


def test_the_teacher_is_heard_once_for_each_text_and_voice(teacher: Teacher) -> None:
    asked: list[str] = []

    def speak(text: str, voice: str) -> Clip:
        asked.append(voice)
        return teacher.speak(text, voice)

    hear = hearing(speak, LengthListener())
    texts = [
        skipped.Text("names", "Bad cab.", voice, n)
        for n, voice in enumerate(["edith"] * 2 + ["hazel"])
    ]
    assert len(teacher.speak("bad cab", "edith").samples) < SAMPLE_RATE
    assert [hear(text) for text in texts] == ["bad"] * 3
    assert asked == ["edith", "hazel"]


class SpellingJudges(LengthListener):
    """Finds clips of more than a second natural."""

    def naturalness(self, clip: np.ndarray) -> float:
        return 4.0 if len(clip) > RATE else 2.0


def test_spanish_sentences_are_judged_by_codes_and_by_letters(
    teacher: Teacher, tmp_path: Path
) -> None:
    sizes = coder_sizes(DESIGNS["source_ahead"])
    coder, reader = load_coder(CODER_FILE, sizes), PhoneReader(Reader(sizes), KNOWN)
    say = spanish.kept(spanish.of_teacher(teacher, coder), tmp_path)
    sentences = ["bad cab", "bad"]
    found = list(spanish.judge(say, SpellingJudges(), reader, teacher, sentences))
    assert [(one.voice, one.text) for one in found] == [
        ("lucia", "bad cab"), ("lucia", "bad"), ("diego", "bad cab"), ("diego", "bad"),
    ]  # fmt: skip
    assert [one.letters.wrong for one in found] == [3, 0, 3, 0]  # "bad" is what is heard
    assert all(0 < one.errors.wrong <= one.errors.words for one in found)  # by random weights
    assert str(found[0]).endswith(f" {found[0].errors.wrong}/6  bad cab | bad")
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{voice}_{n:02d}.wav" for voice in ("lucia", "diego") for n in range(2)
    }
    rows = list(spanish.figures(found, "", barred=True))
    assert [row.bar for row in rows] == [3.8, 0.97, None] * 3
    assert rows[-1].values == (6 / 18,)
    assert spanish.letters_of("¡Ñandú, así!") == "nanduasi"


def test_the_teacher_says_what_it_plans(teacher: Teacher) -> None:
    take = teacher.take(SPELLING["bad cab"], "edith")
    assert len(take.clip.samples) == FRAME * take.durations.sum()
    seconds = teacher.seconds([("bad cab", "edith"), ("bad", "hazel")])
    assert seconds[0] == len(take.clip.samples) / SAMPLE_RATE
    assert seconds[1] < seconds[0]
    teacher.mixtures["mix"] = Voice((("af_sky", 0.5), ("af_nova", 0.5)), (("bf_emma", 1.0),))
    assert teacher.speak("bad", "mix").sample_rate == SAMPLE_RATE
    words = words_of(teacher, "bad cab", SPELLING["bad cab"], take.durations)
    assert [word.text for word in words] == ["bad", "cab"]
    assert words[0].end_s <= words[1].start_s < words[1].end_s < seconds[0]


def test_our_voice_speaks_lines_at_once_as_alone(ours: tuple[LoadedVoice, CodeClient]) -> None:
    voice, codes = ours
    codes.take()
    alone = voice.say("Good morning.", voice="hugh", seed=SEED)
    said = codes.take()
    assert len(said) * 960 == len(alone.samples)
    assert codes.take() == ()
    first, _ = each(speaker_of(voice), [("Good morning.", "hugh"), ("Yes.", "hazel")])
    assert first.sample_rate == alone.sample_rate
    assert np.array_equal(first.samples, alone.samples)


def test_the_pitch_that_drives_our_voice_is_that_of_its_sound(
    ours: tuple[LoadedVoice, CodeClient],
) -> None:
    voice, codes = ours
    codes.take()
    for name in ("hazel", "hugh"):
        heard = pitch_of(speaker_of(voice)("Good morning to all of you.", name))
        driven = DecoderPitch.load("").of(codes.take(), codes.prompt)
        heard = heard[1:]  # a window's middle is at 30 ms, the first value that drives at 40 ms
        size = min(len(heard), len(driven))
        ratio = heard[:size] / driven[:size]
        assert np.mean(ratio > 0) > 0.3
        assert np.nanmedian(np.abs(ratio - 1)) < 0.02


def test_the_teachers_pitch_is_planned_line_by_line(teacher: Teacher) -> None:
    lines = [("bad cab", "edith"), ("bad", "hazel")]
    found = planned_pitch(teacher, lines)
    assert [len(pitch) for pitch in found] == (teacher.seconds(lines) * 80).round().tolist()


def test_words_of_our_voice_have_times(ours: tuple[LoadedVoice, CodeClient]) -> None:
    clip, words = spoken(ours[0], "Good morning.", "hazel")
    assert [word.text for word in words] == ["Good", "morning."]
    assert 0 <= words[0].start_s < words[1].end_s <= len(clip.samples) / clip.sample_rate


def test_a_clone_speaks_in_the_voice_of_its_clip(ours: tuple[LoadedVoice, CodeClient]) -> None:
    voice = ours[0]
    clips = {name: voice.say("This is I.", voice=name, seed=2) for name in ("hazel", "hugh")}
    speak = cloned(voice, {name: wav(c.samples, c.sample_rate) for name, c in clips.items()})
    one, other = each(speak, [("Yes.", name) for name in clips])
    assert len(one.samples) > 0
    assert not np.array_equal(one.samples, other.samples)


def test_recordings_are_compared_with_their_clones(
    ours: tuple[LoadedVoice, CodeClient], tmp_path: Path
) -> None:
    voice = ours[0]
    path = voice.say("This is I.", voice="hugh", seed=2).save(tmp_path / "one.wav")
    clips = {path.stem: read(path)}
    nearest, cosine = of_people(lambda _: np.array([3.0, 4.0]), voice, clips, ["Yes."])
    assert nearest.value == 1
    assert cosine.name == "one, cosine to the clip"
    assert cosine.value == pytest.approx(1)


def test_made_up_words_are_asked_for_in_ipa(ours: tuple[LoadedVoice, CodeClient]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reader = PhoneReader(Reader(coder_sizes(DESIGNS["source_free"])), KNOWN)
    found = list(asked_of_us(*ours, reader, [("blˈɪk", "hazel"), ("snˈOf", "edith")]))
    assert [one.word for one in found] == ["blˈɪk", "snˈOf"]
    assert [one.errors.words for one in found] == [4, 4]


def test_phonemes_of_a_text_are_those_of_the_command_line() -> None:
    client = LocalClient.load(ModelChoice())
    (words,) = asyncio.run(pronounced(client, ["A cat sat on a mat."]))
    assert words == ["ɐ", "kˈæt", "sˈæt", "ˌɔn", "ɐ", "mˈæt"]
    assert of_letters([""], [words], [words]).reached


def test_reports_compare_both_systems(
    teacher: Teacher, ours: tuple[LoadedVoice, CodeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloning, "RECORDED", {"clean": cloning.wav, "MP3": cloning.mp3})
    voice, vector = ours[0], lambda clip: np.array([clip.std(), 1.0])
    lines = [("Yes.", "hazel"), ("No.", "hugh")]
    report = voices.compare(teacher, voice, vector, lines, ["bad"])
    assert report.figures[0].note == "2 lines"
    report = prosody.compare(teacher, ours, DecoderPitch.load(""), lines[:1], lines)
    found = {figure.name: figure.values for figure in report.figures}
    assert len(found["durations, of the teacher's"]) == 2
    assert min(found["durations, of the teacher's"]) > 0
    teacher.mixtures = {"one": Voice.named("af_sky"), "two": Voice.named("bm_lewis")}
    report = cloning.compare(teacher, voice, vector, ["a long", "clip", "bad", "Yes."], 1)
    kinds = [figure.name.split(",")[0] for figure in report.figures[:-1]]
    assert kinds == [kind for kind in ("clean", "MP3", "teacher") for _ in range(3)]
    assert len(report.figures[-1].values) == 1  # pair of voices
    assert json.loads(report.to_json())["benchmark"] == "cloning"


def test_made_up_words_of_the_teacher_are_read_from_its_plans(teacher: Teacher) -> None:
    sizes = coder_sizes(DESIGNS["source_free"])
    reader = PhoneReader(Reader(sizes), KNOWN)
    words = [("bˈad", "hazel"), ("fˈab", "edith")]
    found = list(asked_of_teacher(teacher, load_coder(CODER_FILE, sizes), reader, words))
    assert [(one.word, one.voice) for one in found] == words


def test_words_and_questions_of_a_language_model_are_read_from_its_codes(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.speech_lm.writer.MAX_CODES", 30)  # no need to come to an end
    sizes, writer = coder_sizes(DESIGNS["source_free"]), Writer(embedded_folder() / LM)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reader = PhoneReader(Reader(sizes), KNOWN)
    words = [("blˈɪk", "hazel"), ("fˈab", "edith")]
    found = codes.asked_of_model(writer.codes, writer.voices, Symbols(KNOWN), reader, words, 0)
    assert [(one.word, one.voice) for one in found] == words
    assert [one.errors.words for one in found] == [4, 3]
    lines = [("bad cab", "edith"), ("bad", "hazel")]
    asked = [prompt_of(writer.voices["bf_emma"], tokens_of(text)) for text, _ in lines]
    said = [writer.codes(asked, seed) for seed in (0, 1)]
    coder = load_coder(CODER_FILE, sizes)
    figures = list(codes.of_questions(teacher, coder, reader, lines, said))
    assert [figure.bar for figure in figures[:4]] == [0.8, None, None, None]
    assert len(figures[4].values) == 4


def test_phonemes_may_be_those_of_a_table(tmp_path: Path) -> None:
    write_table(["bˈad\tBad.", "fˈab\tCab?"], tmp_path / "a.tsv.xz")
    spell = looked_up(tmp_path / "a.tsv.xz")
    assert spell("Cab?") == "fˈab"
    with pytest.raises(KeyError):
        spell("Fab.")


def test_words_of_the_teachers_codes_are_aligned(teacher: Teacher) -> None:
    coder = load_coder(CODER_FILE, coder_sizes(DESIGNS["source_free"]))
    lines = [("bad cab", "edith"), ("bad", "hazel")]
    (line,) = list(coded(teacher, coder, lines))[:1]
    assert [word.text for word in line.words] == ["bad", "cab"]
    assert len(line.codes) == pytest.approx(25 * teacher.seconds(lines[:1])[0], abs=1)
    figures = list(of_codes(Aligner.load(embedded_folder() / FOLDER), iter([line])))
    assert [figure.bar for figure in figures] == [20, 60, None]
    assert len(figures[0].values) == 4


def test_a_neighbour_has_the_same_accent_and_sex() -> None:
    for voice, theirs in THEIRS.items():
        other = neighbour(voice, tuple(THEIRS))
        assert other != voice
        assert THEIRS[other][:2] == theirs[:2]
