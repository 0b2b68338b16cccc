"""The teacher's clips through a trained codec, and what listeners' models say of both.

    python -m training.speech_codec.render --clips runs/clips --weights one.safetensors \
        --config one.json --coder coder.safetensors --voice-encoder voices.safetensors \
        --moonshine DIR [--out DIR]

Every clip's plan is encoded. `codec` rows are decoded with the voice tokens of the clip's own
style, `crossed` rows with those of the next voice of the same kind: their speaker is compared with
that voice. `cloned` rows, which need --voice-encoder, have the voice tokens of the voice's
reference, another clip. The teacher's own rows come from the same run. Needs the packages that
benchmarks.speech_judges names.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch

from benchmarks.speech_judges import SpeechJudges, prepared
from benchmarks.word_errors import WordErrors, total, word_errors
from decoder.codecs.source_filter.modules import SpeechCodec
from training.speech_codec.checkpoint import load
from training.speech_codec.clips import Clip, read_clips
from training.speech_codec.coder import Coder, load_coder
from training.speech_codec.config import coder_sizes, load_config
from training.speech_codec.plans import CURVE_GRID
from training.speech_codec.tokenise import codes_of_lines

Rendering = tuple[str, Clip, Clip, np.ndarray]
"""System, clip, the reference of the voice that is meant, samples."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judgement of one rendering."""

    system: str
    kind: str
    voice: str
    text: str
    heard: str
    natural: float
    wrong: int
    words: int
    speaker: float


def read(path: Path) -> np.ndarray:
    """Samples float32 [S] of a mono file at the codec's rate."""
    samples, _ = soundfile.read(path, dtype="float32")
    return samples


@torch.inference_mode()
def through(codec: SpeechCodec, coder: Coder, clip: Clip, voice: Sequence[int]) -> np.ndarray:
    """Return a clip's codes in a voice of tokens, float32 [S]."""
    plan = clip.plan()
    codes, _ = codes_of_lines(coder, plan, torch.zeros(1, dtype=torch.long))
    samples = codec.decode(codes[None], torch.tensor([voice]))[0]
    return samples[: CURVE_GRID * len(plan["pitch"])].numpy()


@torch.inference_mode()
def own_voice(coder: Coder, clip: Clip) -> list[int]:
    """Return the voice tokens of a clip's style."""
    tokens: list[int] = coder.voice(clip.plan()["style"].float()[None])[1][0].tolist()
    return tokens


@torch.inference_mode()
def heard_voice(codec: SpeechCodec, samples: np.ndarray) -> list[int]:
    """Return the voice tokens of samples, float32 [S] at the codec's rate."""
    frame = codec.config.frame
    whole = torch.from_numpy(samples[: len(samples) // frame * frame])
    tokens: list[int] = codec.voice(whole[None])[1][0].tolist()
    return tokens


@dataclass(frozen=True, slots=True)
class Trained:
    """A codec, the coder that writes its codes, and whether its encoder of voices is trained."""

    codec: SpeechCodec
    coder: Coder
    clones: bool

    @classmethod
    def load(cls, weights: Path, config: Path, coder: Path, voices: Path | None) -> Trained:
        """Load the files of `training.speech_codec.checkpoint.load`, and the coder's."""
        sizes = coder_sizes(load_config(config))
        codec = load(weights, config, voices)
        return cls(codec, load_coder(coder, sizes), voices is not None)


def references_of(clips: Sequence[Clip]) -> dict[str, Clip]:
    """Return the first clip of every voice."""
    references: dict[str, Clip] = {}
    for clip in clips:
        references.setdefault(clip.voice, clip)
    return references


def renderings(trained: Trained, clips: Sequence[Clip]) -> Iterator[Rendering]:
    """Iterate over the teacher's and the codec's renderings; references are left out."""
    codec, coder = trained.codec, trained.coder
    references = references_of(clips)
    names = list(references)
    for clip in clips:
        own = references[clip.voice]
        if clip is own:
            continue
        same = [name for name in names if references[name].kind == clip.kind]
        other = references[same[(same.index(clip.voice) + 1) % len(same)]]
        yield "teacher", clip, own, read(clip.path)
        yield "codec", clip, own, through(codec, coder, clip, own_voice(coder, own))
        yield "crossed", clip, other, through(codec, coder, clip, own_voice(coder, other))
        if trained.clones:
            heard = heard_voice(codec, read(own.path))
            yield "cloned", clip, own, through(codec, coder, clip, heard)


def judge(
    judges: SpeechJudges, trained: Trained, clips: Sequence[Clip], out: Path | None
) -> Iterator[Verdict]:
    """Iterate over a verdict on every rendering, which is written below `out`."""
    rate, speakers = trained.codec.config.sample_rate, {}
    for system, clip, wanted, samples in renderings(trained, clips):
        if out is not None and system != "teacher":
            soundfile.write(out / f"{system}_{clip.path.name}", samples, rate)
        if wanted.path not in speakers:
            speakers[wanted.path] = judges.speaker(prepared(read(wanted.path), rate))
        heard_clip = prepared(samples, rate)
        heard = judges.words(heard_clip)
        found = word_errors(clip.text, heard)
        yield Verdict(
            system, clip.kind, clip.voice, clip.text, heard, judges.naturalness(heard_clip),
            found.wrong, found.words,
            float(judges.speaker(heard_clip) @ speakers[wanted.path]),
        )  # fmt: skip


def table(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """One line for each system and kind, then each named voice of the codec."""
    groups: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[verdict.system, verdict.kind].append(verdict)
        if verdict.kind == "named":
            groups[verdict.system, verdict.voice].append(verdict)
    yield f"{'':24s} clips  natural (worst)  misheard  speaker"
    for (system, group), rows in sorted(groups.items(), key=lambda item: item[0][::-1]):
        natural = [row.natural for row in rows]
        misheard = total(WordErrors(row.wrong, row.words) for row in rows).rate
        speaker = np.mean([row.speaker for row in rows])
        yield (
            f"{group:14s} {system:9s} {len(rows):5d}  "
            f"{np.mean(natural):.2f} ({min(natural):.2f})      {misheard:.3f}     {speaker:.3f}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("clips", "weights", "config", "coder", "moonshine"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--voice-encoder", type=Path, help="weights, for cloned voices")
    parser.add_argument("--out", type=Path, help="folder for the renderings and verdicts.json")
    args = parser.parse_args(argv)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    trained = Trained.load(args.weights, args.config, args.coder, args.voice_encoder)
    verdicts = []
    for verdict in judge(SpeechJudges(args.moonshine), trained, read_clips(args.clips), args.out):
        verdicts.append(verdict)
        print(
            f"{verdict.system:8s} {verdict.voice:12s} {verdict.natural:.2f} "
            f"{verdict.wrong}/{verdict.words} {verdict.speaker:.2f}  "
            f"{verdict.text} | {verdict.heard}",
            flush=True,
        )
    if args.out:
        rows = [asdict(verdict) for verdict in verdicts]
        (args.out / "verdicts.json").write_text(json.dumps(rows, indent=1))
    print("\n".join(table(verdicts)))


if __name__ == "__main__":
    main()
