"""Judgement of a clip by listeners' models: how natural it is, which words it holds, who speaks.

Naturalness is DistillMOS (packages distillmos and xls-r-sqa), 1 to 5. Words are those of Moonshine
base (useful-moonshine-onnx; its weights are in the npm package @usefulsensors/moonshine-js). Who
speaks is Resemblyzer's embedding, compared by cosine. Every clip is brought to the same peak first.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import soxr
import torch

from benchmarks.word_errors import WordErrors, edit_distance, words_of

RATE = 16_000
PEAK = 0.7


def prepared(samples: np.ndarray, rate: int) -> np.ndarray:
    """Mono float32 [S] at 16 kHz, of the same peak."""
    resampled = soxr.resample(samples, rate, RATE).astype(np.float32)
    return np.clip(resampled * (PEAK / max(1e-6, float(np.abs(resampled).max()))), -1, 1)


def spelled(text: str) -> str:
    """Figures as words: a recogniser may write 6 where "six" was meant."""
    from num2words import num2words

    return re.sub(r"\d+", lambda found: f" {num2words(int(found[0]))} ", text.replace(",", ""))


class Listeners:
    """The three models, on the CPU."""

    def __init__(self, moonshine: Path) -> None:
        import distillmos
        import moonshine_onnx
        import tokenizers
        from resemblyzer import VoiceEncoder

        vocabulary = Path(moonshine_onnx.__file__).with_name("assets") / "tokenizer.json"
        self._tokens = tokenizers.Tokenizer.from_file(str(vocabulary))
        self._recogniser = moonshine_onnx.MoonshineOnnxModel(
            models_dir=str(moonshine), model_name="base"
        )
        self._natural = distillmos.ConvTransformerSQAModel().eval()
        self._speaker = VoiceEncoder("cpu", verbose=False)

    @torch.inference_mode()
    def naturalness(self, clip: np.ndarray) -> float:
        """1 to 5 of a prepared clip."""
        return float(self._natural(torch.from_numpy(clip)[None]))

    def words(self, clip: np.ndarray) -> str:
        """Return the words that are recognised in a prepared clip."""
        return self._tokens.decode_batch(self._recogniser.generate(clip[None]))[0]

    def speaker(self, clip: np.ndarray) -> np.ndarray:
        """Unit vector [256] of who speaks in a prepared clip."""
        return self._speaker.embed_utterance(clip)


def errors(meant: str, heard: str) -> WordErrors:
    """Words that are wrong, left out or put in."""
    wanted = words_of(spelled(meant.replace("-", " ")))
    found = words_of(spelled(heard.replace("-", " ")))
    return WordErrors(edit_distance(wanted, found), len(wanted))
