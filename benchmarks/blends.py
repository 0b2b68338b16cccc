"""Similarity of blended voices to their parts, by a model that compares speakers.

The cosine is of Resemblyzer's vectors, each the mean over all texts. Needs Resemblyzer (the extra
`listeners`). The parts' cosine to each other, and of one part to itself on other texts, are the
ends of the scale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import tts
from benchmarks.report import Figure, Report, arguments, lines_of, publish
from benchmarks.speech_judges import SpeakerVector, load_speaker, prepared

TEXTS = Path(__file__).with_name("held_out.txt")
PAIRS = ("hazel+hugh", "owen+edith")
WEIGHTS = ((3, 1), (1, 1), (1, 3))


def mean_vector(
    voice: tts.LoadedVoice, name: str, texts: Sequence[str], speaker: SpeakerVector
) -> np.ndarray:
    """Return the unit vector of a voice that speaks all texts."""
    vectors = []
    for seed, text in enumerate(texts):
        said = voice.say(text, voice=name, seed=seed)
        vectors.append(speaker(prepared(said.samples, said.sample_rate)))
    total = np.sum(vectors, axis=0)
    return np.asarray(total / np.linalg.norm(total))


def figures(
    voice: tts.LoadedVoice, pairs: Sequence[str], texts: Sequence[str], speaker: SpeakerVector
) -> Iterator[Figure]:
    """Yield the cosines of each pair's blends and parts; half of the texts are those of a part."""
    half = len(texts) // 2
    for pair in pairs:
        first, second = pair.split("+")
        ends = [mean_vector(voice, name, texts[:half], speaker) for name in (first, second)]
        others = [mean_vector(voice, name, texts[half:], speaker) for name in (first, second)]
        same = tuple(float(a @ b) for a, b in zip(ends, others, strict=True))
        yield Figure(f"{pair}: a part and itself", same, "cosine")
        yield Figure(f"{pair}: both parts", (float(ends[0] @ ends[1]),), "cosine")
        for weights in WEIGHTS:
            name = f"{first}({weights[0]})+{second}({weights[1]})"
            vector = mean_vector(voice, name, texts[half:], speaker)
            for part, end in zip((first, second), ends, strict=True):
                yield Figure(f"{name}: to {part}", (float(vector @ end),), "cosine")


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Blended voices and their parts.", repeat=6, has_model=False)
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), metavar="NAME+NAME")
    args = parser.parse_args(argv)
    if args.repeat < 2:
        parser.error("--repeat must be 2 or more: half of the texts are those of the parts")
    with tts.load() as voice:
        texts = lines_of(TEXTS, args.repeat)
        found = tuple(figures(voice, args.pairs, texts, load_speaker()))
    return publish(Report("blends", found))


if __name__ == "__main__":
    sys.exit(main())
