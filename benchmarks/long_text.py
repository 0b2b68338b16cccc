"""Whether the voice of a long text stays the same: speaker and level, minute by minute.

A text is spoken with `tts.say` in pieces, as a book, and each minute of audio is compared with the
first: by the cosine of a speaker encoder's embeddings (Resemblyzer) and by the level of its louder
frames. An embedding is the mean of the encoder's over many parts of a minute. Needs the extra
`listeners`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import soundfile

from benchmarks.report import Figure, Report, arguments, lines_of, publish
from benchmarks.speech_judges import FRAME, LOUD_DB, prepared
from tts.say import main as say

HELD_OUT = Path(__file__).parent / "held_out.txt"
MINUTES = 20
MINUTE_S = 60
CHARACTERS_PER_MINUTE = 930  # of the built-in voice, with its pauses
SENTENCES = 4  # of a paragraph
FALL_BAR, LEVEL_BAR = 0.02, 1.0  # cosine; dB
SEED = 1

Encoder = Callable[[np.ndarray], np.ndarray]
"""Function from a clip that `prepared` made to a unit vector."""


def book_of(minutes: float) -> str:
    """Return paragraphs of the held-out sentences, repeated, that last about so long."""
    count = int(minutes * CHARACTERS_PER_MINUTE)
    sentences = cycle(lines_of(HELD_OUT))
    paragraphs, size = [], 0
    while size < count:
        paragraphs.append(" ".join(islice(sentences, SENTENCES)))
        size += len(paragraphs[-1])
    return "\n\n".join(paragraphs)


def minutes_of(path: Path) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the whole minutes of an audio file: float32 [S] and the sample rate in Hz."""
    with soundfile.SoundFile(path) as file:
        size = MINUTE_S * file.samplerate
        for samples in file.blocks(size, dtype="float32"):
            if len(samples) == size:
                yield samples, file.samplerate


def level_db(samples: np.ndarray) -> float:
    """Return the mean power of the louder frames in dB, relative to full scale."""
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    power = np.square(frames, dtype=np.float64).mean(1)
    loud = power[power > power.max() * 10 ** (-LOUD_DB / 10)]
    return float(10 * np.log10(max(1e-12, loud.mean())))


def figures(path: Path, embed: Encoder) -> Iterator[Figure]:
    """Yield what changes from the first minute of an audio file to the others."""
    vectors, levels = [], []
    for samples, rate in minutes_of(path):
        vectors.append(embed(prepared(samples, rate)))
        levels.append(level_db(samples))
        cosine = float(vectors[-1] @ vectors[0])
        print(f"minute {len(levels)}: {cosine:.4f}, {levels[-1]:.2f} dB", file=sys.stderr)
    if len(vectors) < 3:
        raise SystemExit("needs three minutes of audio; ask for more --minutes")
    cosines = [float(vector @ vectors[0]) for vector in vectors[1:]]
    third = max(1, len(cosines) // 3)
    fall = float(np.mean(cosines[:third]) - np.mean(cosines[-third:]))
    note = "mean of the first third of the minutes less that of the last"
    yield Figure("cosine to the first minute", tuple(cosines), "")
    yield Figure("fall of the cosine", (fall,), "", bar=FALL_BAR, note=note)
    changes = tuple(abs(level - levels[0]) for level in levels[1:])
    yield Figure("change of the level", changes, "dB", bar=LEVEL_BAR)


def speaker_encoder() -> Encoder:
    """Return Resemblyzer's encoder."""
    from resemblyzer import VoiceEncoder

    encoder = VoiceEncoder("cpu", verbose=False)

    def embed(clip: np.ndarray) -> np.ndarray:
        return np.asarray(encoder.embed_utterance(clip))

    return embed


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Speaker and level of a long text, minute by minute.", repeat=1)
    options.add_argument("--minutes", type=float, default=MINUTES, help="about so much audio")
    options.add_argument("--voice", default="", help="voice (default: the model's)")
    options.add_argument("--audio", type=Path, help="judge this file instead of a new one")
    args = options.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        text, audio = Path(folder, "book.txt"), Path(folder, "book.flac")
        text.write_text(book_of(args.minutes), encoding="utf-8")
        words = ["-f", str(text), "-o", str(audio), "--seed", str(SEED), "--jobs", "8", "-q"]
        words += ["--voice", args.voice] if args.voice else []
        words += ["--model", args.model] if args.model else []
        if args.audio is None and say(words) != 0:
            return 1
        found = tuple(figures(args.audio or audio, speaker_encoder()))
    return publish(Report("long text", found))


if __name__ == "__main__":
    sys.exit(main())
