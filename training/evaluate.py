"""How good the voice is, beside its teacher; every figure of the model card comes from here.

    python -m training.evaluate codec --codec runs/codec.safetensors
    python -m training.evaluate words --model tts/embedded --seeds 1 2 3
    python -m training.evaluate durations --lines runs/corpus_held_out.txt
    python -m training.evaluate following
    python -m training.evaluate phonemes --words runs/words_held_out.tsv \
        --lines runs/corpus_held_out.txt
    python -m training.evaluate timings

The word errors are pocketsphinx's, which errs on clean speech too: the teacher is judged in the
same run. Needs `pip install -e '.[train]'` and libflite1. JSON on standard output, a table beside.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Figure, Report, publish
from benchmarks.word_errors import Recogniser, WordErrors, total, word_errors
from training.measures import Timbre, envelope_distance, mel_cepstral_distance, quality
from training.studio import Studio, Take, teach
from training.teacher import SAMPLE_RATE, Teacher
from training.voices import NAMED, TEACHERS, UNSEEN

PROSE = Path(__file__).parent / "prose.txt"
AT_ONCE = 8


def prose(count: int | None) -> list[str]:
    """Held-out sentences."""
    return PROSE.read_text().splitlines()[:count]


def in_groups(items: Sequence[str]) -> Iterable[list[str]]:
    """A few at a time, to be spoken together."""
    return (list(items[i : i + AT_ONCE]) for i in range(0, len(items), AT_ONCE))


def heard(listen: Recogniser, text: str, take: Take) -> WordErrors:
    """Word errors of one take."""
    return word_errors(text, listen(take.samples, SAMPLE_RATE))


def figure(name: str, value: float, unit: str, bar: float | None = None, *, least: bool = False):
    """One number, whatever numpy made of it."""
    return Figure(name, (float(value),), unit, None if bar is None else float(bar), least)


def evaluate_codec(args: argparse.Namespace) -> Report:
    """The codec alone: the teacher's speech through it and back."""
    from safetensors.torch import load_file

    from decoder.embedded_modules import CodecConfig, EmbeddedCodec

    codec = EmbeddedCodec(CodecConfig())
    codec.load_state_dict({k: v.float() for k, v in load_file(args.codec).items()})
    codec.eval()
    teacher, listen = Teacher(), Recogniser()
    errors: dict[str, list[WordErrors]] = {"teacher": [], "codec": []}
    scores: list[tuple[float, float]] = []
    for voice in NAMED[: len(TEACHERS)]:
        for text in prose(args.sentences):
            original = teach(teacher, text, voice)
            with torch.no_grad():
                padded = np.pad(original.samples, (0, -len(original.samples) % codec.config.hop))
                _, codes = codec.encode(torch.from_numpy(padded)[None])
                decoded = Take(codec.decode(codes)[0].numpy())
            errors["teacher"].append(heard(listen, text, original))
            errors["codec"].append(heard(listen, text, decoded))
            scores.append(quality(original.samples, decoded.samples))
    taught, coded = (total(found).rate for found in errors.values())
    return Report("codec", (
        figure("teacher", taught, "WER"),
        figure("codec", coded, "WER", taught + 0.02),
        figure("PESQ wide band", np.mean([p for p, _ in scores]), "", 2.7, least=True),
        figure("STOI", np.mean([s for _, s in scores]), "", 0.95, least=True),
    ))  # fmt: skip


def evaluate_words(args: argparse.Namespace) -> Report:
    """Word error rate of every named voice, the teacher's beside it."""
    studio, teacher, listen = Studio(args.model), Teacher(), Recogniser()
    sentences = prose(args.sentences)
    figures: list[Figure] = []
    rates: dict[str, tuple[float, float]] = {}
    distances: list[float] = []
    for voice in NAMED:
        if args.voices and voice.name not in args.voices:
            continue
        reference = [teach(teacher, text, voice) for text in sentences]
        taught = total(heard(listen, t, r) for t, r in zip(sentences, reference, strict=True))
        found = []
        for seed in args.seeds:
            takes = []
            for group in in_groups(sentences):
                takes += studio.speak(group, studio.named(voice.name), seed)
            found.append(total(heard(listen, t, k) for t, k in zip(sentences, takes, strict=True)))
            print(f"{voice.name} seed {seed}: {found[-1].rate:.4f} ({taught.rate:.4f})",
                  file=sys.stderr, flush=True)  # fmt: skip
        pairs = list(zip(takes, reference, strict=True))[: args.distances]
        distances += [mel_cepstral_distance(Timbre(a.samples), Timbre(b.samples)) for a, b in pairs]
        rates[voice.name] = (taught.rate, total(found).rate)
        figures.append(figure(f"teacher {voice.name}", taught.rate, "WER"))
        bar = taught.rate + 0.07 if voice.name in TEACHERS else None
        spread = tuple(f.rate for f in found)
        figures.append(Figure(f"voice {voice.name}", spread, "WER", bar))
    for title, members, margin in (
        ("teacher voices", TEACHERS, 0.04),
        ("made voices", [v.name for v in NAMED[len(TEACHERS) :]], 0.06),
    ):
        chosen = [rates[name] for name in members if name in rates]
        if chosen:
            taught_mean, mean = np.mean(chosen, axis=0)
            figures.append(figure(f"{title}, teacher's mean", taught_mean, "WER"))
            figures.append(figure(f"{title}, mean", mean, "WER", taught_mean + margin))
    if distances:
        figures.append(figure("mel-cepstral distance", np.mean(distances), "dB"))
    studio.close()
    return Report("words", tuple(figures))


def evaluate_durations(args: argparse.Namespace) -> Report:
    """Lines of all lengths: how long each is against the teacher's, and whether any runs away."""
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
    """Voices that were never heard, each from one clip of 5 to 10 s: is it them who speak?

    What is said weighs in an envelope, too: the named voices say what is said in the clip.
    """
    studio, teacher = Studio(args.model), Teacher()
    texts = prose(None)
    errors, nearer = [], []
    for trial in range(args.trials):
        unseen = UNSEEN[trial % len(UNSEEN)]
        said = " ".join(texts[(2 * trial + k) % len(texts)] for k in (0, 1))
        text = texts[-1 - trial % len(texts)]
        clip = teacher.speak(said, unseen)
        assert clip is not None
        take = studio.speak([text], studio.following(clip, said), seed=trial + 1)[0]
        wanted, got = Timbre(clip.samples / 32768), Timbre(take.samples)
        others = [Timbre(teach(teacher, said, voice).samples) for voice in NAMED]
        errors.append(abs(got.pitch_hz / wanted.pitch_hz - 1))
        own = envelope_distance(got, wanted)
        nearer.append(own < min(envelope_distance(got, other) for other in others))
        print(f"{trial} {TEACHERS[unseen.teacher]} formants {float(unseen.formants):.3f} "
              f"pitch {wanted.pitch_hz:.0f} {got.pitch_hz:.0f} nearer {nearer[-1]}",
              file=sys.stderr, flush=True)  # fmt: skip
    studio.close()
    within = [error <= 0.15 for error in errors]
    both = np.mean([a and b for a, b in zip(within, nearer, strict=True)])
    return Report("following", (
        Figure("pitch off by", tuple(errors), "share"),
        figure("pitch within 15 %", np.mean(within), "share", 0.8, least=True),
        figure("nearer to the clip", np.mean(nearer), "share", 0.8, least=True),
        figure("both", both, "share", 0.8, least=True),
    ))  # fmt: skip


def evaluate_timings(args: argparse.Namespace) -> Report:
    """Word times found in the codes of the teacher's speech, against the teacher's own."""
    from training.labels import word_times
    from tts.aligner import FOLDER, Aligner
    from tts.factory import embedded_folder
    from tts.text import SpokenWord
    from tts.word_times import WordTimer

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
    """The second task: held-out words, and words of held-out sentences."""
    from training.phonemes import evaluate

    report, wrong = evaluate(args.model, args.words, args.lines, args.sentences)
    print(*wrong, sep="\n", file=sys.stderr, flush=True)
    return report


COMMANDS: dict[str, Callable[[argparse.Namespace], Report]] = {
    "codec": evaluate_codec,
    "words": evaluate_words,
    "durations": evaluate_durations,
    "following": evaluate_following,
    "phonemes": evaluate_phonemes,
    "timings": evaluate_timings,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--model", default="", help="checkpoint folder (default: the shipped one)")
    parser.add_argument("--codec", type=Path, default=Path("tts/embedded/codec/model.safetensors"))
    parser.add_argument("--lines", type=Path, default=Path("runs/corpus_held_out.txt"))
    parser.add_argument("--words", type=Path, default=Path("runs/words_held_out.tsv"))
    parser.add_argument("--sentences", type=int, help="only the first N")
    parser.add_argument("--voices", nargs="*", help="only these")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--distances", type=int, default=0, help="clips per voice for the MCD")
    parser.add_argument("--trials", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    return publish(COMMANDS[args.what](args))


if __name__ == "__main__":
    sys.exit(main())
