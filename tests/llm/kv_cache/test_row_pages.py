"""Pages and positions of a forward's rows, all at once and row by row."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm.batch import RowPages

PAGE_SIZE = 4
rows = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 2)))


@given(rows, st.sampled_from([array, tuple]))
def test_tokens_of_rows_are_in_the_slots_of_their_tables(
    drawn: list[tuple[int, int, int]], kind: type
) -> None:
    """Tables of both kinds, some with pages for later tokens."""
    fed = [min(length, context) for length, context, _ in drawn]
    contexts = [context for _, context, _ in drawn]
    used = [-(-context // PAGE_SIZE) for context in contexts]
    tables = [
        [100 * row + page + 1 for page in range(count + more)]
        for row, (count, (_, _, more)) in enumerate(zip(used, drawn, strict=True))
    ]
    pages = [array("i", table) if kind is array else tuple(table) for table in tables]
    found = RowPages.of(PAGE_SIZE, pages, contexts)
    assert found.context_lens.tolist() == contexts
    assert found.counts.tolist() == used
    rows = list(zip(tables, used, strict=True))
    assert found.ids.tolist() == [page for table, count in rows for page in table[:count]]
    for lens, are_single in ((fed, False), ([1] * len(fed), True), ([1] * len(fed), False)):
        expected = [
            (position, table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
            for table, length, context in zip(tables, lens, contexts, strict=True)
            for position in range(context - length, context)
        ]
        positions, slots = found.places(lens, are_single=are_single)
        assert list(zip(positions.tolist(), slots.tolist(), strict=True)) == expected


def test_a_table_with_too_few_pages_is_no_table() -> None:
    with pytest.raises(ValueError, match="zip"):
        RowPages.of(PAGE_SIZE, [array("i", [1])], [3, 4])
