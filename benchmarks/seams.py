"""Fidelity of streaming: streamed against whole audio of each codec, in dB.

A stream of random codes is rendered twice, in one block and in the codec's recommended blocks, and
with less context for comparison. The signal-to-noise ratio is that of the whole audio to the
difference. A transformer codec is measured with a voice prompt as its recommended options use it.

Without a codec folder the networks have their published sizes and random weights: for convolutions
that is sufficient, because samples do not depend on anything beyond their field; the effect of a
shorter past on a trained transformer depends on its weights. Codec `embedded` is not
measured: its blocks are masked, and streamed audio equals the whole (tests/decoder).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.report import Figure, Report, arguments, publish
from decoder import (
    AudioDecoder,
    DecodeRequest,
    DecoderStream,
    PrependPromptSpeechTokens,
    StreamingOptions,
    StreamState,
    create_decoder,
    render,
)

BAR_DB = 100.0  # below what 16-bit samples can hold
PULSES_DB = 50.0  # the phase of pulses adds up the rounding of every pitch
SAME_DB = 200.0  # value for bit-identical audio
SECONDS = 3.0
PROMPT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Subject:
    """One codec to measure: a registered name with random weights, or a folder."""

    source: str | Path
    options: Mapping[str, object] = field(default_factory=dict)
    bar_db: float = BAR_DB

    def create(self) -> AudioDecoder:
        return create_decoder(self.source, options=self.options, test_mode=True)


SUBJECTS = (
    Subject("snac"),
    Subject("dac", {"num_codebooks": 2}),
    Subject("mimi", {"num_codebooks": 8}),
    Subject("mimi", {"num_codebooks": 8, "stateful": True}),
    Subject("qwen3_tts_tokenizer_12hz"),
    Subject("qwen3_tts_tokenizer_12hz", {"stateful": True}),
    Subject("xcodec2"),
    Subject("xcodec2", {"crossfade_ms": 0}),
    Subject("neucodec"),
    Subject("neucodec", {"crossfade_ms": 0}),
    Subject("source_filter", bar_db=PULSES_DB),
)


def settings(decoder: AudioDecoder) -> Iterator[tuple[str, StreamingOptions]]:
    """Iterate over the measured options: the recommended ones, then with less and less context."""
    spec, frame = decoder.spec, decoder.spec.codes_per_frame
    best = spec.recommended
    yield "recommended", best
    if spec.keeps_state or decoder.options.crossfade_ms:
        return
    if best.look_ahead >= 2 * frame:
        shorter = best.look_ahead // 2 // frame * frame
        yield "half the look-ahead", replace(best, look_ahead=shorter)
    if best.look_ahead > frame:
        yield "the first block's look-ahead one frame", replace(best, first_look_ahead=frame)
    if best.look_ahead:
        yield "no look-ahead", replace(best, look_ahead=0)
    yield "no context", replace(best, look_ahead=0, buffer=0, prepend=_NEVER)


_NEVER = PrependPromptSpeechTokens.NEVER


def random_codes(decoder: AudioDecoder, seconds: float, seed: int) -> tuple[int, ...]:
    """Return whole frames of about so many seconds."""
    frames = math.ceil(seconds * decoder.spec.sample_rate / decoder.spec.samples_per_frame)
    count = frames * decoder.spec.codes_per_frame
    codes = np.random.default_rng(seed).integers(0, decoder.spec.codebook_size, count)
    return tuple(codes.tolist())


def stream(
    decoder: AudioDecoder,
    options: StreamingOptions,
    codes: Sequence[int],
    prompt: Sequence[int] = (),
) -> list[np.ndarray]:
    """Return the audio of one stream, block by block, as in the service."""
    blocks, state = DecoderStream(decoder.spec, options, prompt_codes=prompt), StreamState()
    windows = [*blocks.push(codes), *blocks.finish()]
    return [render(decoder, [DecodeRequest(window, state)])[0] for window in windows]


def decibels(whole: np.ndarray, other: np.ndarray) -> float:
    """Return the signal-to-noise ratio of `other` as a copy of `whole`."""
    noise = np.square(whole.astype(np.float64) - other).sum()
    signal = np.square(whole.astype(np.float64)).sum()
    return float(min(10 * np.log10(signal / noise), SAME_DB)) if noise else SAME_DB


def measure(subject: Subject, seconds: float = SECONDS, repeat: int = 1) -> Iterator[Figure]:
    """Iterate over one figure per setting, over `repeat` streams of random codes."""
    decoder = subject.create()
    best = decoder.spec.recommended
    prompt = random_codes(decoder, PROMPT_SECONDS, seed=999) if best.prepend is not _NEVER else ()
    prompt = prompt[: decoder.spec.voice_codes or None]
    streams = [random_codes(decoder, seconds, seed) for seed in range(repeat)]
    one_block = StreamingOptions(masks=best.masks, prepend=best.prepend)
    wholes = [np.concatenate(stream(decoder, one_block, codes, prompt)) for codes in streams]
    for name, options in settings(decoder):
        parts = [np.concatenate(stream(decoder, options, codes, prompt)) for codes in streams]
        values = tuple(decibels(*pair) for pair in zip(wholes, parts, strict=True))
        label = f"{decoder.spec.name}{way(decoder)}: {name}"
        bar = subject.bar_db if options is best and hears_enough(decoder) else None
        yield Figure(label, values, "dB", bar, at_least=True, note=describe(decoder, options))


def way(decoder: AudioDecoder) -> str:
    """Describe the streaming options that differ from the default."""
    fade = decoder.options.crossfade_ms
    return ", stateful" if decoder.options.stateful else f", crossfade {fade:g} ms" if fade else ""


def hears_enough(decoder: AudioDecoder) -> bool:
    """Whether the recommended context covers the receptive field: then no sample may differ."""
    spec, best = decoder.spec, decoder.spec.recommended
    fields = (spec.receptive_field, spec.right_field)
    given = (best.buffer, best.look_ahead)
    covered = all(f is not None and f <= g for f, g in zip(fields, given, strict=True))
    return covered or decoder.options.stateful


def describe(decoder: AudioDecoder, options: StreamingOptions) -> str:
    """Describe the options, and the number of codes before the first audio."""
    first = (options.chunk_sizes or (0,))[0] + options.look_ahead_of(0)
    chunks = ",".join(map(str, options.chunk_sizes or ()))
    return (
        f"chunks {chunks}, buffer {options.buffer}, look-ahead {options.look_ahead}; "
        f"first block after {first} codes ({1000 * first / decoder.spec.codes_per_second:.0f} ms)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Streamed against whole audio of each codec.", repeat=1)
    options.add_argument("codec", nargs="*", type=Path, help="codec folders to measure instead")
    options.add_argument("--seconds", type=float, default=SECONDS, help="length of a stream")
    args = options.parse_args(argv)
    subjects = [Subject(folder) for folder in args.codec] if args.codec else SUBJECTS
    figures = [f for s in subjects for f in measure(s, args.seconds, args.repeat)]
    return publish(Report("seams", tuple(figures)))


if __name__ == "__main__":
    sys.exit(main())
