"""Evaluation of the voice and its teacher; source of every figure of the model card.

    python -m training.evaluate codec --codec runs/codec.safetensors
    python -m training.evaluate words --model tts/embedded --seeds 1 2 3
    python -m training.evaluate durations --lines runs/corpus_held_out.txt
    python -m training.evaluate following
    python -m training.evaluate joins
    python -m training.evaluate phonemes --words runs/words_held_out.tsv \
        --lines runs/corpus_held_out.txt
    python -m training.evaluate timings

The recogniser, pocketsphinx, also makes errors on clean speech: the teacher is evaluated in the
same run. Needs `pip install -e '.[train]'` and libflite1. Prints JSON on standard output.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Figure, Report, publish
from benchmarks.word_errors import WordErrors, total
from training.measures import Timbre, mel_cepstral_distance, quality
from training.recogniser import RecogniserPool
from training.studio import CodecAlone, Studio, in_groups, teach
from training.teacher import SAMPLE_RATE, Teacher
from training.voices import NAMED, TEACHERS
from training.voices import Voice as Variant
from tts.config.defaults import embedded_folder

PROSE = Path(__file__).parent / "prose.txt"


def prose(count: int | None) -> list[str]:
    """Return held-out sentences."""
    return PROSE.read_text().splitlines()[:count]


def figure(name: str, value: float, unit: str, bar: float | None = None, *, least: bool = False):
    """Return a figure of one number, converted from numpy."""
    return Figure(name, (float(value),), unit, None if bar is None else float(bar), least)


def evaluate_codec(args: argparse.Namespace) -> Report:
    """Evaluate the codec alone: the teacher's speech, encoded and decoded."""
    codec, teacher, recogniser = CodecAlone(args.codec), Teacher(), RecogniserPool()
    texts = prose(args.sentences)
    heard: dict[str, list[Future[WordErrors]]] = {"teacher": [], "codec": []}
    scores: list[tuple[float, float]] = []
    for voice in NAMED[: len(TEACHERS)]:
        originals = [teach(teacher, text, voice) for text in texts]
        decoded = [codec.render(original) for original in originals]
        heard["teacher"].append(recogniser.count_errors(texts, originals))
        heard["codec"].append(recogniser.count_errors(texts, decoded))
        pairs = zip(originals, decoded, strict=True)
        scores += [quality(a.samples, b.samples) for a, b in pairs]
    taught, coded = (total(h.result() for h in found).rate for found in heard.values())
    recogniser.close()
    return Report("codec", (
        figure("clips", len(scores), ""),
        figure("teacher", taught, "WER"),
        figure("codec", coded, "WER", taught + 0.02),
        figure("PESQ wide band", np.mean([p for p, _ in scores]), "", 2.7, least=True),
        figure("STOI", np.mean([s for _, s in scores]), "", 0.95, least=True),
    ))  # fmt: skip


class VoiceWords:
    """One named voice: the teacher's word errors, and the model's with every seed."""

    def __init__(
        self, voice: Variant, taught: Future[WordErrors], found: Sequence[Future[WordErrors]]
    ) -> None:
        self.voice, self._taught, self._found = voice, taught, found

    @property
    def taught(self) -> float:
        """Return the teacher's word error rate; waits for it."""
        return self._taught.result().rate

    @property
    def rates(self) -> tuple[float, ...]:
        """Return the model's rates, one for every seed; waits for them."""
        return tuple(hearing.result().rate for hearing in self._found)

    def figures(self) -> tuple[Figure, Figure]:
        """Return the teacher's and the model's figures."""
        bar = self.taught + 0.07 if self.voice.name in TEACHERS else None
        print(f"{self.voice.name}: {self.rates} ({self.taught:.4f})", file=sys.stderr, flush=True)
        return (
            figure(f"teacher {self.voice.name}", self.taught, "WER"),
            Figure(f"voice {self.voice.name}", self.rates, "WER", bar),
        )


def evaluate_words(args: argparse.Namespace) -> Report:
    """Evaluate the word error rate of every named voice with every seed, and the teacher's."""
    studio, teacher, recogniser = Studio(args.model), Teacher(), RecogniserPool()
    texts = prose(args.sentences)
    voices, distances = [], []
    for voice in NAMED:
        if args.voices and voice.name not in args.voices:
            continue
        wanted = [teach(teacher, text, voice) for text in texts]
        taught, found = recogniser.count_errors(texts, wanted), []
        for seed in args.seeds:
            takes = studio.speak(texts, studio.named(voice.name), seed)
            found.append(recogniser.count_errors(texts, takes))
        for got, reference in list(zip(takes, wanted, strict=True))[: args.distances]:
            distances.append(mel_cepstral_distance(Timbre(got.samples), Timbre(reference.samples)))
        voices.append(VoiceWords(voice, taught, found))
    studio.close()
    figures = [figure("sentences", len(texts), ""), figure("seeds", len(args.seeds), "")]
    figures += [each for voice_words in voices for each in voice_words.figures()]
    for title, is_teacher, margin in (("teacher", True, 0.04), ("made", False, 0.06)):
        members = [v for v in voices if (v.voice.name in TEACHERS) == is_teacher]
        if members:
            taught = np.mean([v.taught for v in members])
            mean = np.mean([v.rates for v in members])
            figures.append(figure(f"{title} voices, teacher's mean", taught, "WER"))
            figures.append(figure(f"{title} voices, mean", mean, "WER", taught + margin))
    recogniser.close()
    if distances:
        figures.append(Figure("mel-cepstral distance", tuple(distances), "dB"))
    return Report("words", tuple(figures))


def evaluate_durations(args: argparse.Namespace) -> Report:
    """Evaluate durations of lines of all lengths against the teacher's, and runaway generation."""
    studio, teacher = Studio(args.model), Teacher()
    lines = args.lines.read_text().splitlines()[: args.sentences]
    ratios, runaways = [], 0
    for number, group in enumerate(in_groups(lines)):
        voice = NAMED[number % len(NAMED)]
        takes = studio.speak(group, studio.named(voice.name), seed=number + 1)
        for text, take in zip(group, takes, strict=True):
            reference = teach(teacher, text, voice)
            if not reference.seconds:
                continue
            ratios.append(take.seconds / reference.seconds)
            runaways += take.ran_away
            if not 0.6 <= ratios[-1] <= 1.6 or take.ran_away:
                print(f"{voice.name} {ratios[-1]:.2f}  {text}", file=sys.stderr, flush=True)
    studio.close()
    inside = np.mean([0.6 <= ratio <= 1.6 for ratio in ratios])
    return Report("durations", (
        figure("lines", len(ratios), ""),
        Figure("duration against the teacher's", tuple(ratios), "ratio"),
        figure("within 0.6 to 1.6", inside, "share", 1.0, least=True),
        figure("run away", runaways, "lines", 0.0),
    ))  # fmt: skip


def evaluate_following(args: argparse.Namespace) -> Report:
    """Evaluate similarity to unseen voices, each from one clip of 5 to 10 s."""
    from training.following import evaluate

    return evaluate(args.model, CodecAlone(args.codec), prose(None), args.trials)


def evaluate_joins(args: argparse.Namespace) -> Report:
    """Evaluate texts of several sentences: level and timbre at segment borders."""
    from training.joins import evaluate

    return evaluate(args.model, prose(None), args.texts)


def evaluate_timings(args: argparse.Namespace) -> Report:
    """Evaluate word times found in the codes of the teacher's speech, against the teacher's own."""
    from training.labels import word_times
    from tts.speech.aligner import FOLDER, Aligner
    from tts.speech.word_times import WordTimer
    from tts.text.segmenter import SpokenWord

    studio, teacher = Studio(args.model), Teacher()
    aligner = Aligner.load(Path(args.model or embedded_folder()) / FOLDER)
    codec = studio.service.client.codec
    assert codec is not None
    errors, missed, seconds, spoken_s = [], 0, 0.0, 0.0
    for number, text in enumerate(prose(args.sentences)):
        spoken = teacher.speak(text, NAMED[number % len(NAMED)])
        assert spoken is not None
        codes = studio.run(studio.service.client.encode_prompt(spoken.samples / np.float32(32768)))
        truth = word_times(spoken.words, spoken.phones)
        words = [SpokenWord(name, i, i + 1, name) for i, (name, _, _) in enumerate(truth)]
        timer = WordTimer(aligner, words, 1 / codec.codes_per_second)
        found = []
        started = time.thread_time()
        for start in range(0, len(codes), 10):
            found += timer.push(codes[start : start + 10])
        found += timer.finish()
        seconds += time.thread_time() - started
        spoken_s += len(spoken.samples) / SAMPLE_RATE
        missed += len(truth) - len(found)
        for span in found:
            _, start_s, end_s = truth[span.word.start]
            errors += [1000 * abs(span.start_s - start_s), 1000 * abs(span.end_s - end_s)]
    studio.close()
    return Report("timings", (
        Figure("start and end of a word", tuple(errors), "ms", 30.0),
        figure("90 % within", np.percentile(errors, 90), "ms"),
        figure("words without times", missed, ""),
        figure("work", 1000 * seconds / spoken_s, "ms per s of speech", 5.0),
    ))  # fmt: skip


def evaluate_phonemes(args: argparse.Namespace) -> Report:
    """Evaluate the second task: held-out words, and words of held-out sentences."""
    from training.phonemes import evaluate

    report, wrong = evaluate(args.model, args.words, args.lines, args.sentences)
    print(*wrong, sep="\n", file=sys.stderr, flush=True)
    return report


COMMANDS: dict[str, Callable[[argparse.Namespace], Report]] = {
    "codec": evaluate_codec,
    "words": evaluate_words,
    "durations": evaluate_durations,
    "following": evaluate_following,
    "joins": evaluate_joins,
    "phonemes": evaluate_phonemes,
    "timings": evaluate_timings,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--model", default="", help="checkpoint folder (default: the shipped one)")
    parser.add_argument("--codec", type=Path, help="weights alone (default: the model's)")
    parser.add_argument("--lines", type=Path, default=Path("runs/corpus_held_out.txt"))
    parser.add_argument("--words", type=Path, default=Path("runs/words_held_out.tsv"))
    parser.add_argument("--sentences", type=int, help="only the first N")
    parser.add_argument("--voices", nargs="*", help="only these")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--distances", type=int, default=5, help="clips per voice for the MCD")
    parser.add_argument("--trials", type=int, default=100, help="of following")
    parser.add_argument("--texts", type=int, default=20, help="for joins")
    args = parser.parse_args()
    args.codec = args.codec or Path(args.model or embedded_folder()) / "codec/model.safetensors"
    torch.set_num_threads(1)
    return publish(COMMANDS[args.what](args))


if __name__ == "__main__":
    sys.exit(main())
