"""Word error rate of held-out sentences, compared with the voice's teacher.

Every sentence is synthesized in every voice by the whole service over loopback gRPC, and by flite
(the synthesiser whose speech trained the embedded voice), and both are recognised in the same run
by the same recogniser. The recogniser also makes errors on clean speech: only the difference is
meaningful.

Needs the packages of `pip install -e '.[train]'` and the program `flite` (apt install flite).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import Figure, Report, arguments, lines_of, publish
from benchmarks.word_errors import Recogniser, WordErrors, total, word_errors
from tests.speech_server import SpeechClient, serving

VOICES = ("hazel", "owen", "edith")
HELD_OUT = Path(__file__).parent / "held_out.txt"
MARGIN = 0.08
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


def flite(text: str, voice: str) -> Clip:
    """Synthesize with the teacher, Debian's flite."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "teacher.wav"
        subprocess.run(
            ["flite", "-voice", voice, "-t", text, "-o", str(path)], check=True, timeout=60
        )
        return read_clip(path)


def read_clip(path: Path) -> Clip:
    """Read a sound file, mixed to mono."""
    import soundfile

    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    return Clip(samples.mean(axis=1), rate)


def served(client: SpeechClient) -> Speaker:
    """Return a speaker for the service, with one seed."""

    def speak(text: str, voice: str) -> Clip:
        speech = client.synthesize(text, voice=voice, seed=SEED)
        samples = np.frombuffer(speech.pcm, dtype="<i2").astype(np.float32) / 32768.0
        return Clip(samples, speech.sample_rate)

    return speak


def compare(
    service: Speaker, teacher: Speaker, listen: Listener, sentences: Sequence[str]
) -> Report:
    """Compare both speakers in all voices: figures per voice, means, and the verdict."""
    figures = []
    means = {}
    for name, speak in (("teacher", teacher), ("service", service)):
        judged = {voice: judge(speak, listen, voice, sentences) for voice in VOICES}
        for voice, judgement in judged.items():
            note = f"{judgement.errors.words} words, {judgement.seconds:.0f} s of speech"
            figures.append(Figure(f"{name} {voice}", (judgement.errors.rate,), "WER", note=note))
        means[name] = sum(j.errors.rate for j in judged.values()) / len(judged)
    figures.append(Figure("teacher, mean", (means["teacher"],), "WER"))
    bar = round(means["teacher"] + MARGIN, 4)
    figures.append(Figure("service, mean", (means["service"],), "WER", bar=bar))
    return Report("understood", tuple(figures))


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(
        "Word error rate of held-out sentences, compared with the teacher's.", repeat=1
    )
    options.add_argument("--sentences", type=int, help="only the first N")
    args = options.parse_args(argv)
    if shutil.which("flite") is None:
        options.error("the program flite is missing: apt install flite")
    sentences = lines_of(HELD_OUT, args.sentences)
    with serving(args.model) as server, SpeechClient(server.address) as client:
        return publish(compare(served(client), flite, Recogniser(), sentences))


if __name__ == "__main__":
    sys.exit(main())
