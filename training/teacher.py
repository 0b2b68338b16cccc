"""The teacher: flite's statistical-parametric voices (Debian packages libflite1), through ctypes.

Besides samples it gives what only a synthesiser knows: every phone with its true end time.
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

VOICES = ("slt", "rms", "awb")
GAINS = (0.8, 1.2, 1.0)  # brings the three to one loudness
SAMPLE_RATE = 16_000
SILENCE_LEVEL = 250  # int16; below it is lead or tail
LEAD, TAIL = 800, 1600  # samples kept around the speech


class _Wave(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    )


@dataclass(frozen=True, slots=True)
class Phone:
    """One phone with stress, the word it belongs to, and its end in seconds."""

    name: str
    word_index: int
    end_s: float


@dataclass(frozen=True, slots=True)
class Utterance:
    """One synthesised line: trimmed int16 samples at 16 kHz, and its phones."""

    samples: np.ndarray
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
        for name in ("libflite_usenglish", "libflite_cmulex"):
            _library(folder, name)
        flite.flite_init()
        pointer, string = ctypes.c_void_p, ctypes.c_char_p
        signatures = {
            "flite_synth_text": (pointer, [string, pointer]),
            "utt_wave": (ctypes.POINTER(_Wave), [pointer]),
            "delete_utterance": (None, [pointer]),
            "utt_relation": (pointer, [pointer, string]),
            "relation_head": (pointer, [pointer]),
            "item_next": (pointer, [pointer]),
            "item_daughter": (pointer, [pointer]),
            "item_as": (pointer, [pointer, string]),
            "item_feat_float": (ctypes.c_float, [pointer, string]),
            "ffeature_string": (string, [pointer, string]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(flite, name)
            function.restype, function.argtypes = result, arguments
        self._voices = [self._register(folder, name) for name in VOICES]

    @staticmethod
    def _register(folder: str, name: str) -> int:
        register = getattr(_library(folder, f"libflite_cmu_us_{name}"), f"register_cmu_us_{name}")
        register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        return register(None)

    def speak(self, text: str, voice: int) -> Utterance | None:
        """Synthesise ASCII text; None when nothing audible came out."""
        flite = self._flite
        utterance = flite.flite_synth_text(text.encode("ascii", "ignore"), self._voices[voice])
        if not utterance:
            return None
        try:
            wave = flite.utt_wave(utterance).contents
            samples = np.ctypeslib.as_array(wave.samples, (wave.num_samples,)).copy()
            phones = self._phones(utterance)
        finally:
            flite.delete_utterance(utterance)
        return _trim(samples, phones, GAINS[voice])

    def _phones(self, utterance: int) -> list[Phone]:
        flite, phones = self._flite, []
        words = self._items(flite.relation_head(flite.utt_relation(utterance, b"Word")))
        for index, word in enumerate(words):
            for syllable in self._daughters(flite.item_as(word, b"SylStructure")):
                stress = flite.ffeature_string(syllable, b"stress").decode()
                for segment in self._daughters(syllable):
                    name = flite.ffeature_string(segment, b"name").decode()
                    end_s = flite.item_feat_float(segment, b"end")
                    phones.append(Phone(name + stress * (name[0] in "aeiou"), index, end_s))
        return phones

    def _daughters(self, item: int) -> Iterator[int]:
        return self._items(self._flite.item_daughter(item))

    def _items(self, item: int | None) -> Iterator[int]:
        while item:
            yield item
            item = self._flite.item_next(item)


def _trim(samples: np.ndarray, phones: list[Phone], gain: float) -> Utterance | None:
    loud = np.flatnonzero(np.abs(samples) > SILENCE_LEVEL)
    if len(loud) == 0:
        return None
    start = max(0, int(loud[0]) - LEAD)
    cut = samples[start : int(loud[-1]) + TAIL].astype(np.float32) * gain
    shift = start / SAMPLE_RATE
    moved = tuple(Phone(p.name, p.word_index, max(0.0, p.end_s - shift)) for p in phones)
    return Utterance(np.clip(cut, -32767, 32767).astype(np.int16), moved)


def phone_text(phones: tuple[Phone, ...]) -> str:
    """Phones as text: spaces between phones, slashes between words ("hh ax l ow1 / w er1 l d")."""
    words: dict[int, list[str]] = {}
    for phone in phones:
        words.setdefault(phone.word_index, []).append(phone.name)
    return " / ".join(" ".join(names) for names in words.values())
