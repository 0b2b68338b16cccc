"""The sizes of forwards that are captured, and the memory that they take.

    decoding    1, 2, 4, 8, 16 … rows
    prompts     room for 0, 32, 128 … rows that decode, beside 128 tokens of prompts or more

Most steps of a busy server hold a prompt or two beside the rows that decode: such a forward should
take hardly longer than one without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm.attention.base import CapturedShape

MAX_GRAPH_ROWS = 1024
DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
ROWS_BESIDE_PROMPTS = (32, 128, 256, 384, 512, 768)
ALONE_TOKENS = (128, 256, 512, 1024)  # of prompts, when nothing decodes
MIXED_TOKENS = (128, 384, 1024)
PROMPT_TOKENS = 16  # of the shortest prompts that a shape has enough rows for
FEWEST_PROMPTS = 4
RECORD_BYTES = 2**19  # of one captured layer, beside its scratch; the head counts as one
LIBRARY_BYTES = 160 * 2**20  # what libraries and the driver keep once anything is captured


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Of batches that there are."""

    max_rows: int
    max_tokens: int  # that are fed
    max_context: int  # tokens of a row, fed ones and those before


def decode_shapes(max_rows: int) -> tuple[CapturedShape, ...]:
    """By number of rows, ascending: at most `MAX_GRAPH_ROWS` of them."""
    most = min(max_rows, MAX_GRAPH_ROWS)
    return tuple(CapturedShape(size) for size in (*_below(DECODE_SIZES, most), most))


def prompt_shapes(max_rows: int, max_tokens: int) -> tuple[CapturedShape, ...]:
    """By number of tokens, ascending. With room for as many decoding rows as `decode_shapes`, and
    for no more than `max_tokens` of prompts.
    """
    most = min(max_rows, MAX_GRAPH_ROWS)
    sizes = [(0, tokens) for tokens in ALONE_TOKENS]
    for rows in (*_below(ROWS_BESIDE_PROMPTS, most), most):
        sizes += [(rows, tokens) for tokens in MIXED_TOKENS]
    shapes = set()
    for rows, tokens in sizes:
        fed = min(tokens, max_tokens)
        count = max(fed // PROMPT_TOKENS, FEWEST_PROMPTS)
        shapes.add(CapturedShape(rows, min(count, max_rows), fed))
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
    """Device memory of captured forwards: logits of up to `max_rows` rows (of one: `logit_bytes`),
    scratch of the largest one's tokens (of one: `token_bytes`), what the driver keeps of kernels.
    """
    records = LIBRARY_BYTES + len(shapes) * (num_layers + 1) * RECORD_BYTES
    most_tokens = max(shape.num_tokens for shape in shapes)
    return min(max_rows, MAX_GRAPH_ROWS) * logit_bytes + most_tokens * token_bytes + records
