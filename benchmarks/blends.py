"""How close a blend of two built-in voices is to both, by a network that recognises speakers.

Held-out sentences are synthesized by the service in both voices and in their blend, half of each.
A voice is the mean embedding of its sentences; similarity is the cosine of two. The speaker network
is that of `benchmarks.speech_judges`, whose module says what it needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.report import Figure, Report, arguments, lines_of, publish
from benchmarks.speech_judges import SpeechJudges, prepared
from benchmarks.understood import HELD_OUT, Clip, Speaker, served
from tests.speech_server import SpeechClient, serving

PAIRS = (("hazel", "owen"), ("opal", "gwen"), ("hazel", "edith"), ("miles", "basil"))
SENTENCES = 8

Embed = Callable[[np.ndarray], np.ndarray]


def embedding(clips: Iterable[Clip], embed: Embed) -> np.ndarray:
    """Return the mean embedding of clips, as a unit vector."""
    total = np.sum([embed(prepared(clip.samples, clip.sample_rate)) for clip in clips], axis=0)
    return total / np.linalg.norm(total)


def figures(
    speak: Speaker, embed: Embed, pairs: Sequence[tuple[str, str]], sentences: Sequence[str]
) -> Iterator[Figure]:
    """Iterate over the similarities of each pair and its blend."""
    for first, second in pairs:
        one, other, blend = (
            embedding((speak(text, voice) for text in sentences), embed)
            for voice in (first, second, f"{first}+{second}")
        )
        name = f"{first}+{second}"
        yield Figure(f"{first} to {second}", (float(one @ other),), "cosine")
        yield Figure(f"{name} to {first}", (float(blend @ one),), "cosine")
        yield Figure(f"{name} to {second}", (float(blend @ other),), "cosine")


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("How close blends are to their voices.", repeat=1)
    options.add_argument("--moonshine", type=Path, required=True, help="the recogniser's folder")
    options.add_argument("--sentences", type=int, default=SENTENCES, help="the first N")
    args = options.parse_args(argv)
    sentences = lines_of(HELD_OUT, args.sentences)
    with serving(args.model) as server, SpeechClient(server.address) as client:
        embed = SpeechJudges(args.moonshine).speaker
        found = tuple(figures(served(client), embed, PAIRS, sentences))
    return publish(Report("blends", found))


if __name__ == "__main__":
    sys.exit(main())
