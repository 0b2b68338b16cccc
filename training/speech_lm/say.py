"""Speak a text to a sound file.

    python -m training.speech_lm.say --weights runs/lm/lm.safetensors \
        --codec runs/codec/source_free.safetensors --config runs/codec/source_free.json \
        --voice af_heart --text "Good morning." --out said.wav

--reference FILE (24 kHz, mono) and --voice-encoder FILE instead of --voice follow a clip. With
--phonemes the text is the teacher's symbols, whose file --package holds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import soundfile

from training.kokoro.packages import symbols
from training.speech_codec.render import read
from training.speech_lm.speaker import Speaker
from training.speech_lm.vocabulary import Symbols
from training.speech_lm.writer import tokens_of, tokens_of_phonemes


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("weights", "codec", "config", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    voice = parser.add_mutually_exclusive_group(required=True)
    voice.add_argument("--voice", help="a name in voices.json")
    voice.add_argument("--reference", type=Path, help="a clip to follow")
    parser.add_argument("--voice-encoder", type=Path, help="weights, to follow a clip")
    parser.add_argument("--text", required=True)
    parser.add_argument("--phonemes", action="store_true", help="the text is phonemes")
    parser.add_argument("--package", type=Path, help="folder with the teacher's symbols")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.phonemes and not args.package:
        parser.error("--phonemes needs --package")
    if args.reference and not args.voice_encoder:
        parser.error("--reference needs --voice-encoder")
    speaker = Speaker(args.weights, args.codec, args.config, args.voice_encoder)
    if args.voice and args.voice not in speaker.voices:
        parser.error(f"--voice: {args.voice} is none of {', '.join(sorted(speaker.voices))}")
    row = speaker.voices[args.voice] if args.voice else speaker.voice_of(read(args.reference))
    text = tokens_of(args.text)
    if args.phonemes:
        text = tokens_of_phonemes(args.text, Symbols(symbols(args.package)))
    began = time.monotonic()
    samples = speaker.say(row, text, args.seed)
    rate = speaker.codec.config.sample_rate
    soundfile.write(args.out, samples, rate)
    print(f"{args.out}: {len(samples) / rate:.2f} s in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
