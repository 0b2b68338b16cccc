"""Rows that are kept as columns, and the leading rows of one token."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm.batch import (
    ForwardMode,
    RowColumns,
    Rows,
    SampledTokens,
    ScheduledBatch,
    ScheduledRow,
    columns_of,
    count_singles,
    first_tokens,
)
from llm.request import SamplingParams


def a_row(number: int, *, samples: bool) -> ScheduledRow:
    return ScheduledRow(
        f"r{number}", (number,) * number, number, [number], number > 1, samples, SamplingParams()
    )


@pytest.mark.parametrize("reads_all_first", [False, True])
def test_rows_of_columns_are_those_that_the_columns_were_made_of(reads_all_first: bool) -> None:
    made = tuple(a_row(number, samples=number != 3) for number in range(1, 6))
    rows = Rows(columns_of(made))
    if reads_all_first:
        assert tuple(rows) == made
    assert len(rows) == 5
    assert [rows[place] for place in (0, 3, -1)] == [made[0], made[3], made[-1]]
    assert rows[1:3] == made[1:3]
    assert tuple(rows) == made
    assert columns_of(rows) == columns_of(made)


@pytest.mark.parametrize("skipped", [(), (3,), (1, 2, 3)])
def test_a_batch_of_columns_is_one_of_rows(skipped: tuple[int, ...]) -> None:
    made = tuple(a_row(number, samples=number not in skipped) for number in range(1, 4))
    columns = Rows(columns_of(made))
    for kind in (made, columns):
        batch = ScheduledBatch(kind, ForwardMode.MIXED)
        assert tuple(batch.sampling_rows) == tuple(row for row in made if row.samples)
        assert batch.num_tokens == sum(len(row.token_ids) for row in made)
        assert batch.columns.start == tuple(row.start for row in made)


def test_a_batch_may_have_no_rows() -> None:
    assert columns_of(()) == RowColumns()
    assert not ScheduledBatch(Rows(RowColumns()), ForwardMode.IDLE)


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.permutations("abcdef"))
def test_sampled_tokens_are_a_mapping(sampled: list[str], asked: list[str]) -> None:
    """Also where rows of the batch have not sampled."""
    expected = {name: (ord(name),) for name in sampled}
    tokens = SampledTokens(tuple(sampled), list(map(ord, sampled)))
    assert tokens == expected
    assert list(tokens) == sampled
    for names in (tuple(sampled), tuple(asked)):
        firsts = [ord(name) if name in sampled else None for name in names]
        assert first_tokens(tokens, names) == first_tokens(expected, names) == firsts


@given(st.lists(st.integers(1, 3)))
def test_leading_rows_of_one_token_are_counted(query_lens: list[int]) -> None:
    expected = len(list(takewhile((1).__eq__, query_lens)))
    assert count_singles(tuple(query_lens)) == expected
