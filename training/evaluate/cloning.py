"""Voices of clips: the service hears a clip of a voice that no training has used and speaks on.

The voices are mixtures of the teacher's style vectors, of a seed that no training has. The teacher
says some lines in each: a clip of two sentences, references, and the lines that the clone says,
too. Clips are clean, or as people record them (`RECORDED`). `people` does the same with recordings,
of which nothing is known but the sound: a clone is compared with the clip itself.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

import tts
from benchmarks.report import Figure, Report, publish
from benchmarks.speech_judges import SpeakerVector, load_speaker
from benchmarks.understood import SEED, Clip, Speaker
from training.evaluate.pitch import median_pitch
from training.evaluate.systems import Teacher, VoicedLine, each, held_out
from training.evaluate.voices import References, Told, right, said_by, tell
from tts.api.voice import LoadedVoice

MIXTURES_SEED = 70_000
LEAST_RIGHT, LEAST_COSINE, LEAST_PITCH = 0.8, 0.75, 0.9
PITCH_SHARE = 0.15  # how far a clone's pitch may be from the clip's
ROOM_DECAY_S, ROOM_SHARE = 0.4, 0.5  # time to a thousandth of the level, level of the echoes
NOISE_DB = 15.0  # below the speech
LOW_RATE = 16_000  # samples per second of a file with nothing above 8 kHz
PHONE_HZ = 8_000  # samples per second of a telephone
PHONE_BAND_HZ = 300.0, 3400.0
MP3_LEVEL = 0.9  # of compression, 0 to 1: about 40 kbit/s


def wav(samples: np.ndarray, rate: int) -> bytes:
    """Return the bytes of a WAV file."""
    return encoded(samples, rate, "WAV")


def encoded(samples: np.ndarray, rate: int, kind: str, level: float | None = None) -> bytes:
    """Return the bytes of a sound file of a kind, as soundfile names it."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, compression_level=level)
    return buffer.getvalue()


def room(samples: np.ndarray, rate: int) -> bytes:
    """Record in a room: echoes that decay."""
    time_s = np.arange(int(ROOM_DECAY_S * rate)) / rate
    echoes = np.random.default_rng(0).normal(size=len(time_s)) * 1e-3 ** (time_s / ROOM_DECAY_S)
    echoes *= ROOM_SHARE / np.sqrt(np.square(echoes).sum())
    echoes[0] = 1.0
    size = len(samples) + len(echoes)
    sound = np.fft.irfft(np.fft.rfft(samples, size) * np.fft.rfft(echoes, size), size)
    return wav(level(sound), rate)


def noise(samples: np.ndarray, rate: int) -> bytes:
    """Record with noise, of which most is below 1 kHz."""
    hiss = np.fft.rfft(np.random.default_rng(0).normal(size=len(samples)))
    hiss /= np.sqrt(np.maximum(np.fft.rfftfreq(len(samples), 1 / rate), 100.0))
    sound = np.fft.irfft(hiss, len(samples))
    sound *= np.sqrt(np.square(samples).mean() / np.square(sound).mean()) * 10 ** (-NOISE_DB / 20)
    return wav(level(samples + sound), rate)


def low_rate(samples: np.ndarray, rate: int) -> bytes:
    """Record as a file of a lower rate."""
    return wav(level(soxr.resample(samples, rate, LOW_RATE)), LOW_RATE)


def phone(samples: np.ndarray, rate: int) -> bytes:
    """Record by telephone: its band, its samples of 8 bits."""
    narrow = soxr.resample(samples, rate, PHONE_HZ)
    spectrum = np.fft.rfft(narrow)
    hz = np.fft.rfftfreq(len(narrow), 1 / PHONE_HZ)
    low, high = PHONE_BAND_HZ
    sound = np.fft.irfft(spectrum * ((hz > low) & (hz < high)), len(narrow))
    buffer = io.BytesIO()
    soundfile.write(buffer, level(sound), PHONE_HZ, format="WAV", subtype="ULAW")
    return buffer.getvalue()


def mp3(samples: np.ndarray, rate: int) -> bytes:
    """Record as a small MP3 file; the service takes no such files, so it is read again."""
    data = encoded(samples, rate, "MP3", MP3_LEVEL)
    return wav(soundfile.read(io.BytesIO(data), dtype="float32")[0], rate)


def level(samples: np.ndarray) -> np.ndarray:
    """Return samples whose peak is .7."""
    return samples * (0.7 / max(1e-6, float(np.abs(samples).max())))


RECORDED: Mapping[str, Callable[[np.ndarray, int], bytes]] = {
    "clean": wav, "room": room, "noise": noise, "16 kHz": low_rate, "phone": phone, "MP3": mp3,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """One line that a clone says: who is heard, and its pitch as a share of the clip's."""

    told: Told
    pitch: float

    @property
    def near(self) -> bool:
        """Whether the pitch is that of the clip."""
        return abs(self.pitch - 1) <= PITCH_SHARE


class Trials:
    """Lines in unseen voices: what the voices are, and what a speaker makes of them."""

    def __init__(self, references: References, clips: Mapping[str, Clip]) -> None:
        self._references = references
        self._pitch = {voice: median_pitch(clip) for voice, clip in clips.items()}

    def judge(self, clips: Iterator[Clip], lines: Sequence[VoicedLine]) -> list[Trial]:
        """Judge the clips of lines."""
        return [
            Trial(self._references.tell(clip, voice), median_pitch(clip) / self._pitch[voice])
            for clip, (_, voice) in zip(clips, lines, strict=True)
        ]


def cloned(voice: LoadedVoice, clips: Mapping[str, bytes]) -> Speaker:
    """Return a speaker whose voices are those of clips."""
    clones = {name: voice.clone(clip) for name, clip in clips.items()}

    def speak(text: str, name: str) -> Clip:
        speech = clones[name].say(text, seed=SEED)
        return Clip(speech.samples, speech.sample_rate)

    return speak


def figures(name: str, found: Sequence[Trial], *, barred: bool) -> Iterator[Figure]:
    """Iterate over the figures of one kind of clip."""
    note = f"{len(found)} lines"
    told = [one.told for one in found]
    values = right(told), tuple(one.cosine for one in told), np.mean([one.near for one in found])
    bars = (LEAST_RIGHT, LEAST_COSINE, LEAST_PITCH) if barred else (None,) * 3
    yield Figure(f"{name}, own voice is nearest", (values[0],), "of lines", bars[0], True, note)
    yield Figure(f"{name}, cosine to the voice", values[1], "", bars[1], True)
    yield Figure(f"{name}, pitch within 15 %", (float(values[2]),), "of lines", bars[2], True)


def of_people(
    vector: SpeakerVector, voice: LoadedVoice, clips: Mapping[str, Clip], texts: Sequence[str]
) -> Iterator[Figure]:
    """Iterate over the figures of recordings of people."""
    references = References(vector, {name: [clip] for name, clip in clips.items()})
    speak = cloned(voice, {name: wav(c.samples, c.sample_rate) for name, c in clips.items()})
    lines = [(text, name) for name in clips for text in texts]
    told = tell(references, speak, lines)
    note = f"{len(lines)} lines, {len(clips)} recordings"
    yield Figure("own voice is nearest", (right(told),), "of lines", note=note)
    for name, clip in clips.items():
        middle = len(clip.samples) // 2
        parts = [Clip(part, clip.sample_rate) for part in np.split(clip.samples, [middle])]
        one, other = map(references.vector, parts)
        seconds = len(clip.samples) / clip.sample_rate
        note = f"{seconds:.1f} s, whose halves have {one @ other:.3f}"
        cosines = tuple(one.cosine for one in told if one.voice == name)
        yield Figure(f"{name}, cosine to the clip", cosines, "", note=note)


def read(path: Path) -> Clip:
    """Read a sound file as one channel."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    return Clip(samples.mean(1), rate)


def run_people(args: argparse.Namespace) -> int:
    """Judge clones of recordings, and print the report."""
    clips = {path.stem: read(path) for path in args.recordings}
    with tts.load(args.model) as voice:
        figures = of_people(load_speaker(), voice, clips, held_out(args.lines))
        return publish(Report("people", tuple(figures)))


def compare(
    teacher: Teacher, voice: LoadedVoice, vector: SpeakerVector, texts: Sequence[str], count: int
) -> Report:
    """Judge clones of the teacher's mixtures: the first two texts are those of the clips, `count`
    are of the references, the others are said."""
    names = tuple(teacher.mixtures)
    clips = {name: teacher.speak(" ".join(texts[:2]), name) for name in names}
    own = said_by(teacher.speak, texts[2 : 2 + count], names)
    references = References(vector, own)
    lines = [(text, name) for name in names for text in texts[2 + count :]]
    trials, rows = Trials(references, clips), []
    for kind, record in RECORDED.items():
        heard = {name: record(clip.samples, clip.sample_rate) for name, clip in clips.items()}
        found = trials.judge(each(cloned(voice, heard), lines), lines)
        rows += figures(kind, found, barred=kind == "clean")
    theirs = trials.judge((teacher.speak(*line) for line in lines), lines)
    rows += figures("teacher", theirs, barred=False)
    rows.append(
        Figure("cosines of the voices to each other", tuple(references.others().tolist()), "")
    )
    return Report("cloning", tuple(rows))


def run(args: argparse.Namespace) -> int:
    """Draw voices, judge clones of every kind of clip, and print the report."""
    teacher, rng = Teacher.open(args.teacher, args.package, args.device), random.Random(args.seed)
    teacher.mixtures = {f"mixture{n}": teacher.studio.book.mixture(rng) for n in range(args.voices)}
    print("\n".join(f"{name}: {own}" for name, own in teacher.mixtures.items()), file=sys.stderr)
    texts = held_out(2 + args.references + args.lines)
    with tts.load(args.model) as voice:
        return publish(compare(teacher, voice, load_speaker(), texts, args.references))
