"""Sizes of the captured forwards, and their memory.

    decoding    1, 2, 4, 8, 16 … rows
    prompts     room for 0, 32, 128 … decode rows, and 128 tokens of prompts or more

Many steps of a busy server have one or two prompts among the decode rows: such a forward should
take hardly longer than one without. From about 200 tokens on the products take time in proportion
to the tokens, with those that pad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm.attention.base import CapturedShape

MAX_GRAPH_ROWS = 1024
DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
ALONE_TOKENS = (128, 256)  # tokens of prompts in a batch without decode rows
ROWS_BESIDE_PROMPTS = {  # by tokens of prompts: fewer sizes where a step takes long anyway
    128: (32, 128, 192, 256, 384, 512, 768),
    256: (32, 128, 192, 256, 384, 512, 768),
    384: (32, 128, 256, 512),
    1024: (32, 128, 256, 512),
}
PROMPT_TOKENS = 16  # length of the shortest prompts that a shape has enough rows for
MIN_PROMPTS = 4
RECORD_BYTES = 2**19  # of one captured layer, without its scratch; the head counts as one layer
LIBRARY_BYTES = 160 * 2**20  # memory that libraries and the driver keep after the first capture


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Limits of the batches."""

    max_rows: int
    max_tokens: int  # fed tokens
    max_context: int  # tokens of a row, fed ones and earlier ones


def decode_shapes(max_rows: int) -> tuple[CapturedShape, ...]:
    """Return the shapes by number of rows, ascending, up to `MAX_GRAPH_ROWS`."""
    most = min(max_rows, MAX_GRAPH_ROWS)
    return tuple(CapturedShape(size) for size in (*_below(DECODE_SIZES, most), most))


def prompt_shapes(max_rows: int, max_tokens: int) -> tuple[CapturedShape, ...]:
    """Return the shapes by number of tokens, ascending.

    They have room for as many decode rows as `decode_shapes`, and for at most `max_tokens` of
    prompts.
    """
    most = min(max_rows, MAX_GRAPH_ROWS)
    sizes = [(0, tokens) for tokens in ALONE_TOKENS]
    for tokens, rows in ROWS_BESIDE_PROMPTS.items():
        sizes += [(singles, tokens) for singles in (*_below(rows, most), most)]
    shapes = set()
    for singles, tokens in sizes:
        fed = min(tokens, max_tokens)
        count = max(fed // PROMPT_TOKENS, MIN_PROMPTS)
        shapes.add(CapturedShape(singles, min(count, max_rows), fed))
    return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_singles)))


def _below(sizes: tuple[int, ...], most: int) -> list[int]:
    return [size for size in sizes if size < most]


def estimate_graph_bytes(
    shapes: Sequence[CapturedShape],
    max_rows: int,
    *,
    logit_bytes: int,
    token_bytes: int,
    num_layers: int,
) -> int:
    """Estimate the device memory of captured forwards.

    It consists of the logits of up to `max_rows` rows (`logit_bytes` each), scratch of the tokens
    of the largest forward (`token_bytes` each), and what the driver keeps per kernel.
    """
    records = LIBRARY_BYTES + len(shapes) * (num_layers + 1) * RECORD_BYTES
    most_tokens = max(shape.num_tokens for shape in shapes)
    return min(max_rows, MAX_GRAPH_ROWS) * logit_bytes + most_tokens * token_bytes + records
