"""Speed of synthesis, one stream and eight at once, and whether batching changes the audio.

The whole path in one process: text, prompt, language model, audio decoder, 16-bit samples.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from benchmarks.report import Figure, Report, arguments, publish
from tts.config.defaults import default_values
from tts.config.pipeline import AudioGenerationConfig, load_config
from tts.factory import create_service
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import AudioChunk, Done, SamplingOverrides, SpeechRequest

BAR = 2.5  # seconds of audio per second, one stream
GAIN_BAR = 1.3  # eight streams together, against one
STREAMS = 8
TEXT = (
    "The ferry leaves at noon and returns before dark. Bring a coat, because the wind is cold on "
    "the water, and something to eat. We will meet you at the harbor."
)


@dataclass(frozen=True, slots=True)
class SynthesizedAudio:
    """One request's audio and its duration."""

    audio: bytes
    audio_s: float
    wall_s: float

    @property
    def speed(self) -> float:
        return self.audio_s / self.wall_s


async def spoken(synthesizer: Synthesizer, text: str, seed: int) -> SynthesizedAudio:
    """Stream a text and keep everything."""
    started = time.perf_counter()
    data, audio_s = [], 0.0
    request = SpeechRequest(text=text, sampling=SamplingOverrides(seed=seed))
    async with aclosing(synthesizer.stream(request)) as events:
        async for event in events:
            match event:
                case AudioChunk():
                    data.append(event.data)
                case Done(result):
                    audio_s = result.usage.audio_s
    return SynthesizedAudio(b"".join(data), audio_s, time.perf_counter() - started)


async def together(
    synthesizer: Synthesizer, text: str, seeds: Sequence[int]
) -> list[SynthesizedAudio]:
    """Run one stream for each seed, all started at once."""
    return await asyncio.gather(*(spoken(synthesizer, text, seed) for seed in seeds))


async def measure(synthesizer: Synthesizer, repeat: int, text: str = TEXT) -> Report:
    """Measure all figures; the first round warms up and is not counted."""
    seeds = range(STREAMS)
    await spoken(synthesizer, text, seed=STREAMS)
    alone = [await spoken(synthesizer, text, seed) for seed in seeds]
    one = [await spoken(synthesizer, text, seed=0) for _ in range(repeat)]
    rounds = []
    for _ in range(repeat):
        started = time.perf_counter()
        crowd = await together(synthesizer, text, seeds)
        rounds.append(sum(s.audio_s for s in crowd) / (time.perf_counter() - started))
    same = sum(a.audio == b.audio for a, b in zip(alone, crowd, strict=True))
    request = SpeechRequest(text=text, sampling=SamplingOverrides(seed=0), check=False)
    unary = await synthesizer.synthesize(request)
    single = Figure("one stream", tuple(s.speed for s in one), "x real time", BAR, at_least=True)
    return Report(
        "speed",
        (
            single,
            Figure(
                f"{STREAMS} streams together",
                tuple(rounds),
                "x real time",
                bar=round(GAIN_BAR * single.value, 2),
                at_least=True,
                note=f"{GAIN_BAR} x one stream",
            ),
            Figure(
                f"same seed, alone = among {STREAMS}",
                (float(same),),
                f"of {STREAMS} identical",
                bar=STREAMS,
                at_least=True,
            ),
            Figure(
                "same seed, streamed = unary",
                (float(unary.audio == alone[0].audio),),
                "of 1 identical",
                bar=1,
                at_least=True,
            ),
        ),
    )


async def run(model: str, repeat: int, text: str = TEXT) -> Report:
    """Load the model, measure, stop it."""
    config = load_config(AudioGenerationConfig, {}, base=default_values(model))
    service = create_service(config)
    if service.synthesizer is None:
        raise SystemExit("this model cannot speak")
    try:
        return await measure(service.synthesizer, repeat, text)
    finally:
        await service.client.close()


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Seconds of audio made per second, in process.", repeat=5)
    options.add_argument("--text", default=TEXT)
    args = options.parse_args(argv)
    return publish(asyncio.run(run(args.model, args.repeat, args.text)))


if __name__ == "__main__":
    sys.exit(main())
