"""`GraphStats`: number of replayed and eager forwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphStats:
    """A snapshot; counts are of forwards since the start."""

    num_shapes: int  # number of captured shapes
    replays: int  # replayed decode forwards
    eager_decodes: int  # decode forwards without a graph: too many rows, or not supported by graphs
    prompt_replays: int = 0  # replayed forwards with prompts
    eager_prompts: int = 0
