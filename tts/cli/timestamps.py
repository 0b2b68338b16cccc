"""Times of segments or words, collected during synthesis and written as JSON or SubRip."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment or word and its place in the audio, in seconds from the start."""

    index: int
    start_s: float
    end_s: float
    text_start: int  # Unicode code points into the whole text
    text_end: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class MarkTime:
    """A mark, a sentence or a turn, and where in the audio it begins, in seconds."""

    kind: str
    name: str
    time_s: float
    text_start: int  # Unicode code points into the whole text
    text_end: int


class SegmentTimes:
    """Segments collected from audio chunks in the order of their arrival."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._settled: set[int] = set()

    def __len__(self) -> int:
        return len(self._segments)

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

    def segments(self, text: str) -> tuple[Segment, ...]:
        """Return the segments with their part of the whole text."""
        return tuple(
            replace(segment, text=text[segment.text_start : segment.text_end].strip())
            for segment in self._segments.values()
        )


def to_json(segments: Sequence[Segment], marks: Sequence[MarkTime] = ()) -> str:
    """Return a JSON object with a list `segments`, and `marks` if any; times are in seconds."""
    found = {"segments": [asdict(s) for s in segments]}
    if marks:
        found["marks"] = [asdict(mark) for mark in marks]
    return json.dumps(found, indent=2, ensure_ascii=False)


def to_srt(segments: Sequence[Segment], marks: Sequence[MarkTime] = ()) -> str:
    """Return SubRip blocks: number, time span, text, empty line. It has no marks."""
    blocks = (
        f"{number}\n{_clock(segment.start_s)} --> {_clock(segment.end_s)}\n"
        f"{' '.join(segment.text.split())}\n"
        for number, segment in enumerate(segments, start=1)
    )
    return "\n".join(blocks)


def _clock(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds_part, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{seconds_part:02},{milliseconds:03}"


WRITERS: Mapping[str, Callable[[Sequence[Segment], Sequence[MarkTime]], str]] = MappingProxyType(
    {".json": to_json, ".srt": to_srt}
)


def write_timestamps(
    path: Path, segments: Sequence[Segment], marks: Sequence[MarkTime] = ()
) -> None:
    """Write segments and marks in the format of the path's suffix, one of `WRITERS`."""
    path.write_text(WRITERS[path.suffix.lower()](segments, marks) + "\n", encoding="utf-8")
