"""Which part of a decoder is misheard: its envelopes or its excitation, in one voice or in all.

    python -m training.speech_codec.swaps --clips runs/clips --weights one.safetensors \
        --config one.json --coder coder.safetensors --moonshine DIR

Every clip of the teacher and what the codec makes of its plan have the same times, so that the
smooth spectral envelope of one can be given to the other: `codec, teacher's envelopes` is as clear
as the teacher where only envelopes are wrong. Clips whose codes are misheard are spoken in all
other voices, too: a word that is misheard in most of them is wrong before there is a voice. Needs
the packages that benchmarks.speech_judges names.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torchaudio.functional import create_dct, melscale_fbanks

from benchmarks.speech_judges import SpeechJudges, prepared
from benchmarks.word_errors import WordErrors, total, word_errors
from training.speech_codec.clips import Clip, read_clips
from training.speech_codec.render import Trained, own_voice, read, references_of, through

N_FFT, HOP = 1024, 240
BANDS, TERMS = 64, 18  # mels, and cosines over them: an envelope has no harmonics
MOST = 6.0  # of a change, in log power


class Words(Protocol):
    """Recogniser of prepared clips."""

    def words(self, clip: np.ndarray) -> str: ...


class Envelopes:
    """Smooth spectral envelopes of samples at one rate."""

    def __init__(self, rate: int) -> None:
        filters = melscale_fbanks(N_FFT // 2 + 1, 0.0, rate / 2, BANDS, rate, norm=None)
        self._bands = filters / filters.sum(0).clamp_min(1e-6)
        self._bins = filters / filters.sum(1, keepdim=True).clamp_min(1e-6)
        self._cosines = create_dct(TERMS, BANDS, "ortho")
        self._window = torch.hann_window(N_FFT)

    def of(self, spectrum: Tensor) -> Tensor:
        """Map a spectrum [bins, F] to its envelope in log power, [F, BANDS]."""
        power = (spectrum.abs().square().T @ self._bands).clamp_min(1e-9)
        return power.log() @ self._cosines @ self._cosines.T

    def given(self, samples: Tensor, other: Tensor) -> Tensor:
        """Return samples [S] with the envelopes of others of the same length and times."""
        own, wanted = self.spectrum(samples), self.spectrum(other)
        change = (self.of(wanted) - self.of(own)).clamp(-MOST, MOST)
        changed = own * (change @ self._bins.T / 2).exp().T
        return torch.istft(changed, N_FFT, HOP, window=self._window, length=len(samples))

    def spectrum(self, samples: Tensor) -> Tensor:
        return torch.stft(samples, N_FFT, HOP, window=self._window, return_complex=True)


def swapped(envelopes: Envelopes, teacher: np.ndarray, codec: np.ndarray) -> dict[str, np.ndarray]:
    """Return both, and each with the envelopes of the other; samples float32 [S]."""
    size = min(len(teacher), len(codec))
    one, other = (torch.from_numpy(samples[:size]) for samples in (teacher, codec))
    return {
        "teacher": teacher,
        "codec": codec,
        "codec, teacher's envelopes": envelopes.given(other, one).numpy(),
        "teacher, codec's envelopes": envelopes.given(one, other).numpy(),
    }


def judge(judges: Words, trained: Trained, clips: Sequence[Clip]) -> Iterator[str]:
    """Iterate over a line for each misheard clip of the codec, then over one for each system."""
    rate = trained.codec.config.sample_rate
    envelopes, references = Envelopes(rate), references_of(clips)
    rows = {name: own_voice(trained.coder, clip) for name, clip in references.items()}
    found: dict[str, list[WordErrors]] = defaultdict(list)
    for clip in clips:
        if clip is references[clip.voice]:
            continue
        said = through(trained.codec, trained.coder, clip, rows[clip.voice])
        heard = {
            system: judges.words(prepared(samples, rate))
            for system, samples in swapped(envelopes, read(clip.path), said).items()
        }
        for system, words in heard.items():
            found[system].append(word_errors(clip.text, words))
        if found["codec"][-1].wrong:
            yield f"{clip.voice}: {clip.text} | {heard['codec']}"
            yield from in_other_voices(judges, trained, clip, rows)
    for system, errors in found.items():
        words = total(errors)
        yield f"{system:28s} {len(errors)} clips, misheard {words.rate:.3f} of {words.words} words"


def in_other_voices(
    judges: Words, trained: Trained, clip: Clip, rows: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Iterate over the recogniser's words for a clip's codes in every other voice."""
    rate = trained.codec.config.sample_rate
    for name, row in rows.items():
        if name != clip.voice:
            samples = through(trained.codec, trained.coder, clip, row)
            words = judges.words(prepared(samples, rate))
            yield f"    {name}: {word_errors(clip.text, words).wrong} wrong | {words}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("clips", "weights", "config", "coder", "moonshine"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args(argv)
    trained = Trained.load(args.weights, args.config, args.coder, None)
    for line in judge(SpeechJudges(args.moonshine), trained, read_clips(args.clips)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
