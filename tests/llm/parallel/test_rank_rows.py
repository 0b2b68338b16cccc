"""Rows reach other ranks as they are on rank 0, whatever grows, changes or ends between steps."""

from __future__ import annotations

import pickle
from array import array

from hypothesis import given
from hypothesis import strategies as st

from llm.batch import ScheduledRow
from llm.kv_cache.state_slots import StatePages
from llm.pipeline.rank_rows import RowChange, RowDecoder, RowEncoder
from llm.request import SamplingParams, Token
from llm.sequence import FUTURE_TOKEN

NAMES = ("a", "b", "c")


class Live:
    """A request whose pages and tokens change as the scheduler changes them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pages: array[int] = array("i", [1])
        self.outputs: list[Token] = []
        self.sampling = SamplingParams()

    def change(self, kind: int, number: int) -> None:
        if kind == 0:
            self.pages.append(number)
        elif kind == 1:
            self.drop_future()
            self.outputs.append(number)
        elif kind == 2:
            self.drop_future()
            self.outputs.append(FUTURE_TOKEN)
        elif kind == 3:
            self.pages = StatePages.of([number, number + 1], 2)
        else:
            self.drop_future()
            self.outputs.append((number, number))

    def drop_future(self) -> None:
        if self.outputs and self.outputs[-1] == FUTURE_TOKEN:
            self.outputs.pop()

    @property
    def row(self) -> ScheduledRow:
        last = tuple(self.outputs[-1:])
        return ScheduledRow(
            self.name,
            last,
            len(self.outputs),
            self.pages,
            not last,
            True,
            self.sampling,
            self.outputs,
            "an adapter",
        )


changes = st.tuples(st.sampled_from(NAMES), st.integers(0, 4), st.integers(0, 9))


@given(
    st.lists(st.tuples(st.lists(changes, max_size=6), st.sets(st.sampled_from(NAMES))), max_size=9)
)
def test_decoded_rows_are_those_of_rank_0(
    steps: list[tuple[list[tuple[str, int, int]], set[str]]],
) -> None:
    live = {name: Live(name) for name in NAMES}
    encoder, decoder = RowEncoder(), RowDecoder()
    for made, ended in steps:
        for name in ended:
            live[name] = Live(name)
            encoder.forget(name)
            decoder.forget(name)
        for name, kind, number in made:
            live[name].change(kind, number)
        rows = tuple(live[name].row for name in NAMES)
        found = decoder.decode(pickle.loads(pickle.dumps(encoder.encode(rows))))
        assert found == rows
        assert [type(row.pages) for row in found] == [type(row.pages) for row in rows]


def test_a_known_request_costs_no_more_with_its_length() -> None:
    request = Live("a")
    encoder = RowEncoder()
    first = pickle.dumps(encoder.encode([request.row]))
    sizes = []
    for number in range(1000):
        request.change(1, number)
        request.change(0, number)
        (row,) = encoder.encode([request.row])
        assert isinstance(row, RowChange)
        sizes.append(len(pickle.dumps(row)))
    assert max(sizes) < len(first)
