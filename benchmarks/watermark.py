"""Values that PerTh finds in marked speech after conversions, the size of the mark, and its cost.

The texts are spoken twice with the same seeds, with a watermark and without. The value is from 0,
not marked, to 1. Needs the extra `watermark`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from io import BytesIO
from pathlib import Path

import numpy as np
import soundfile

import tts
from benchmarks.report import Figure, Report, arguments, lines_of, publish
from decoder import AudioEncoding, AudioFormat, TimeStretcher, create_encoder, decode_samples
from decoder import resample as resampled
from decoder.pcm.watermark import StreamMarker
from tts.api.audio import encoded
from tts.speech.watermark import load_watermark

TEXTS = Path(__file__).with_name("held_out.txt")
FOUND = 0.5
BLOCK_S = 0.2

Samples = np.ndarray
Conversion = Callable[[Samples, int], tuple[Samples, int]]


def conversions() -> dict[str, Conversion]:
    """Return functions of samples and their rate."""
    random = np.random.default_rng(0)

    def noise(decibels: float) -> Conversion:
        def add(samples: Samples, rate: int) -> tuple[Samples, int]:
            size = np.sqrt(np.square(samples).mean() / 10 ** (decibels / 10))
            return samples + size * random.standard_normal(len(samples)), rate

        return add

    def stretched(samples: Samples, rate: int) -> tuple[Samples, int]:
        stretcher = TimeStretcher(1.25, rate)
        return np.concatenate([stretcher.process(samples), stretcher.finish()]), rate

    def high(samples: Samples, rate: int) -> tuple[Samples, int]:
        spectrum = np.fft.rfft(samples)
        spectrum[: round(300 * len(samples) / rate)] = 0
        return np.fft.irfft(spectrum, len(samples)), rate

    def telephone(samples: Samples, rate: int) -> tuple[Samples, int]:
        encoder = create_encoder(AudioFormat(AudioEncoding.MULAW, 8000))
        data = encoder.write(resampled(samples, rate, 8000)) + encoder.finish()
        return decode_samples(data, AudioEncoding.MULAW), 8000

    return {
        "unchanged": lambda samples, rate: (samples, rate),
        "MP3": _file(AudioEncoding.MP3),
        "Ogg Opus": _file(AudioEncoding.OGG_OPUS),
        "mu-law at 8 kHz": telephone,
        "40 dB quieter": lambda samples, rate: (samples * 0.01, rate),
        "a quarter faster, same pitch": stretched,
        "first half second": lambda samples, rate: (samples[: rate // 2], rate),
        "without all below 300 Hz": high,
        "white noise at 30 dB": noise(30),
        "white noise at 20 dB": noise(20),
        "5 % slower and lower": lambda samples, rate: (samples, round(rate / 1.05)),
    }


def _file(encoding: AudioEncoding) -> Conversion:
    def convert(samples: Samples, rate: int) -> tuple[Samples, int]:
        data = encoded(samples.astype(np.float32), rate, encoding)
        found: tuple[Samples, int] = soundfile.read(BytesIO(data), dtype="float32")
        return found

    return convert


def speak(texts: Sequence[str], *, watermark: bool) -> tuple[list[Samples], int]:
    """Return a clip for each text, float32 [S], and their rate."""
    with tts.load(watermark=watermark) as voice:
        said = [voice.say(text, seed=seed) for seed, text in enumerate(texts)]
    return [audio.samples for audio in said], said[0].sample_rate


def detector() -> Callable[[Samples, int], float]:
    """Return the value of samples at a rate."""
    module = import_module("perth.perth_net.perth_net_implicit.perth_watermarker")
    with redirect_stdout(sys.stderr):  # it prints that it is loaded
        network = module.PerthImplicitWatermarker()

    def detect(samples: Samples, rate: int) -> float:
        clip = samples.astype(np.float32)
        return float(network.get_watermark(clip, sample_rate=rate, round=False))

    return detect


def values(name: str, found: Sequence[float]) -> Figure:
    """Return the values of clips."""
    count = sum(value >= FOUND for value in found)
    return Figure(name, tuple(found), "", note=f"{count} of {len(found)} are {FOUND} or more")


def cost(clips: Sequence[Samples], rate: int) -> Figure:
    """Return the processor time of marking by blocks."""
    watermark, block = load_watermark(), round(BLOCK_S * rate)
    times = []
    for clip in clips:
        marker, started = StreamMarker(watermark, rate), time.thread_time()
        for start in range(0, len(clip), block):
            marker.process(clip[start : start + block])
        times.append(1000 * (time.thread_time() - started) * rate / len(clip))
    return Figure("work", tuple(times), "ms per s of audio", note="on the calling thread")


def figures(texts: Sequence[str]) -> Iterator[Figure]:
    """Iterate over all figures."""
    plain, rate = speak(texts, watermark=False)
    marked, _ = speak(texts, watermark=True)
    detect = detector()
    yield values("not marked", [detect(clip, rate) for clip in plain])
    for name, convert in conversions().items():
        yield values(f"marked, {name}", [detect(*convert(clip, rate)) for clip in marked])
    pairs = list(zip(plain, marked, strict=True))
    ratios = [float(np.square(b - a).mean() / np.square(a).mean()) for a, b in pairs]
    decibels = tuple(10 * math.log10(ratio) for ratio in ratios)
    yield Figure("change relative to the speech", decibels, "dB")
    yield cost(plain, rate)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Watermark of generated audio.", repeat=20, has_model=False)
    args = parser.parse_args(argv)
    return publish(Report("watermark", tuple(figures(lines_of(TEXTS, args.repeat)))))


if __name__ == "__main__":
    sys.exit(main())
