"""Synthetic speech with known phones and times, for machines without the teacher."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from training.labels import PHONES
from training.shards import ShardWriter
from training.teacher import SAMPLE_RATE, Phone, Teacher, Utterance
from training.voices import TURNS, VOICES, Voice, voice_of

PHONE_S, PAUSE_S = 0.07, 0.05
HOP = 640


def has_teacher() -> bool:
    """Whether flite's libraries are installed."""
    try:
        Teacher()
    except OSError:
        return False
    return True


def speak(text: str, voice: Voice) -> Utterance:
    """Return a buzz of the voice's pitch for every letter, with its own formant; pauses between."""
    pieces, phones, at = [np.zeros(round(PAUSE_S * SAMPLE_RATE))], [], PAUSE_S
    words = ["".join(filter(str.isalpha, word)).lower() for word in text.split()]
    for index, word in enumerate(words):
        for letter in word:
            name = PHONES[zlib.crc32(letter.encode()) % len(PHONES)]
            phones.append(Phone(name, index, at, at + PHONE_S))
            pieces.append(_buzz(voice.pitch_hz, 300 + 90 * (ord(letter) - ord("a"))))
            at += PHONE_S
        pieces.append(np.zeros(round(PAUSE_S * SAMPLE_RATE)))
        at += PAUSE_S
    samples = np.concatenate(pieces) * 9000
    return Utterance(samples.astype(np.int16), tuple(words), tuple(phones))


def _buzz(pitch_hz: float, formant_hz: float) -> np.ndarray:
    t = np.arange(round(PHONE_S * SAMPLE_RATE)) / SAMPLE_RATE
    partials = np.arange(1, int(4000 / pitch_hz)) * pitch_hz
    loudness = np.exp(-(((partials - formant_hz) / 200) ** 2)) + 0.02
    return (loudness[:, None] * np.sin(2 * np.pi * partials[:, None] * t)).sum(0) / 4


def write_speech(folder: Path, lines: list[str]) -> None:
    """Write the output of `training.synthesize` in one shard."""
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, 0, HOP)
    for number, line in enumerate(lines):
        voice = voice_of(number, number, 0) if number < len(TURNS) else len(VOICES) - 1
        writer.add(speak(line, VOICES[voice]), number, voice)
    writer.close()
    (folder / "000.done").touch()
