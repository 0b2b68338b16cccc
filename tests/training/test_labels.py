"""Labels for every 10 ms, shards on disk, and tokenisation of each clip once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decoder.codecs.embedded.modules import CodecConfig, EmbeddedCodec
from tests.fakes import TINY_CODEC
from tests.training.speechlike import HOP, has_teacher, speak
from training.codes import encode, part_files, taken, tokenise
from training.labels import PHONES, letter_labels, phone_labels, word_times
from training.shards import ShardWriter, hours, read_clips
from training.teacher import SAMPLE_RATE, Phone, Teacher, phone_text
from training.voices import NAMED, UNSEEN
from tts.speech.aligner import letter_labels as letters_of

SAID = (
    Phone("hh", 0, 0.05, 0.10),
    Phone("ax0", 0, 0.10, 0.20),
    Phone("l", 2, 0.30, 0.345),
    Phone("ow1", 2, 0.345, 0.40),
)
WORDS = ("ha", "", "lo")


def test_phones_are_labelled_without_their_stress() -> None:
    labels = phone_labels(SAID, 50)
    names = ["", *PHONES]
    assert [names[label] for label in labels[5:20]] == ["hh"] * 5 + ["ax"] * 10
    assert [names[label] for label in labels[30:40]] == ["l"] * 4 + ["ow"] * 6
    assert set(labels[:5]) == set(labels[20:30]) == set(labels[40:]) == {0}


def test_a_words_letters_are_spread_over_its_time() -> None:
    labels = letter_labels(WORDS, SAID, 50).tolist()
    h, a = letters_of("ha")
    el, o = letters_of("lo")
    assert labels[5:20] == [h] * 8 + [a] * 7
    assert labels[30:40] == [el] * 5 + [o] * 5
    assert set(labels[:5] + labels[20:30] + labels[40:]) == {0}
    assert word_times(WORDS, SAID) == [("ha", 0.05, 0.20), ("lo", 0.30, 0.40)]


def test_labels_end_where_the_samples_end() -> None:
    el, o = letters_of("lo")
    assert letter_labels(WORDS, SAID, 35).tolist()[30:] == [el] * 3 + [o] * 2
    assert len(phone_labels(SAID, 35)) == 35


def test_phones_as_text_have_a_stroke_between_words() -> None:
    assert phone_text(SAID) == "hh ax0 / l ow1"


def write(folder: Path, texts: list[str], writer: ShardWriter | None = None) -> ShardWriter:
    writer = writer or ShardWriter(folder, 3, HOP)
    for number, text in enumerate(texts):
        writer.add(speak(text, NAMED[number]), 10 + number, number, f"!{number}~".encode())
    for file in writer._files.values():
        file.flush()
    return writer


def test_shards_give_back_what_was_written(tmp_path: Path) -> None:
    write(tmp_path, ["one two", "three"]).close()
    ((pcm, clips),) = read_clips(tmp_path)
    assert [(clip.line, clip.voice) for clip in clips] == [(10, 0), (11, 1)]
    first = speak("one two", NAMED[0])
    samples = np.fromfile(pcm, np.int16)
    assert np.array_equal(samples[: len(first.samples)], first.samples)
    assert clips[0].length % HOP == clips[1].offset % HOP == 0
    assert clips[1].sounds == "!1~"
    assert hours(tmp_path) == pytest.approx(len(samples) / SAMPLE_RATE / 3600)


@pytest.mark.parametrize("name", ["pcm", "phone", "letter", "tsv"])
def test_a_clip_that_is_half_on_disk_is_left_for_later(tmp_path: Path, name: str) -> None:
    write(tmp_path, ["one two", "three"]).close()
    file = tmp_path / f"003.{name}"
    file.write_bytes(file.read_bytes()[:-3])
    ((_, clips),) = read_clips(tmp_path)
    assert [clip.line for clip in clips] == [10]


@pytest.fixture(scope="module")
def codec() -> EmbeddedCodec:
    torch.manual_seed(1)
    return EmbeddedCodec(TINY_CODEC).eval()


def test_every_clip_is_tokenised_once(tmp_path: Path, codec: EmbeddedCodec) -> None:
    """Part after part, while the shard grows; together they equal the shard tokenised at once."""
    cpu, speech = torch.device("cpu"), tmp_path / "speech"
    speech.mkdir()
    writer = write(speech, ["one two", "three"])
    parts = []
    for number in (1, 2):
        tokenised = tokenise(codec, speech, cpu, taken(part_files(tmp_path / "codes")))
        tokenised.save(tmp_path / f"codes{number}.npz")
        parts.append(tokenised)
        write(speech, ["four five six"], writer)
    assert [part.clips[:, 2].tolist() for part in parts] == [[10, 11], [10]]
    writer.close()
    rest = tokenise(codec, speech, cpu, taken(part_files(tmp_path / "codes")))
    whole = tokenise(codec, speech, cpu, {})
    pieces = [*parts, rest]
    assert sum(len(part.codes) for part in pieces) == len(whole.codes)
    assert np.array_equal(np.concatenate([part.letters for part in pieces]), whole.letters)
    sounds = b"\n".join(part.sounds.tobytes() for part in pieces)
    assert sounds == whole.sounds.tobytes()
    nothing = tokenise(codec, speech, cpu, whole.ends)
    assert (len(nothing.codes), len(nothing.clips)) == (0, 0)


def test_parts_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("codes10.npz", "codes2.npz", "codes1.npz", "codes3.tmp.npz"):
        (tmp_path / name).touch()
    assert [path.name for path in part_files(tmp_path / "codes")] == [
        "codes1.npz",
        "codes2.npz",
        "codes10.npz",
    ]


def test_windows_encode_a_recording_as_a_whole(
    codec: EmbeddedCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In windows with the encoder's full context; only the ends have silence instead."""
    config: CodecConfig = codec.config
    samples = speak("a recording that is longer than one window", NAMED[0]).samples
    samples = samples[: len(samples) // HOP * HOP]
    monkeypatch.setattr("training.codes.WINDOW_CODES", 20)
    cut = encode(codec, samples, torch.device("cpu"))
    with torch.no_grad():
        whole = codec.encode(torch.from_numpy(samples)[None].float() / 32768)[1][0].numpy()
    margin = config.encoder_layers * config.encoder_window + 2
    assert len(cut) == len(whole)
    assert np.mean(cut[margin:-margin] == whole[margin:-margin]) > 0.99


# --- with the teacher

needs_teacher = pytest.mark.skipif(not has_teacher(), reason="libflite1 is not installed")


@needs_teacher
def test_the_teacher_gives_samples_words_and_phones() -> None:
    teacher = Teacher()
    spoken = teacher.speak("Hello world.", NAMED[0])
    assert spoken is not None
    assert spoken.words == ("hello", "world")
    assert phone_text(spoken.phones) == teacher.pronounce("Hello world.")
    assert teacher.pronounce("Hello world.") == "hh ax0 l ow1 / w er1 l d"
    length_s = len(spoken.samples) / SAMPLE_RATE
    times = [time for phone in spoken.phones for time in (phone.start_s, phone.end_s)]
    assert times == sorted(times)
    assert 0.7 * length_s < times[-1] <= length_s


@needs_teacher
def test_moved_formants_keep_the_duration() -> None:
    teacher = Teacher()
    plain, moved = (teacher.speak("Nobody knew.", voice) for voice in (NAMED[0], UNSEEN[6]))
    assert plain is not None
    assert moved is not None
    assert len(moved.samples) == pytest.approx(len(plain.samples), rel=0.1)
    assert [p.name for p in moved.phones] == [p.name for p in plain.phones]


@needs_teacher
def test_exceptions_are_the_lexicons_words() -> None:
    teacher = Teacher()
    assert teacher.is_exception("tissue")
    assert teacher.is_exception("tissue's")
    assert not teacher.is_exception("cloudy")
    assert not teacher.is_exception("clodderish")
