"""The teacher: flite's statistical-parametric voices (Debian packages libflite1), through ctypes.

Besides samples it returns every phone with its exact times. Voices derived from the teacher's (see
`training.voices`) are supported too. Sources: flite's public headers.
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torchaudio.functional import resample

from training.voices import TEACHERS, Voice

SAMPLE_RATE = 16_000
SILENCE_LEVEL = 250  # int16; below it is lead or tail
LEAD, TAIL = 800, 1600  # samples kept around the speech
LEVEL = 0.12 * 32768  # every line's RMS between its first and its last loud sample


class _Wave(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    )


class _Voice(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("features", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class Phone:
    """One phone with stress, the word it belongs to, and its times in seconds."""

    name: str
    word_index: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Utterance:
    """One synthesised line: trimmed int16 samples at 16 kHz, its words as spoken, its phones."""

    samples: np.ndarray
    words: tuple[str, ...]
    phones: tuple[Phone, ...]


def _library(folder: str, name: str) -> ctypes.CDLL:
    path = os.path.join(folder, f"{name}.so.1") if folder else f"{name}.so.1"
    return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


class Teacher:
    """flite with the three voices; not thread-safe, one per process."""

    def __init__(self, folder: str = "") -> None:
        for path in glob.glob(os.path.join(folder, "libasound.so.2*")) if folder else ():
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self._flite = flite = _library(folder, "libflite")
        _library(folder, "libflite_usenglish")
        find_lexicon = _library(folder, "libflite_cmulex").cmu_lex_init
        find_lexicon.restype = ctypes.c_void_p
        flite.flite_init()
        pointer, string = ctypes.c_void_p, ctypes.c_char_p
        signatures = {
            "flite_synth_text": (pointer, [string, pointer]),
            "new_utterance": (pointer, []),
            "utt_set_input_text": (None, [pointer, string]),
            "flite_do_synth": (pointer, [pointer, pointer, pointer]),
            "utt_wave": (ctypes.POINTER(_Wave), [pointer]),
            "delete_utterance": (None, [pointer]),
            "in_lex": (ctypes.c_int, [pointer, string, string, pointer]),
            "utt_relation": (pointer, [pointer, string]),
            "relation_head": (pointer, [pointer]),
            "item_next": (pointer, [pointer]),
            "item_daughter": (pointer, [pointer]),
            "item_as": (pointer, [pointer, string]),
            "item_feat_float": (ctypes.c_float, [pointer, string]),
            "ffeature_float": (ctypes.c_float, [pointer, string]),
            "ffeature_string": (string, [pointer, string]),
            "feat_set_float": (None, [pointer, string, ctypes.c_float]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(flite, name)
            function.restype, function.argtypes = result, arguments
        self._front_end = ctypes.cast(flite.utt_synth_text2segs, pointer)
        self._voices = [self._register(folder, name) for name in TEACHERS]
        self._lexicon = find_lexicon()

    @staticmethod
    def _register(folder: str, name: str) -> int:
        register = getattr(_library(folder, f"libflite_cmu_us_{name}"), f"register_cmu_us_{name}")
        register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        return register(None)

    def speak(self, text: str, voice: Voice) -> Utterance | None:
        """Synthesize ASCII text; None when there is no audible output."""
        flite, teacher = self._flite, self._voices[voice.teacher]
        features = ctypes.cast(teacher, ctypes.POINTER(_Voice)).contents.features
        flite.feat_set_float(features, b"duration_stretch", float(voice.formants))
        flite.feat_set_float(features, b"f0_shift", voice.pitch / float(voice.formants))
        utterance = flite.flite_synth_text(text.encode("ascii", "ignore"), teacher)
        if not utterance:
            return None
        try:
            wave = flite.utt_wave(utterance).contents
            samples = np.ctypeslib.as_array(wave.samples, (wave.num_samples,)).copy()
            words = self._words(utterance)
            phones = self._phones(words)
            names = tuple(flite.ffeature_string(word, b"name").decode() for word in words)
        finally:
            flite.delete_utterance(utterance)
        samples, phones = _play_faster(samples, phones, voice)
        return _trim(samples, names, phones)

    def pronounce(self, text: str) -> str:
        """Return phones of a text in the format of `phone_text`, from lexicon and rules alone,
        without audio.
        """
        flite = self._flite
        utterance = flite.new_utterance()
        flite.utt_set_input_text(utterance, text.encode("ascii", "ignore"))
        utterance = flite.flite_do_synth(utterance, self._voices[0], self._front_end)
        if not utterance:
            return ""
        try:
            words = self._words(utterance)
            spoken = [" ".join(self._name(s, y) for y, s in self._segments(w)) for w in words]
            return " / ".join(filter(None, spoken))
        finally:
            flite.delete_utterance(utterance)

    def is_exception(self, word: str) -> bool:
        """Whether the phones of a lower-case word, or of the word it is the possessive of, are from
        the lexicon.

        The lexicon has the exceptions from the letter-to-sound rules.
        """
        letters = word.removesuffix("'s").encode("ascii", "ignore")
        return bool(self._flite.in_lex(self._lexicon, letters, None, None))

    def _words(self, utterance: int) -> list[int]:
        flite = self._flite
        return list(self._items(flite.relation_head(flite.utt_relation(utterance, b"Word"))))

    def _segments(self, word: int) -> Iterator[tuple[int, int]]:
        """Iterate over every syllable and segment of a word."""
        for syllable in self._daughters(self._flite.item_as(word, b"SylStructure")):
            for segment in self._daughters(syllable):
                yield syllable, segment

    def _name(self, segment: int, syllable: int) -> str:
        name = self._flite.ffeature_string(segment, b"name").decode()
        stress = self._flite.ffeature_string(syllable, b"stress").decode()
        return name + stress * (name[0] in "aeiou")

    def _phones(self, words: list[int]) -> list[Phone]:
        flite = self._flite
        return [
            Phone(
                self._name(segment, syllable),
                index,
                flite.ffeature_float(segment, b"R:Segment.p.end"),
                flite.item_feat_float(segment, b"end"),
            )
            for index, word in enumerate(words)
            for syllable, segment in self._segments(word)
        ]

    def _daughters(self, item: int) -> Iterator[int]:
        return self._items(self._flite.item_daughter(item))

    def _items(self, item: int | None) -> Iterator[int]:
        while item:
            yield item
            item = self._flite.item_next(item)


def _play_faster(
    samples: np.ndarray, phones: list[Phone], voice: Voice
) -> tuple[np.ndarray, list[Phone]]:
    """Move the formants: play samples `formants` times as fast."""
    ratio = voice.formants
    if ratio == 1:
        return samples, phones
    wave = torch.from_numpy(samples.astype(np.float32))
    faster = resample(wave, ratio.numerator, ratio.denominator).numpy()
    speed = float(ratio)
    moved = [Phone(p.name, p.word_index, p.start_s / speed, p.end_s / speed) for p in phones]
    return faster, moved


def _trim(samples: np.ndarray, words: tuple[str, ...], phones: list[Phone]) -> Utterance | None:
    loud = np.flatnonzero(np.abs(samples) > SILENCE_LEVEL)
    if len(loud) == 0:
        return None
    start = max(0, int(loud[0]) - LEAD)
    cut = samples[start : int(loud[-1]) + TAIL].astype(np.float32)
    speech = cut[int(loud[0]) - start : int(loud[-1]) + 1 - start]
    cut *= LEVEL / float(np.sqrt(np.mean(speech**2)))
    shift = start / SAMPLE_RATE
    moved = tuple(
        Phone(p.name, p.word_index, max(0.0, p.start_s - shift), max(0.0, p.end_s - shift))
        for p in phones
    )
    return Utterance(np.clip(cut, -32767, 32767).astype(np.int16), words, moved)


def phone_text(phones: tuple[Phone, ...]) -> str:
    """Format phones as text: spaces between phones, slashes between words ("hh ax l ow1 / w er1 l
    d").
    """
    words: dict[int, list[str]] = {}
    for phone in phones:
        words.setdefault(phone.word_index, []).append(phone.name)
    return " / ".join(" ".join(names) for names in words.values())
