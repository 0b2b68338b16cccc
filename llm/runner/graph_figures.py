"""`GraphFigures`: how often decoding was replayed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphFigures:
    """A snapshot; counts are of decode forwards since the start."""

    num_buckets: int  # numbers of rows that are captured
    replays: int
    eager_decodes: int  # without a graph: too many rows, or what a graph cannot do
