"""Shapes of captured forwards: the batches that fit, and their memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm.attention.base import CapturedShape
from llm.runner.graphs.shapes import (
    LIBRARY_BYTES,
    MAX_GRAPH_ROWS,
    decode_shapes,
    estimate_graph_bytes,
    prompt_shapes,
)


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (12, (1, 2, 4, 8, 12)),
        (100, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)),
    ],
)
def test_numbers_of_rows_that_decode(most: int, expected: tuple[int, ...]) -> None:
    assert decode_shapes(most) == tuple(map(CapturedShape, expected))


@given(st.integers(1, 5000))
def test_rows_ascend_to_the_largest_batch(most: int) -> None:
    rows = [shape.num_singles for shape in decode_shapes(most)]
    assert rows == sorted(set(rows))
    assert rows[-1] == min(most, MAX_GRAPH_ROWS)
    gaps = [(after - before, before) for before, after in itertools.pairwise(rows)]
    assert all(gap <= max(8, before) for gap, before in gaps)


@given(st.integers(1, 2000), st.integers(1, 9000), st.data())
def test_there_is_room_for_a_prompt_in_addition_to_all_decode_rows(
    max_rows: int, max_tokens: int, data: st.DataObject
) -> None:
    shapes = prompt_shapes(max_rows, max_tokens)
    assert len(set(shapes)) == len(shapes) <= (28 if max_rows > 256 else 16)
    sizes = [shape.num_tokens for shape in shapes]
    assert sizes == sorted(sizes)
    assert all(1 <= shape.num_prompts <= max_rows for shape in shapes)
    assert all(shape.num_prompt_tokens <= max_tokens for shape in shapes)
    decoding = data.draw(st.integers(0, min(max_rows, MAX_GRAPH_ROWS)))
    prompt = data.draw(st.integers(1, min(max_tokens, 1024)))
    assert any(shape.has_room(decoding, 1, prompt) for shape in shapes)
    alone = next(shape for shape in shapes if shape.has_room(0, 1, prompt))
    assert alone.num_singles == 0 or prompt > 256


@pytest.mark.parametrize(
    ("decoding", "prompts", "tokens", "expected"),
    [
        (0, 1, 109, (0, 128)),
        (0, 2, 300, (32, 384)),
        (20, 1, 72, (32, 128)),
        (20, 1, 600, (32, 1024)),
        (176, 1, 72, (192, 128)),
        (176, 2, 144, (192, 256)),
        (176, 4, 288, (256, 384)),
        (230, 2, 144, (256, 256)),
        (370, 3, 327, (512, 384)),
        (900, 1, 72, (1024, 128)),
    ],
)
def test_batches_with_prompts_are_padded_little(
    decoding: int, prompts: int, tokens: int, expected: tuple[int, int]
) -> None:
    shapes = prompt_shapes(1024, 8192)
    found = next(shape for shape in shapes if shape.has_room(decoding, prompts, tokens))
    assert (found.num_singles, found.num_prompt_tokens) == expected


def test_where_a_batch_begins() -> None:
    """Its tokens are neighbours, and its prompts begin where the shape's do."""
    assert CapturedShape(8).first_token(5) == 0
    shape = CapturedShape(8, 2, 100)
    assert (shape.first_token(5), shape.first_token(8), shape.first_token(0)) == (3, 0, 8)
    assert shape.num_tokens == 108
    assert shape.has_room(8, 2, 100)
    assert not any(shape.has_room(*n) for n in ((9, 1, 1), (1, 3, 3), (1, 1, 101)))


def test_memory_of_graphs() -> None:
    shapes = (CapturedShape(8), CapturedShape(8, 2, 100))
    sizes = {"logit_bytes": 0, "token_bytes": 0, "num_layers": 3}
    records = estimate_graph_bytes(shapes, 8, **sizes)
    one = estimate_graph_bytes(shapes[:1], 8, **sizes)
    assert one > LIBRARY_BYTES
    assert records - LIBRARY_BYTES == 2 * (one - LIBRARY_BYTES)
    assert estimate_graph_bytes(shapes, 8, **sizes | {"logit_bytes": 5}) == records + 40
    assert estimate_graph_bytes(shapes, 8, **sizes | {"token_bytes": 3}) == records + 324
