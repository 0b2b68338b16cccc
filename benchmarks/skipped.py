"""Words that are missing or doubled in speech, with and without the check of segments.

Hard texts (`benchmarks.hard_texts`) are spoken by the service in this process, in the
voices of `benchmarks.understood`, and compared with what Moonshine recognises
(`benchmarks.speech_judges` says what it needs). The check itself uses neither.

Every text is spoken with the check on. Where no segment was spoken again, its speech is the same
without the check; the others are spoken a second time with the check off. The recogniser makes
errors of its own: only the difference is meaningful. With `python -m training.evaluate skipped`
the teacher says the same texts. `--log FILE` keeps what was recognised, text by text: the same
command continues there. `benchmarks.planted` counts what the check finds of known faults.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from benchmarks.hard_texts import KINDS, hard_texts
from benchmarks.report import Figure, Report, arguments, publish
from benchmarks.speech_judges import Recogniser, prepared
from benchmarks.understood import VOICES, Clip
from benchmarks.word_errors import Slips, slips
from tts.api.audio import Speech
from tts.api.load import load
from tts.api.request import SpeechOptions
from tts.api.voice import LoadedVoice
from tts.families.base import FamilyTraits
from tts.text.segmenter import SegmentStream

AT_ONCE = 8  # requests
BAR_SHARE = 0.5  # of the rate without the check
BAR_ABOVE = 2.0  # per 1,000 words above the teacher's rate


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a kind, to be spoken in a voice with a seed."""

    kind: str
    text: str
    voice: str
    seed: int

    @property
    def spoken(self) -> str:
        """Words as the service reads them."""
        stream = SegmentStream(FamilyTraits(ascii_only=True).text_options())
        return " ".join(segment.text for segment in stream.split(self.text))


@dataclass(frozen=True, slots=True)
class Spoken:
    """Speech of a text with the check on, and with it off if that differs."""

    text: Text
    checked: Clip
    unchecked: Clip | None
    num_segments: int
    num_retried: int


@dataclass(frozen=True, slots=True)
class Compared:
    """Words that are recognised in a text's speech: without the check, with it, the teacher's."""

    text: Text
    heard_unchecked: str
    heard_checked: str
    num_segments: int
    num_retried: int
    heard_teacher: str | None = None  # None: it was not asked

    @property
    def unchecked(self) -> Slips:
        return slips(self.text.spoken, self.heard_unchecked)

    @property
    def checked(self) -> Slips:
        return slips(self.text.spoken, self.heard_checked)

    @property
    def teacher(self) -> Slips:
        return slips(self.text.spoken, self.heard_teacher or "")

    @property
    def is_false_alarm(self) -> bool:
        """Whether a segment was spoken again although the recogniser misses nothing."""
        return bool(self.num_retried) and not self.unchecked.rate

    def __str__(self) -> str:
        counts = f"{self.unchecked.missing}-{self.unchecked.extra}+"
        if self.num_retried:
            counts += f" → {self.checked.missing}-{self.checked.extra}+"
        if self.heard_teacher is not None:
            counts += f" ({self.teacher.missing}-{self.teacher.extra}+)"
        return f"{self.text.voice:8s} {counts:14s} {self.text.spoken} | {self.heard_unchecked}"


class Log:
    """Texts that were compared, in a file of JSON lines that a later run continues.

    The last line of a text counts. A line that was not written to its end is removed.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[Text, Compared] = {}
        if path is None or not path.exists():
            return
        whole = path.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        path.write_bytes(whole)
        for line in whole.decode().splitlines():
            values = json.loads(line)
            one = Compared(**values | {"text": Text(**values["text"])})
            self._known[one.text] = one

    def get(self, text: Text) -> Compared | None:
        """Return what was recognised in a text's speech; None if it was not spoken."""
        return self._known.get(text)

    def add(self, one: Compared) -> None:
        """Append a text that was compared."""
        self._known[one.text] = one
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")


def speak(voice: LoadedVoice, text: Text) -> Spoken:
    """Speak a text with the check on, and again with it off if a segment was retried."""
    options = SpeechOptions(voice=text.voice, seed=text.seed, timestamps="segment", check=True)
    checked = voice.say(text.text, **options)
    retried = checked.num_retried_segments
    options["check"] = False
    other = _clip(voice.say(text.text, **options)) if retried else None
    return Spoken(text, _clip(checked), other, len(checked.segments), retried)


def _clip(speech: Speech) -> Clip:
    return Clip(speech.samples, speech.sample_rate)


def spoken_in_turn(voice: LoadedVoice, asked: Sequence[Text]) -> Generator[Spoken]:
    """Speak some texts at once; iterate over them in order. The rest is dropped at an early end."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        yield from pool.map(partial(speak, voice), asked)
    finally:
        pool.shutdown(cancel_futures=True)


def until_stopped(items: Iterable[Item]) -> Iterator[Item]:
    """Iterate over items; an interruption (Ctrl-C) ends the iteration."""
    try:
        yield from items
    except KeyboardInterrupt:
        print("interrupted; the figures are those of the texts so far", file=sys.stderr)


class Listener(Protocol):
    """Recogniser of clips that `prepared` made."""

    def words(self, clip: np.ndarray) -> str: ...


def compare(spoken: Spoken, recogniser: Listener) -> Compared:
    """Return what is recognised in a text's speech."""
    heard = [
        recogniser.words(prepared(clip.samples, clip.sample_rate))
        for clip in (spoken.unchecked, spoken.checked)
        if clip is not None
    ]
    return Compared(spoken.text, heard[0], heard[-1], spoken.num_segments, spoken.num_retried)


def compared(
    voice: LoadedVoice,
    asked: Sequence[Text],
    recogniser: Listener,
    log: Log,
    hear_teacher: Callable[[Text], str] | None = None,
) -> Iterator[Compared]:
    """Iterate over texts in order; those in the log are not spoken again.

    `hear_teacher`: function to what is recognised in the teacher's speech of a text.
    """
    said = spoken_in_turn(voice, [text for text in asked if log.get(text) is None])
    with closing(said):
        for text in asked:
            one = known = log.get(text)
            if one is None:
                one = compare(next(said), recogniser)
            if hear_teacher is not None and one.heard_teacher is None:
                one = replace(one, heard_teacher=hear_teacher(text))
            if one is not known:
                log.add(one)
            yield one


def texts(num_words: int, seed: int) -> list[Text]:
    """Return the texts, each with one of the voices in turn and its own seed."""
    voices = cycle(VOICES)
    found = enumerate(hard_texts(num_words, seed))
    return [Text(kind, text, next(voices), number) for number, (kind, text) in found]


def total(found: Iterable[Slips]) -> Slips:
    """Return the sum, every word with the same weight."""
    return sum(found, Slips())


def figures(found: Sequence[Compared]) -> Iterator[Figure]:
    """Iterate over the rates per 1,000 words, of all texts and of each kind, and the retries."""
    without, checked = total(c.unchecked for c in found), total(c.checked for c in found)
    bar = BAR_SHARE * 1000 * without.rate
    for name, slip, limit in (("unchecked", without, None), ("checked", checked, bar)):
        note = f"{slip.missing} missing, {slip.extra} too many of {slip.words}"
        yield Figure(name, (1000 * slip.rate,), "per 1,000 words", bar=limit, note=note)
    for kind in KINDS:
        own = [one for one in found if one.text.kind == kind]
        rates = [total(one.unchecked for one in own), total(one.checked for one in own)]
        note = f"checked {1000 * rates[1].rate:.1f}, of {rates[0].words} words"
        yield Figure(f"unchecked, {kind}", (1000 * rates[0].rate,), "per 1,000 words", note=note)
    segments, retried = sum(c.num_segments for c in found), sum(c.num_retried for c in found)
    alarms = sum(one.num_retried for one in found if one.is_false_alarm)
    yield Figure("segments spoken again", (100 * retried / segments,), "%", note=f"of {segments}")
    note = "nothing missing or too many for the recogniser"
    yield Figure("of them unnecessarily", (100 * alarms / segments,), "%", note=note)


def above_teacher(found: Sequence[Compared]) -> Iterator[Figure]:
    """Iterate over the teacher's rate per 1,000 words, and those of our speech above it."""
    teacher = total(one.teacher for one in found)
    note = f"{teacher.missing} missing, {teacher.extra} too many of {teacher.words}"
    yield Figure("teacher", (1000 * teacher.rate,), "per 1,000 words", note=note)
    without, checked = total(c.unchecked for c in found), total(c.checked for c in found)
    for name, slip, bar in (("unchecked", without, None), ("checked", checked, BAR_ABOVE)):
        above = 1000 * (slip.rate - teacher.rate)
        yield Figure(f"{name}, above the teacher", (above,), "per 1,000 words", bar=bar)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark, which `training.evaluate skipped` has, too."""
    parser.add_argument("--moonshine", type=Path, required=True, help="the recogniser's folder")
    parser.add_argument("--words", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1, help="of the texts")
    parser.add_argument("--log", type=Path, help="continue this file of what was recognised")


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Missing and doubled words, with and without the check.", repeat=1)
    add_options(options)
    args = options.parse_args(argv)
    recogniser, found = Recogniser(args.moonshine), []
    with load(args.model) as voice:
        asked = texts(args.words, args.seed)
        for one in until_stopped(compared(voice, asked, recogniser, Log(args.log))):
            found.append(one)
            if one.unchecked.rate or one.num_retried:
                print(one, file=sys.stderr, flush=True)
    return publish(Report("skipped", tuple(figures(found))))


if __name__ == "__main__":
    sys.exit(main())
