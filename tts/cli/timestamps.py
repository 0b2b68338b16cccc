"""Times of segments and words, collected during synthesis: as JSON, and as SubRip or WebVTT cues.

chunks, segments, words ─▶ SegmentTimes ─▶ segments(text), words(text)
                                      └──▶ cues_of(times, text): two lines of 42 characters
"""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from types import MappingProxyType

CUE_LINES, LINE_CHARACTERS = 2, 42  # usual limits of subtitles
CLAUSE_GAIN = 15  # characters by which a cue may be longer or shorter to end with a clause
JSON = ".json"

_WORDS = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment, word or cue and its place in the audio, in seconds from the start."""

    index: int
    start_s: float
    end_s: float
    text_start: int  # Unicode code points into the whole text
    text_end: int
    text: str = ""

    def moved(self, seconds: float, characters: int) -> Segment:
        """Return the segment in an audio and a text that begin earlier by this much."""
        return replace(
            self,
            start_s=self.start_s + seconds,
            end_s=self.end_s + seconds,
            text_start=self.text_start + characters,
            text_end=self.text_end + characters,
        )


@dataclass(frozen=True, slots=True)
class MarkTime:
    """A mark, a sentence or a turn, and where in the audio it begins, in seconds."""

    kind: str
    name: str
    time_s: float
    text_start: int  # Unicode code points into the whole text
    text_end: int


class SegmentTimes:
    """Segments, words and marks, collected in the order of their arrival."""

    def __init__(self) -> None:
        self.marks: list[MarkTime] = []
        self._segments: dict[int, Segment] = {}
        self._settled: set[int] = set()
        self._words: list[Segment] = []

    def add(self, index: int, span_s: tuple[float, float], text_span: tuple[int, int]) -> None:
        """Extend segment `index` by a chunk with this span of the audio and the text."""
        if index in self._settled:
            return
        start_s, end_s = span_s
        known = self._segments.get(index) or Segment(index, start_s, end_s, *text_span)
        self._segments[index] = replace(
            known,
            end_s=end_s,
            text_start=min(known.text_start, text_span[0]),
            text_end=max(known.text_end, text_span[1]),
        )

    def settle(self, index: int, span_s: tuple[float, float], text_span: tuple[int, int]) -> None:
        """Set the exact times of a segment that has ended; later chunks do not change them."""
        self._segments[index] = Segment(index, *span_s, *text_span)
        self._settled.add(index)

    def add_word(self, span_s: tuple[float, float], text_span: tuple[int, int]) -> None:
        """Append a word."""
        self._words.append(Segment(len(self._words), *span_s, *text_span))

    def extend(
        self,
        segments: Iterable[Segment],
        words: Iterable[Segment],
        seconds: float,
        characters: int,
    ) -> None:
        """Append the times of a text that follows, from these places of the audio and the text."""
        for segment in segments:
            index = len(self._segments)
            self._segments[index] = replace(segment.moved(seconds, characters), index=index)
        for word in words:
            index = len(self._words)
            self._words.append(replace(word.moved(seconds, characters), index=index))

    def segments(self, text: str = "") -> tuple[Segment, ...]:
        """Return the segments with their part of the whole text."""
        return tuple(_with_text(self._segments.values(), text))

    def words(self, text: str = "") -> tuple[Segment, ...]:
        """Return the words with their part of the whole text; none if they were not requested."""
        return tuple(_with_text(self._words, text))


def _with_text(segments: Iterable[Segment], text: str) -> Iterator[Segment]:
    for segment in segments:
        yield replace(segment, text=text[segment.text_start : segment.text_end].strip())


def cues_of(times: SegmentTimes, text: str) -> tuple[Segment, ...]:
    """Return cues of at most two lines; none holds words of two segments.

    The times are those of words. In a voice without them, a segment's time is shared out by the
    lengths of its words.
    """
    segments, words = times.segments(text), times.words(text)
    groups = _by_segment(segments, words) if words else map(_shared_out, segments)
    cues = (cue for group in groups for cue in _cues(group))
    return tuple(replace(cue, index=index) for index, cue in enumerate(cues))


def _by_segment(segments: Sequence[Segment], words: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Yield the words of each segment; a segment begins with its first code point."""
    starts = sorted(segment.text_start for segment in segments)
    place = 0

    def segment_of(word: Segment) -> int:
        nonlocal place
        while place < len(starts) and starts[place] <= word.text_start:
            place += 1
        return place

    for _, group in groupby(words, segment_of):
        yield list(group)


def _shared_out(segment: Segment) -> list[Segment]:
    """Return the words of a segment, with parts of its time that are as long as they."""
    size = max(1, len(segment.text))
    second = (segment.end_s - segment.start_s) / size  # of a character
    return [
        Segment(
            index,
            segment.start_s + second * found.start(),
            segment.start_s + second * found.end(),
            segment.text_start + found.start(),
            segment.text_start + found.end(),
            found.group(),
        )
        for index, found in enumerate(_WORDS.finditer(segment.text))
    ]


def _cues(words: Sequence[Segment]) -> Iterator[Segment]:
    """Yield cues of about equal length, which end with a clause if they can."""
    while words:
        count = _cue_length(words)
        first, last = words[0], words[count - 1]
        yield replace(first, end_s=last.end_s, text_end=last.text_end, text=_joined(words[:count]))
        words = words[count:]


def _cue_length(words: Sequence[Segment]) -> int:
    """Return the number of words in the next cue."""
    text, most = "", CUE_LINES * LINE_CHARACTERS
    size = len(_joined(words))
    ideal = size / -(-size // most)
    best, least = 1, float("inf")
    for count, word in enumerate(words, start=1):
        text = _joined(words[:count])
        if count > 1 and len(_lines(text)) > CUE_LINES:
            return best
        distance = abs(len(text) - ideal) - CLAUSE_GAIN * word.text.endswith((",", ";", ":", "—"))
        if distance <= least:
            best, least = count, distance
    return len(words)


def _joined(words: Sequence[Segment]) -> str:
    """Return the text of words, with spaces where the text has something between them."""
    text = words[0].text
    for before, word in pairwise(words):
        text += word.text if word.text_start == before.text_end else f" {word.text}"
    return " ".join(text.split())


def _lines(text: str) -> list[str]:
    """Return the lines of a cue, as equally long as they can be."""
    fewest = textwrap.wrap(text, LINE_CHARACTERS)
    if len(fewest) != CUE_LINES:
        return fewest
    for width in range(-(-len(text) // CUE_LINES), LINE_CHARACTERS):
        if len(lines := textwrap.wrap(text, width)) == CUE_LINES:
            return lines
    return fewest


def to_json(segments: Sequence[Segment], marks: Sequence[MarkTime] = ()) -> str:
    """Return a JSON object with a list `segments`, and `marks` if any; times are in seconds."""
    found = {"segments": [asdict(s) for s in segments]}
    if marks:
        found["marks"] = [asdict(mark) for mark in marks]
    return json.dumps(found, indent=2, ensure_ascii=False)


def to_srt(cues: Sequence[Segment]) -> str:
    """Return SubRip blocks: number, time span, lines, empty line."""
    return "\n".join(
        f"{number}\n{_span(cue, ',')}\n{_cue_text(cue)}\n"
        for number, cue in enumerate(cues, start=1)
    )


def to_vtt(cues: Sequence[Segment]) -> str:
    """Return a WebVTT file: a head, and blocks of a time span and lines."""
    blocks = (f"{_span(cue, '.')}\n{html.escape(_cue_text(cue), quote=False)}\n" for cue in cues)
    return "\n".join(("WEBVTT\n", *blocks))


def _cue_text(cue: Segment) -> str:
    return "\n".join(_lines(" ".join(cue.text.split())))


def _span(cue: Segment, point: str) -> str:
    return f"{_clock(cue.start_s, point)} --> {_clock(cue.end_s, point)}"


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds_part, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{seconds_part:02}{point}{milliseconds:03}"


WRITERS: Mapping[str, Callable[[Sequence[Segment]], str]] = MappingProxyType(
    {JSON: to_json, ".srt": to_srt, ".vtt": to_vtt}
)
"""By the suffix of a file."""


def write_timestamps(path: Path, times: SegmentTimes, text: str, *, by_word: bool) -> None:
    """Write times in the format of the path's suffix, one of `WRITERS`.

    `by_word`: of each word; else of segments, which subtitles divide into cues.
    """
    suffix = path.suffix.lower()
    if by_word:
        found = times.words(text)
    else:
        found = times.segments(text) if suffix == JSON else cues_of(times, text)
    written = to_json(found, times.marks) if suffix == JSON else WRITERS[suffix](found)
    path.write_text(written + "\n", encoding="utf-8")
