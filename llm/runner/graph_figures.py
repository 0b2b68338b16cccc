"""`GraphFigures`: how often forwards were replayed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphFigures:
    """A snapshot; counts are of forwards since the start."""

    num_shapes: int  # that are captured
    replays: int  # of decode forwards
    eager_decodes: int  # without a graph: too many rows, or what a graph cannot do
    prompt_replays: int = 0  # of forwards that hold prompts
    eager_prompts: int = 0
