"""Errors of a decoder's spectral envelopes, by the time until the next symbol begins.

    python -m training.speech_codec.look_ahead --clips runs/clips --weights one.safetensors \
        --config one.json --coder coder.safetensors --package runs/teacher/package

The teacher begins a vowel while its plan still has the stress mark, and often the consonant before
it. A decoder that does not see the vowel's code yet says a middling one: its error grows with the
time that is left of a mark. Errors are mean absolute differences of log power in bands, without the
level, of frames of 10 ms.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.kokoro.packages import symbols
from training.speech_codec.clips import Clip, read_clips
from training.speech_codec.plans import PHONE_GRID
from training.speech_codec.render import Trained, own_voice, read, references_of, through
from training.speech_codec.swaps import HOP, Envelopes

STRESS = "ˈˌ"
RATE_MS = 24  # samples of a millisecond
STEP_MS = 20
QUIET = 9.0  # log power below a clip's loudest band: frames that are not compared
OTHERS = -1  # the key of frames without a stress mark


def left(phones: np.ndarray) -> np.ndarray:
    """Return for every phone of the grid [P] the place where its symbol's run ends."""
    starts = np.flatnonzero(np.diff(phones, prepend=-1))
    ends = np.append(starts[1:], len(phones))
    return np.repeat(ends, ends - starts)


def errors(envelopes: Envelopes, said: np.ndarray, real: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the error of every frame [F], and whether the teacher is loud there."""
    size = min(len(said), len(real))
    pair = (torch.from_numpy(samples[:size]).float() for samples in (said, real))
    one, other = (envelopes.of(envelopes.spectrum(samples)) for samples in pair)
    off = one - other
    loudest = other.amax(1)
    error = (off - off.mean(1, keepdim=True)).abs().mean(1)
    return error, loudest > loudest.max() - QUIET


def by_time_left(
    error: Tensor, loud: Tensor, phones: np.ndarray, marks: Sequence[int]
) -> Iterator[tuple[int, float]]:
    """Iterate over loud frames: the time that is left of a stress mark in ms, in steps, and the
    error; `OTHERS` where there is none."""
    ends = left(phones)
    for frame in torch.nonzero(loud).flatten().tolist():
        place = min(frame * HOP // PHONE_GRID, len(phones) - 1)
        ms = (int(ends[place]) * PHONE_GRID - frame * HOP) // RATE_MS
        is_mark = phones[place] in marks
        yield (ms // STEP_MS * STEP_MS if is_mark else OTHERS), error[frame].item()


def measure(
    trained: Trained, clips: Sequence[Clip], marks: Sequence[int]
) -> Mapping[int, list[float]]:
    """Return the errors of all clips but the voices' references."""
    envelopes = Envelopes(trained.codec.config.sample_rate)
    references, found = references_of(clips), defaultdict(list)
    for clip in clips:
        if clip is references[clip.voice]:
            continue
        row = own_voice(trained.coder, references[clip.voice])
        said = through(trained.codec, trained.coder, clip, row)
        phones = clip.plan()["phones"].numpy().astype(int)
        for ms, error in by_time_left(*errors(envelopes, said, read(clip.path)), phones, marks):
            found[ms].append(error)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("clips", "weights", "config", "coder", "package"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args(argv)
    known = symbols(args.package)
    trained = Trained.load(args.weights, args.config, args.coder, None)
    found = measure(trained, read_clips(args.clips), [known[mark] for mark in STRESS])
    for ms in sorted(found):
        name = "no stress mark" if ms == OTHERS else f"{ms} to {ms + STEP_MS} ms left"
        print(f"{name:20s} {len(found[ms]):6d} frames, error {np.mean(found[ms]):.3f}")


if __name__ == "__main__":
    main()
