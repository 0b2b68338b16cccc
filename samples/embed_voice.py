"""Speak one text in this process, without a server, and write the audio as it is made.

python -m samples.embed_voice "Good morning." morning.wav --voice owen
"""

from __future__ import annotations

import argparse
import wave

import numpy as np

from tts import load


def main() -> None:
    parser = argparse.ArgumentParser(description="Speak one text in this process.")
    parser.add_argument("text")
    parser.add_argument("out", help="WAV file to write")
    parser.add_argument("--model", default="", help="folder or hub name; default: the built-in")
    parser.add_argument("--voice", default="", help="default: the model's")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    with load(arguments.model) as voice, wave.open(arguments.out, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(voice.sample_rate)
        parts = voice.stream(arguments.text, voice=arguments.voice, seed=arguments.seed)
        for part in parts:
            out.writeframes(np.round(part.samples * 32767).astype("<i2").tobytes())
            print(f"{len(part.samples)} samples at {part.sample_offset}")
        print(f"{out.getnframes() / voice.sample_rate:.2f} s")


if __name__ == "__main__":
    main()
