"""Duration of a decode call of a published codec, device and host, by number of windows.

    first      first blocks of streams without a voice prompt: they determine the latency
    full       blocks in the middle of streams, all of one shape
    mixture    first, middle and last blocks of streams of different lengths

With kept states (`stateful`) a block in the middle is one like the first, of the last chunk's size.
The codecs have the published sizes and random weights. `device` is from the call to the last sample
on the host on an idle device, `host` the time of the calling thread.
It needs a CUDA device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from benchmarks.report import Figure, Report, arguments, publish
from decoder import (
    AudioDecoder,
    DecodeRequest,
    DecoderStream,
    DecodeWindow,
    Renderer,
    StreamingOptions,
    create_decoder,
    with_graphs,
)

BATCHES = (1, 8, 32)
FRAMES = (3, 17, 41, 58, 96, 130)  # lengths of the streams
CODECS: dict[str, tuple[str, dict[str, bool]]] = {  # name and options, by label
    "xcodec2": ("xcodec2", {}),
    "snac": ("snac", {}),
    "qwen3_tts": ("qwen3_tts_tokenizer_12hz", {}),
    "qwen3_tts_stateful": ("qwen3_tts_tokenizer_12hz", {"stateful": True}),
}


def windows_of(decoder: AudioDecoder, options: StreamingOptions, frames: int) -> list[DecodeWindow]:
    """Return all windows of a stream of so many frames."""
    spec = decoder.spec
    made = np.random.default_rng(frames)
    codes = tuple(made.integers(0, spec.codebook_size, frames * spec.codes_per_frame).tolist())
    stream = DecoderStream(spec, options)
    return [*stream.push(codes), *stream.finish()]


def kinds_of(decoder: AudioDecoder, options: StreamingOptions) -> dict[str, list[DecodeWindow]]:
    """Return some windows of each kind."""
    if decoder.spec.keeps_state:
        last = StreamingOptions((options.chunk_sizes or (1,))[-1:])
        pairs = ("first", options), ("full", last)
        return {kind: windows_of(decoder, own, FRAMES[-1])[:1] for kind, own in pairs}
    streams = [windows_of(decoder, options, frames) for frames in FRAMES]
    longest = streams[-1]
    return {
        "first": longest[:1],
        "full": longest[-3:-2],
        "mixture": [block for stream in streams for block in (stream[0], stream[-1], *stream[1:3])],
    }


def calls_ms(
    renderer: Renderer, windows: Sequence[DecodeWindow], repeat: int
) -> Iterator[tuple[float, float]]:
    """Measure calls one after the other: time until the samples are available, time of the
    launch.
    """
    for _ in range(repeat + 2):
        ready = [DecodeRequest(window) for window in windows]
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        rendered = renderer.launch(ready)
        launched_s = time.perf_counter()
        while not rendered.is_ready:
            pass
        done_s = time.perf_counter()
        rendered.samples()
        yield 1000 * (done_s - started_s), 1000 * (launched_s - started_s)


def measure(repeat: int, codecs: Sequence[str] = tuple(CODECS)) -> Report:
    """Measure every codec, kind and batch size."""
    figures = []
    for label in codecs:
        name, given = CODECS[label]
        plain = create_decoder(name, options=given, test_mode=True, device="cuda")
        options = plain.spec.recommended
        renderer = Renderer(with_graphs(plain, options))
        for kind, windows in kinds_of(plain, options).items():
            for count in BATCHES:
                batch = [windows[n % len(windows)] for n in range(count)]
                device, host = zip(*list(calls_ms(renderer, batch, repeat))[2:], strict=True)
                title = f"{label}, {kind}, {count} windows"
                figures.append(Figure(f"{title}: device", device, "ms"))
                figures.append(Figure(f"{title}: host", host, "ms"))
    return Report("codec_calls", tuple(figures))


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Time of a codec's decode calls.", repeat=20, has_model=False)
    options.add_argument("--codec", choices=tuple(CODECS), action="append")
    args = options.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("decode calls are measured on a CUDA device: there is none")
    return publish(measure(args.repeat, args.codec or tuple(CODECS)))


if __name__ == "__main__":
    sys.exit(main())
