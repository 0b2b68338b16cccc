"""The teacher's clips through a trained codec, and what listeners' models say of both.

    python -m training.speech_codec.render --clips runs/clips --weights one.safetensors \
        --config one.json --moonshine DIR [--out DIR]

Every clip is encoded, and decoded with the voice tokens of its voice's reference, another clip.
`crossed` rows are decoded with the next voice's tokens of the same kind: their speaker is compared
with that voice. The teacher's own rows come from the same run. Needs the packages that
training.speech_codec.listeners names.
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

from benchmarks.word_errors import WordErrors, total
from decoder.codecs.source_filter.modules import SpeechCodec
from training.speech_codec.checkpoint import load
from training.speech_codec.clips import Clip, read_clips
from training.speech_codec.listeners import Listeners, errors, prepared


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was said of one rendering."""

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
def through(codec: SpeechCodec, samples: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """A clip's codes in the voice of a reference, float32 [S]."""
    hop = codec.config.hop
    padded = np.pad(samples, (0, -len(samples) % hop + codec.config.ahead * hop))
    _, codes = codec.encode(torch.from_numpy(padded)[None])
    whole = len(reference) // codec.config.frame * codec.config.frame
    _, tokens = codec.voice(torch.from_numpy(reference[:whole])[None])
    return codec.decode(codes, tokens)[0, : len(samples)].numpy()


def renderings(
    codec: SpeechCodec, clips: Sequence[Clip]
) -> Iterator[tuple[str, Clip, Clip, np.ndarray]]:
    """System, clip, the reference of the voice that is wanted, samples."""
    references: dict[str, Clip] = {}
    for clip in clips:
        references.setdefault(clip.voice, clip)
    names = list(references)
    for clip in clips:
        own = references[clip.voice]
        if clip is own:
            continue
        samples = read(clip.path)
        same = [name for name in names if references[name].kind == clip.kind]
        other = references[same[(same.index(clip.voice) + 1) % len(same)]]
        yield "teacher", clip, own, samples
        yield "codec", clip, own, through(codec, samples, read(own.path))
        yield "crossed", clip, other, through(codec, samples, read(other.path))


def judge(
    listeners: Listeners, codec: SpeechCodec, clips: Sequence[Clip], out: Path | None
) -> Iterator[Verdict]:
    """A verdict on every rendering, which is written below `out`."""
    rate, speakers = codec.config.sample_rate, {}
    for system, clip, wanted, samples in renderings(codec, clips):
        if out is not None and system != "teacher":
            soundfile.write(out / f"{system}_{clip.path.name}", samples, rate)
        if wanted.path not in speakers:
            speakers[wanted.path] = listeners.speaker(prepared(read(wanted.path), rate))
        heard_clip = prepared(samples, rate)
        heard = listeners.words(heard_clip)
        found = errors(clip.text, heard)
        yield Verdict(
            system, clip.kind, clip.voice, clip.text, heard, listeners.naturalness(heard_clip),
            found.wrong, found.words,
            float(listeners.speaker(heard_clip) @ speakers[wanted.path]),
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
    for name in ("clips", "weights", "config", "moonshine"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="folder for the renderings and verdicts.json")
    args = parser.parse_args(argv)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    codec = load(args.weights, args.config)
    verdicts = []
    for verdict in judge(Listeners(args.moonshine), codec, read_clips(args.clips), args.out):
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
