"""Length and level of an emphasised word, and of the words next to it.

Each text is spoken without emphasis and with one word in each level, with the same seed. The
figures are ratios of lengths and changes of levels in dB, between the times of words.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

import tts
from benchmarks.report import Figure, Report, arguments, lines_of, publish

TEXTS = Path(__file__).with_name("held_out.txt")
LEVELS = ("strong", "moderate", "reduced")
MIN_LETTERS = 5  # of the word
SILENCE = 1e-9


@dataclass(frozen=True, slots=True)
class Change:
    """Length and level of a word, relative to the same word without emphasis."""

    length: float  # ratio
    decibels: float


def chosen(words: Sequence[str]) -> int:
    """Return the index of the first longer word that has words on both sides, near the middle."""
    inner = range(1, len(words) - 1)
    long = [index for index in inner if len(words[index].strip(",.")) >= MIN_LETTERS]
    return min(long or inner, key=lambda index: abs(index - len(words) // 2))


def marked(words: Sequence[str], index: int, level: str) -> str:
    """Return SSML of a text, one word of which is emphasised."""
    parts = [escape(word) for word in words]
    parts[index] = f'<emphasis level="{level}">{parts[index]}</emphasis>'
    return f"<speak>{' '.join(parts)}</speak>"


def change(plain: tts.Speech, said: tts.Speech, index: int) -> Change:
    """Compare word `index` of two utterances of one text with word times."""
    lengths, levels = [], []
    for speech in (plain, said):
        word = speech.words[index]
        start, end = (round(s * speech.sample_rate) for s in (word.start_s, word.end_s))
        power = float(np.square(speech.samples[start:end], dtype=np.float64).mean())
        lengths.append(end - start)
        levels.append(10 * math.log10(max(power, SILENCE)))
    return Change(lengths[1] / lengths[0], levels[1] - levels[0])


def figures(voice: tts.LoadedVoice, texts: Sequence[str], names: Sequence[str]) -> Iterator[Figure]:
    """Yield lengths and levels, over all texts and voices, for each level of emphasis."""
    for level in LEVELS:
        inside: list[Change] = []
        nearby: list[Change] = []
        for name in names:
            for seed, text in enumerate(texts):
                words = text.split()
                index = chosen(words)
                plain = voice.say(text, voice=name, seed=seed, timestamps="word")
                source = marked(words, index, level)
                said = voice.say(source, voice=name, seed=seed, timestamps="word", markup="ssml")
                inside.append(change(plain, said, index))
                nearby += (change(plain, said, near) for near in (index - 1, index + 1))
        for kind, found in ((f"{level}, the word", inside), (f"{level}, next to it", nearby)):
            yield Figure(f"{kind}: length", tuple(one.length for one in found), "times")
            yield Figure(f"{kind}: level", tuple(one.decibels for one in found), "dB")


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Emphasised words and those next to them.", repeat=5, has_model=False)
    parser.add_argument("--voices", nargs="+", default=["hazel", "hugh"], metavar="NAME")
    args = parser.parse_args(argv)
    with tts.load() as voice:
        found = tuple(figures(voice, lines_of(TEXTS, args.repeat), args.voices))
    return publish(Report("emphasis", found))


if __name__ == "__main__":
    sys.exit(main())
