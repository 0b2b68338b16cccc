"""Sentences by the language model and by the teacher, and what listeners' models say of both.

    python -m training.speech_codec.clips --teacher runs/teacher --package runs/teacher/package \
        --out runs/clips --named af_heart am_michael --lines 20
    python -m training.speech_lm.judge --clips runs/clips --weights runs/lm/lm.safetensors \
        --codec runs/codec/source_free.safetensors --config runs/codec/source_free.json \
        --coder runs/coder/coder.safetensors --voice-encoder runs/codec/voices.safetensors \
        --moonshine DIR --voices af_heart am_michael [--out DIR]

Named voices speak with their fixed row, other voices follow their reference clip, for which
--voice-encoder is needed. `through` rows
are the teacher's clips through the codec: what the codec costs. Durations are shares of the
teacher's.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.speech_judges import SpeechJudges, prepared
from benchmarks.word_errors import word_errors
from training.speech_codec.clips import Clip, read_clips
from training.speech_codec.coder import Coder, load_coder
from training.speech_codec.config import coder_sizes
from training.speech_codec.render import (
    Rendering,
    Verdict,
    own_voice,
    read,
    references_of,
    table,
    through,
)
from training.speech_lm.speaker import Speaker
from training.speech_lm.writer import tokens_of


@dataclass(frozen=True, slots=True)
class Spoken(Verdict):
    """With its duration as a share of the teacher's."""

    duration: float


def renderings(
    speaker: Speaker, coder: Coder, clips: Sequence[Clip], seed: int
) -> Iterator[Rendering]:
    """Iterate over renderings by the teacher, the codec and the model, without references."""
    references = references_of(clips)
    rows = {
        name: speaker.voices.get(name) or speaker.voice_of(read(clip.path))
        for name, clip in references.items()
    }
    for clip in clips:
        own = references[clip.voice]
        if clip is own:
            continue
        yield "teacher", clip, own, read(clip.path)
        voice = own_voice(coder, own)
        yield "through", clip, own, through(speaker.codec, coder, clip, voice)
        yield "spoken", clip, own, speaker.say(rows[clip.voice], tokens_of(clip.text), seed)


def judge(
    judges: SpeechJudges, rate: int, said: Iterable[Rendering], out: Path | None
) -> Iterator[Spoken]:
    """Iterate over a verdict on every one of the `renderings`, which are written below `out`."""
    speakers: dict[Path, np.ndarray] = {}
    length = 1
    for system, clip, wanted, samples in said:
        if system == "teacher":
            length = len(samples)
        elif out is not None:
            soundfile.write(out / f"{system}_{clip.path.name}", samples, rate)
        if wanted.path not in speakers:
            speakers[wanted.path] = judges.speaker(prepared(read(wanted.path), rate))
        long_enough = np.pad(samples, (0, max(0, rate // 2 - len(samples))))
        heard_clip = prepared(long_enough, rate)
        heard = judges.words(heard_clip)
        found = word_errors(clip.text, heard)
        yield Spoken(
            system, clip.kind, clip.voice, clip.text, heard, judges.naturalness(heard_clip),
            found.wrong, found.words, float(judges.speaker(heard_clip) @ speakers[wanted.path]),
            len(samples) / length,
        )  # fmt: skip


def durations(verdicts: Sequence[Spoken]) -> Iterator[str]:
    """One line for each voice of the language model."""
    groups: dict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.system == "spoken":
            groups[verdict.voice].append(verdict.duration)
    for voice, shares in groups.items():
        yield (f"{voice:14s} durations {np.mean(shares):.2f} of the teacher's, "
               f"{min(shares):.2f} to {max(shares):.2f}")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("clips", "weights", "codec", "config", "coder", "moonshine"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--voice-encoder", type=Path, help="weights, to follow clips")
    parser.add_argument("--voices", nargs="+", help="those of the clips; all without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the renderings and verdicts.json")
    args = parser.parse_args(argv)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    clips = [c for c in read_clips(args.clips) if not args.voices or c.voice in args.voices]
    speaker = Speaker(args.weights, args.codec, args.config, args.voice_encoder)
    sizes = speaker.codec.config
    said = renderings(speaker, load_coder(args.coder, coder_sizes(sizes)), clips, args.seed)
    verdicts = []
    for verdict in judge(SpeechJudges(args.moonshine), sizes.sample_rate, said, args.out):
        verdicts.append(verdict)
        print(
            f"{verdict.system:8s} {verdict.voice:12s} {verdict.natural:.2f} "
            f"{verdict.wrong}/{verdict.words} {verdict.speaker:.2f} x {verdict.duration:.2f}  "
            f"{verdict.text} | {verdict.heard}",
            flush=True,
        )
    if args.out:
        rows = [asdict(verdict) for verdict in verdicts]
        (args.out / "verdicts.json").write_text(json.dumps(rows, indent=1))
    print("\n".join((*table(verdicts), *durations(verdicts))))


if __name__ == "__main__":
    main()
