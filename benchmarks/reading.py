"""Share of written expressions that text normalisation reads as a careful reader would.

`tests/tts/text/reading_fresh.tsv` was written without the rules in sight, `reading_informed.tsv`
with them. A reading is right when it has the words of an accepted one: case, punctuation, hyphens
and an "and" inside a number do not count. `--failures` prints the wrong ones to standard error.

WeTextProcessing (`pip install WeTextProcessing`) is measured on the same tables if it is installed.

`--published FOLDER` also reads a normaliser's own test cases, files of lines `written~spoken` (NeMo
text processing: `tests/nemo_text_processing/en/data_text_normalization` of its repository) or
`written => spoken` (WeTextProcessing: `tn/english/test/data`). They hold one reading each: spaces
and every "and" do not count, so that "p m" is "pm". What remains wrong is partly another choice
("minus", "negative").
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.report import Figure, Report, arguments, publish
from tts.text.segmenter import TextOptions, spoken_text

BAR_PERCENT = 97.0
TABLES = Path(__file__).parent.parent / "tests" / "tts" / "text"
FRESH, INFORMED = TABLES / "reading_fresh.tsv", TABLES / "reading_informed.tsv"
LONG_CHARACTERS = 100_000
OPTIONS = TextOptions(max_characters=10_000)
_NOT_WORDS = re.compile(r"[^\w\s']|_")
_AND = re.compile(r"\b(hundred|thousand|million|billion|trillion) and\b")

Normaliser = Callable[[str], str]


@dataclass(frozen=True)
class Case:
    """A written text, its class, and patterns of the accepted readings."""

    kind: str
    written: str
    spoken: str

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        readings = (_AND.sub(r"\1", reading.strip()) for reading in self.spoken.split(" | "))
        return re.compile("|".join(readings))

    def accepts(self, said: str) -> bool:
        """Return whether a reading has the words of an accepted one."""
        return self._pattern.fullmatch(words_of(said)) is not None


def words_of(said: str) -> str:
    """Return the words of a reading in small letters, without "and" inside numbers."""
    words = " ".join(_NOT_WORDS.sub(" ", said.lower()).split())
    return _AND.sub(r"\1", words)


def cases(path: Path) -> tuple[Case, ...]:
    """Return the cases of a table: class, written and spoken, separated by tabs."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(Case(*line.split("\t")) for line in lines if "\t" in line)


def published(folder: Path) -> tuple[Case, ...]:
    """Return a normaliser's own cases, of all text files of a folder; the class is the file's name.

    Lines without a reading, or with several written forms, are left out.
    """
    found = []
    for path in sorted(folder.glob("*.txt")):
        kind = path.stem.removeprefix("test_cases_")
        for line in path.read_text(encoding="utf-8").splitlines():
            written, sign, spoken = line.partition(" => " if " => " in line else "~")
            if sign and written.strip() and words_of(spoken):
                found.append(Case(kind, written.strip(), spoken.strip()))
    return tuple(found)


def is_same(said: str, spoken: str) -> bool:
    """Return whether two readings differ in spaces, signs and "and" only."""
    one, other = (words_of(text).split() for text in (said, spoken))
    return "".join(w for w in one if w != "and") == "".join(w for w in other if w != "and")


def read(text: str) -> str:
    """Return what the service says, sentence by sentence."""
    return spoken_text(text, OPTIONS)


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that was read wrong."""

    case: Case
    said: str

    def __str__(self) -> str:
        said, case = words_of(self.said), self.case
        return f"{case.kind}: {case.written}\n  said     {said}\n  expected {case.spoken}"


def failures(table: Sequence[Case], normalise: Normaliser) -> tuple[Failure, ...]:
    """Return the cases of a table that a normaliser reads wrong."""
    pairs = ((case, normalise(case.written)) for case in table)
    return tuple(Failure(case, said) for case, said in pairs if not case.accepts(said))


def published_failures(table: Sequence[Case], normalise: Normaliser) -> tuple[Failure, ...]:
    """Return the cases of a normaliser that another one reads in other words."""
    pairs = ((case, normalise(case.written)) for case in table)
    return tuple(Failure(case, said) for case, said in pairs if not is_same(said, case.spoken))


def peer() -> Normaliser | None:
    """Return WeTextProcessing's normaliser; None when it is not installed."""
    if importlib.util.find_spec("tn") is None:
        return None
    normaliser = importlib.import_module("tn.english.normalizer").Normalizer()
    return lambda text: str(normaliser.normalize(text))


def shares(name: str, normalise: Normaliser, bar: float | None) -> Iterator[Figure]:
    """Iterate over the percentages of both tables, right readings of each."""
    for label, path in (("fresh", FRESH), ("informed", INFORMED)):
        table = cases(path)
        wrong = failures(table, normalise)
        yield _share(f"{label}, {name}", len(wrong), len(table), bar)


def kinds(wrong: Sequence[Failure]) -> Iterator[Figure]:
    """Iterate over the percentage of each class, of both tables."""
    totals = Counter(case.kind for case in (*cases(FRESH), *cases(INFORMED)))
    missed = Counter(failure.case.kind for failure in wrong)
    return (_share(kind, missed[kind], totals[kind], None) for kind in sorted(totals))


def _share(name: str, wrong: int, total: int, bar: float | None) -> Figure:
    percent = 100 * (total - wrong) / total
    return Figure(name, (percent,), "%", bar, True, f"{total - wrong} of {total}")


def speed(repeat: int) -> Figure:
    """Return the time of a long text that repeats both tables."""
    written = " ".join(case.written for case in (*cases(FRESH), *cases(INFORMED)))
    text = (written * (LONG_CHARACTERS // len(written) + 1))[:LONG_CHARACTERS]
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        read(text)
        times.append(1000 * (time.perf_counter() - started))
    return Figure("100,000 characters of these", tuple(times), "ms")


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Right readings of written English.", repeat=3, has_model=False)
    parser.add_argument("--failures", action="store_true", help="print the wrong readings")
    parser.add_argument("--published", type=Path, nargs="+", default=[], metavar="FOLDER",
                        help="folders of test cases of other normalisers")  # fmt: skip
    args = parser.parse_args(argv)
    wrong = failures((*cases(FRESH), *cases(INFORMED)), read)
    figures, shown = [*shares("this service", read, BAR_PERCENT)], [*wrong]
    for folder in args.published:
        table = published(folder)
        differ = published_failures(table, read)
        figures.append(_share(f"published, {folder.name}", len(differ), len(table), None))
        shown += differ
    if args.failures:
        print(*shown, sep="\n", file=sys.stderr)
    other = peer()
    if other is not None:
        figures += shares("WeTextProcessing", other, None)
    return publish(Report("reading", (*figures, *kinds(wrong), speed(args.repeat))))


if __name__ == "__main__":
    sys.exit(main())
