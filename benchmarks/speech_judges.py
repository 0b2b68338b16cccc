"""Models that judge speech: how natural it sounds, which words it holds, who speaks.

Naturalness is DistillMOS (packages distillmos and xls-r-sqa), 1 to 5. Words are those of Moonshine
base (useful-moonshine-onnx; its weights are in the npm package @usefulsensors/moonshine-js). Who
speaks is Resemblyzer's embedding, compared by cosine. Every clip is brought to the same peak first.
`Acoustics` are plain measures without a model, to be read next to the scores.

    pip install -e '.[listeners]'
    npm pack @usefulsensors/moonshine-js@0.1.10 && tar xzf usefulsensors-moonshine-js-0.1.10.tgz
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr
import torch
from torchaudio.functional import detect_pitch_frequency

RATE = 16_000
PEAK = 0.7
MOONSHINE = "package/dist/model/base/quantized"  # in the unpacked package
HIGH_HZ = 6_000
LOUD_DB = 30.0  # below the loudest frame: quieter frames have no pitch worth measuring
FRAME = 512
SMOOTHED = 10  # frames of 10 ms, the median of which is a pitch
SpeakerVector = Callable[[np.ndarray], np.ndarray]
"""Function from a prepared clip to the unit vector [256] of who speaks in it."""


def prepared(samples: np.ndarray, rate: int) -> np.ndarray:
    """Mono float32 [S] at 16 kHz, of the same peak."""
    resampled = soxr.resample(samples, rate, RATE).astype(np.float32)
    return np.clip(resampled * (PEAK / max(1e-6, float(np.abs(resampled).max()))), -1, 1)


def load_speaker() -> SpeakerVector:
    """Load the model that compares speakers, on the CPU."""
    from resemblyzer import VoiceEncoder

    embed: SpeakerVector = VoiceEncoder("cpu", verbose=False).embed_utterance
    return embed


class Recogniser:
    """Moonshine, on the CPU."""

    def __init__(self, moonshine: Path) -> None:
        import moonshine_onnx
        import tokenizers

        vocabulary = Path(moonshine_onnx.__file__).with_name("assets") / "tokenizer.json"
        self._tokens = tokenizers.Tokenizer.from_file(str(vocabulary))
        self._recogniser = moonshine_onnx.MoonshineOnnxModel(
            models_dir=str(moonshine), model_name="base"
        )

    def words(self, clip: np.ndarray) -> str:
        """Return the words that are recognised in a prepared clip.

        Of some clips that begin with silence, also long ones, Moonshine recognises nothing: then
        it hears the clip again without its first quarter of a second.
        """
        return self._words(clip) or self._words(clip[RATE // 4 :])

    def _words(self, clip: np.ndarray) -> str:
        return self._tokens.decode_batch(self._recogniser.generate(clip[None]))[0].strip()


class SpeechJudges(Recogniser):
    """The three models, on the CPU."""

    def __init__(self, moonshine: Path) -> None:
        import distillmos

        super().__init__(moonshine)
        self._natural = distillmos.ConvTransformerSQAModel().eval()
        self._speaker = load_speaker()

    @torch.inference_mode()
    def naturalness(self, clip: np.ndarray) -> float:
        """1 to 5 of a prepared clip."""
        return float(self._natural(torch.from_numpy(clip)[None]))

    def speaker(self, clip: np.ndarray) -> np.ndarray:
        """Unit vector [256] of who speaks in a prepared clip."""
        return self._speaker(clip)


@dataclass(frozen=True, slots=True)
class Acoustics:
    """Plain measures of one clip."""

    pitch_range: float  # semitones between the 10th and the 90th percentile of the louder frames
    high: float  # power above 6 kHz relative to all, in dB
    seconds: float

    @classmethod
    def of(cls, samples: np.ndarray, rate: int) -> Acoustics:
        """Measure mono float32 samples [S]."""
        sound = torch.from_numpy(np.ascontiguousarray(samples, np.float32))
        power = torch.fft.rfft(sound).abs().square()
        high = power[int(HIGH_HZ / rate * len(sound)) :].sum() / power.sum().clamp_min(1e-12)
        decibels = float(10 * high.clamp_min(1e-12).log10())
        return cls(pitch_range(sound, rate), decibels, len(sound) / rate)


def pitch_range(sound: torch.Tensor, rate: int) -> float:
    """Return the semitones between the lower and the upper tenth of pitch in louder frames."""
    if len(sound) < rate // 2:
        return 0.0
    pitch = detect_pitch_frequency(sound[None], rate, win_length=SMOOTHED)[0]
    level = sound[: len(sound) // FRAME * FRAME].view(-1, FRAME).square().mean(1)
    loud = level > level.max() * 10 ** (-LOUD_DB / 10)
    at = torch.arange(len(pitch)) * len(loud) // len(pitch)
    semitones = 12 * pitch[loud[at]].log2()
    low, high = torch.quantile(semitones, torch.tensor([0.1, 0.9]))
    return float(high - low)
