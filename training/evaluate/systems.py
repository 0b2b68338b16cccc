"""The two systems that are compared: the teacher, and our voice in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.report import lines_of
from benchmarks.understood import HELD_OUT, SEED, Clip, Speaker
from training.kokoro.network import SAMPLE_RATE
from training.kokoro.packages import symbols
from training.kokoro.phonemes import ACCENTS, Speller, accents_in, ids_of, read_table, table
from training.kokoro.studio import Session, Studio
from training.kokoro.style import SPANISH, Voice
from training.speech_codec.clips import TEXTS, Line, say
from training.speech_codec.coder import Coder
from training.speech_codec.tokenise import codes_of_lines
from training.speech_lm.names import NAMES
from tts.api.voice import LoadedVoice

AT_ONCE = 8  # lines that our voice speaks in one batch
THEIRS = {ours: theirs for theirs, ours in NAMES.items() if theirs not in SPANISH}
"""The teacher's names of the voices that our English ones learned from, by our names."""
SPANISH_VOICES = {NAMES[name]: voice for name, voice in SPANISH.items()}
"""The mixtures that our Spanish ones learn from, by our names."""
VoicedLine = tuple[str, str]
"""A text and our name of the voice that speaks it."""


class Take(NamedTuple):
    """The sound of what the teacher says, and the frames of each symbol's duration."""

    clip: Clip
    durations: np.ndarray


class Teacher:
    """The teacher's voices by our names, and mixtures of them."""

    def __init__(self, studio: Studio, known: dict[str, int], spell: dict[str, Callable]) -> None:
        """`spell`: for each accent the function from text to phonemes."""
        self.studio, self.known, self._spell = studio, known, spell
        self.mixtures: dict[str, Voice] = {}

    @classmethod
    def open(
        cls, folder: Path, package: Path, device: str = "cpu", spelled: Path | None = None
    ) -> Teacher:
        """Load a prepared teacher (`training.lent.prepare`). `spelled`: tables of phonemes
        (`training.kokoro.phonemes`) of all texts, in place of the phonemisers."""
        studio = Studio.open(folder, torch.device(device))
        spell: dict[str, Callable] = {
            accent: looked_up(table(spelled, accent)) if spelled else Speller(accent)
            for accent in (accents_in(spelled) if spelled else ACCENTS)
        }
        return cls(studio, symbols(package), spell)

    def voice(self, name: str) -> Voice:
        """Return a mixture, or the voice that one of ours learned from."""
        mixture = self.mixtures.get(name) or SPANISH_VOICES.get(name)
        return mixture or Voice.named(THEIRS[name])

    def phonemes(self, text: str, voice: str) -> str:
        """Return the symbols of a text in a voice's accent."""
        spelled = self._spell[self.voice(voice).accent](text)
        return "".join(symbol for symbol in spelled if symbol in self.known)

    def speak(self, text: str, voice: str) -> Clip:
        """Say a text; a `Speaker`."""
        return self.take(self.phonemes(text, voice), voice).clip

    def take(self, phonemes: str, voice: str) -> Take:
        """Say phonemes."""
        own, ids = self.voice(voice), tuple(ids_of(phonemes, self.known))
        samples, _ = say(self.studio, Line("", voice, own.timbre, own.prosody, "", ids))
        clip = Clip(samples.astype(np.float32) / 32768.0, SAMPLE_RATE)
        return Take(clip, self.plan([(phonemes, voice)])["durations"])

    def codes(self, coder: Coder, phonemes: str, voice: str) -> tuple[int, ...]:
        """Return the codes of its plan of phonemes."""
        return self.codes_of_lines(coder, [(phonemes, voice)])[0]

    def codes_of_lines(self, coder: Coder, lines: Sequence[VoicedLine]) -> list[tuple[int, ...]]:
        """Return the codes of its plans of lines, whose texts are phonemes."""
        plan = self.plan(lines)
        held = {part: torch.from_numpy(plan[part]) for part in ("phones", "pitch", "energy")}
        codes, at = codes_of_lines(coder, held, torch.from_numpy(plan["start"]))
        return [tuple(part.tolist()) for part in torch.tensor_split(codes, at[1:].tolist())]

    def plan(self, lines: Sequence[VoicedLine]) -> dict[str, np.ndarray]:
        """Return the plan of lines, whose texts are phonemes, without any sound."""
        sessions = [
            Session(self.voice(voice), (tuple(ids_of(phonemes, self.known)),), (0,))
            for phonemes, voice in lines
        ]
        return self.studio.plan(sessions)

    def seconds(self, lines: Sequence[VoicedLine]) -> np.ndarray:
        """Return the durations that it plans for texts in voices, float64 [N]."""
        plan = self.plan([(self.phonemes(*line), line[1]) for line in lines])
        return (plan["end"] - plan["start"]) / SAMPLE_RATE


def looked_up(path: Path) -> Callable[[str], str]:
    """Return a function from the texts of a table to their phonemes; KeyError for others."""
    pairs = [row.split("\t") for row in read_table(path)]
    return {text: phonemes for phonemes, text in pairs}.__getitem__


def speaker_of(voice: LoadedVoice) -> Speaker:
    """Return a speaker for our voice, always with the same seed."""

    def speak(text: str, name: str) -> Clip:
        speech = voice.say(text, voice=name, seed=SEED)
        return Clip(speech.samples, speech.sample_rate)

    return speak


def each(speak: Speaker, lines: Sequence[VoicedLine]) -> Iterator[Clip]:
    """Iterate over the clips of lines; some lines are spoken at once."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(lambda line: speak(*line), lines)


def held_out(count: int | None = None) -> list[str]:
    """Return sentences that are kept out of the corpus, at most so many."""
    return [text for path in (HELD_OUT, TEXTS) for text in lines_of(path)][:count]


def in_turn(texts: Sequence[str], voices: Sequence[str], count: int) -> list[VoicedLine]:
    """Return `count` lines, each in the next voice; texts begin again after the last one, with
    another voice."""
    rounds = -(-count // len(texts))
    shifted = [text for n in range(rounds) for text in texts]
    names = [voices[(i + i // len(texts)) % len(voices)] for i in range(len(shifted))]
    return list(zip(shifted, names, strict=True))[:count]
