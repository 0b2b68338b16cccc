"""`SequenceTable`: every live sequence is in the one place of its status."""

from __future__ import annotations

import pytest

from llm.request import Request
from llm.scheduler.table import SequenceTable, entry_order
from llm.sequence import Sequence, SequenceStatus


def prefilled(table: SequenceTable, *names: str) -> list[Sequence]:
    """Return new sequences with these ids after prefill, with one token."""
    sequences = [Sequence(Request(name, (1, 2)), float(index)) for index, name in enumerate(names)]
    for sequence in sequences:
        table.add(sequence)
    for sequence in sequences:
        assert table.prefill_next() is sequence
        sequence.processed = 2
        sequence.accept(3)
    return sequences


def test_a_sequence_goes_from_place_to_place() -> None:
    table = SequenceTable()
    sequence = Sequence(Request("a", (1, 2)), 0.0)
    table.add(sequence)
    places = [repr(table)]
    table.prefill_next()
    places.append(repr(table))
    table.decode(sequence)
    places.append(repr(table))
    table.pause(sequence)
    places.append(repr(table))
    table.queue_in_front(sequence)
    places.append(repr(table))
    assert [place.partition("(")[2] for place in places] == [
        "1 pending, 0 prefilling, 0 decoding, 0 paused)",
        "0 pending, 1 prefilling, 0 decoding, 0 paused)",
        "0 pending, 0 prefilling, 1 decoding, 0 paused)",
        "0 pending, 0 prefilling, 0 decoding, 1 paused)",
        "1 pending, 0 prefilling, 0 decoding, 0 paused)",
    ]
    table.prefill_next()
    table.end(sequence)
    assert (list(table.ending), len(table), list(table)) == (["a"], 1, [sequence])
    table.check_integrity()
    table.discard(sequence)
    assert (len(table), table.get("a")) == (0, None)
    table.check_integrity()


def test_an_id_is_alive_once() -> None:
    table = SequenceTable()
    (one,) = prefilled(table, "a")
    with pytest.raises(ValueError, match="request a is in use already"):
        table.add(Sequence(Request("a", (1,)), 0.0))
    assert table.get("a") is one


def test_a_sequence_that_decodes_again_gets_its_former_position() -> None:
    table = SequenceTable()
    a, b, c = prefilled(table, "a", "b", "c")
    assert entry_order(a) == -1
    for sequence in (a, b, c):
        table.decode(sequence)
    assert [entry_order(sequence) for sequence in (a, b, c)] == [0, 1, 2]
    for sequence in (b, a):
        table.pause(sequence)
    for sequence in (a, b):
        table.resume(sequence)
        table.check_integrity()
    assert list(table.decoding) == ["a", "b", "c"]


def test_after_a_pause_only_started_sequences_queue_in_front() -> None:
    table = SequenceTable()
    for name, arrival_s in (("new", 0.0), ("other", 1.0), ("ran", 2.0)):
        table.add(Sequence(Request(name, (1, 2)), arrival_s))
    new, ran = table.get("new"), table.get("ran")
    assert new is not None
    assert ran is not None
    ran.first_scheduled_s = 3.0
    for sequence in (new, ran):
        table.pause(sequence)
    for sequence in (new, ran):
        table.resume(sequence)
        table.check_integrity()
    assert [sequence.request_id for sequence in table.pending] == ["ran", "new", "other"]


def test_check_integrity_finds_a_sequence_in_the_wrong_place() -> None:
    table = SequenceTable()
    a, b = prefilled(table, "a", "b")
    for sequence in (a, b):
        table.decode(sequence)
    b.status = SequenceStatus.PAUSED
    with pytest.raises(AssertionError, match="is among the decoding"):
        table.check_integrity()
    b.status = SequenceStatus.DECODING
    table.decoding = {"b": b, "a": a}
    with pytest.raises(AssertionError, match="the decode set is out of order"):
        table.check_integrity()
    table.decoding = {"a": a}
    with pytest.raises(AssertionError, match="1 of 2 found"):
        table.check_integrity()
    table.decoding = {"a": a, "b": a}
    with pytest.raises(AssertionError, match="2 of 2 found"):
        table.check_integrity()
    table.decoding = {"a": a, "b": b}
    table.paused = {"b": b}
    with pytest.raises(AssertionError, match="3 of 2 found"):
        table.check_integrity()
