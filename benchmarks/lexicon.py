"""Cost of lexicons: time of the first sentence's segmentation, reading of the file, and memory.

A lexicon of random words in ARPAbet, as CMUdict has them, is read for the built-in voice, which
reads phonemes; `--model` names another checkpoint.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from benchmarks.first_audio import TEXTS
from benchmarks.report import Figure, Report, arguments, publish
from tts.config.defaults import embedded_folder
from tts.families.prompt import PromptBuilder
from tts.text.lexicon.entries import Lexicon
from tts.text.lexicon.files import load_lexicon
from tts.text.segmenter import TextOptions, spoken_text

SIZES = (10, 10_000, 100_000)
BAR_US = 100.0  # added to a sentence: a thousandth of the time to the first audio
CONSONANTS, VOWELS = "BDFGKLMNPRSTVZ", ("AA1", "EH0", "IH1", "OW2", "UW0")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SENTENCES = 50  # of one measurement


def write_words(path: Path, size: int) -> None:
    """Write a file of random words with six phones each."""
    chance = Random(size)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(size):
            word = "".join(chance.choices(LETTERS, k=7))
            phones = [chance.choice(kind) for _ in range(3) for kind in (CONSONANTS, VOWELS)]
            file.write(f"{word}  {' '.join(phones)}\n")


def sentence_us(lexicons: Sequence[Lexicon], repeat: int) -> tuple[float, ...]:
    """Return the processor time of a sentence's segmentation in microseconds, `repeat` times."""
    options, times = TextOptions(lexicons=tuple(lexicons)), []
    for _ in range(repeat):
        started = time.process_time()
        for number in range(SENTENCES):
            spoken_text(TEXTS[number % len(TEXTS)], options)
        times.append(1e6 * (time.process_time() - started) / SENTENCES)
    return tuple(times)


def figures(folder: Path, prompts: PromptBuilder, size: int, repeat: int) -> Iterator[Figure]:
    """Iterate over the figures of a lexicon of some size."""
    path, name = folder / f"{size}.dict", f"{size:,} entries"
    write_words(path, size)
    before, started = resident_mib(), time.process_time()
    lexicon = load_lexicon(path, prompts.pronounced, ascii_only=True)
    yield Figure(f"{name}: reading", (time.process_time() - started,), "s")
    yield Figure(f"{name}: memory", (resident_mib() - before,), "MiB")
    without, with_lexicon = sentence_us((), repeat), sentence_us((lexicon,), repeat)
    added = tuple(b - a for a, b in zip(sorted(without), sorted(with_lexicon), strict=True))
    yield Figure(f"{name}: added to a sentence", added, "us", bar=BAR_US)


def resident_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Cost of lexicons of several sizes.", repeat=5)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="most entries")
    args = parser.parse_args(argv)
    prompts = PromptBuilder.load(Path(args.model or embedded_folder()))
    plain = Figure("a sentence without a lexicon", sentence_us((), args.repeat), "us")
    with tempfile.TemporaryDirectory() as folder:
        sizes = [size for size in SIZES if size <= args.largest]
        found = [f for n in sizes for f in figures(Path(folder), prompts, n, args.repeat)]
    return publish(Report("lexicon", (plain, *found)))


if __name__ == "__main__":
    sys.exit(main())
