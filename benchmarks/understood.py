"""Word error rate of held-out sentences in four of the built-in voices.

Every sentence is synthesized in every voice by the whole service over loopback gRPC, and
recognised. The recogniser also makes errors on clean speech: compare figures of one machine and
one recogniser only.

Needs the packages of `pip install -e '.[recogniser]'`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import Figure, Report, arguments, lines_of, publish
from benchmarks.word_errors import Recogniser, WordErrors, total, word_errors
from tests.speech_server import SpeechClient, serving

VOICES = ("hazel", "owen", "edith", "hugh")
HELD_OUT = Path(__file__).parent / "held_out.txt"
SEED = 1


@dataclass(frozen=True, slots=True)
class Clip:
    """Mono float32 samples at a rate in Hz."""

    samples: np.ndarray
    sample_rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate


Speaker = Callable[[str, str], Clip]
"""Function from text and voice to speech."""
Listener = Callable[[np.ndarray, int], str]
"""Function from samples and rate to words."""


@dataclass(frozen=True, slots=True)
class SpeakerScore:
    """Word errors of one speaker's sentences in one voice."""

    errors: WordErrors
    seconds: float


def judge(speak: Speaker, listen: Listener, voice: str, sentences: Iterable[str]) -> SpeakerScore:
    """Synthesize and recognise every sentence; each error is printed on standard error."""
    errors, seconds = [], 0.0
    for sentence in sentences:
        clip = speak(sentence, voice)
        heard = listen(clip.samples, clip.sample_rate)
        errors.append(word_errors(sentence, heard))
        seconds += clip.seconds
        if errors[-1].wrong:
            print(f"{voice} {errors[-1].wrong:2d}  {sentence}  |  {heard}", file=sys.stderr)
    return SpeakerScore(total(errors), seconds)


def served(client: SpeechClient) -> Speaker:
    """Return a speaker for the service, with one seed."""

    def speak(text: str, voice: str) -> Clip:
        speech = client.synthesize(text, voice=voice, seed=SEED)
        samples = np.frombuffer(speech.pcm, dtype="<i2").astype(np.float32) / 32768.0
        return Clip(samples, speech.sample_rate)

    return speak


def measure(service: Speaker, listen: Listener, sentences: Sequence[str]) -> Report:
    """Return the word error rate of every voice, and the mean."""
    judged = {voice: judge(service, listen, voice, sentences) for voice in VOICES}
    figures = []
    for voice, score in judged.items():
        note = f"{score.errors.words} words, {score.seconds:.0f} s of speech"
        figures.append(Figure(voice, (score.errors.rate,), "WER", note=note))
    mean = sum(score.errors.rate for score in judged.values()) / len(judged)
    return Report("understood", (*figures, Figure("mean", (mean,), "WER")))


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Word error rate of held-out sentences.", repeat=1)
    options.add_argument("--sentences", type=int, help="only the first N")
    args = options.parse_args(argv)
    sentences = lines_of(HELD_OUT, args.sentences)
    with serving(args.model) as server, SpeechClient(server.address) as client:
        return publish(measure(served(client), Recogniser(), sentences))


if __name__ == "__main__":
    sys.exit(main())
