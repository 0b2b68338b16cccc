"""`PendingQueue`: order by priority, age and position at the front."""

from __future__ import annotations

import pytest

from llm.request import Request
from llm.scheduler.table import PRIORITY_AGEING_S, PendingQueue
from llm.sequence import Sequence


def waiting(name: str, arrival_s: float = 0.0, priority: int = 0, length: int = 2) -> Sequence:
    return Sequence(Request(name, (1,) * length, priority=priority), arrival_s)


def names(queue: PendingQueue) -> list[str]:
    queue.check_integrity()
    return [sequence.request_id for sequence in queue]


def test_a_level_of_priority_is_worth_five_seconds() -> None:
    assert PRIORITY_AGEING_S == 5.0
    queue = PendingQueue()
    for sequence in (waiting("a", 0.0), waiting("b", 4.9, 1), waiting("c", 5.1, 1)):
        queue.push(sequence)
    assert names(queue) == ["b", "a", "c"]


def test_tokens_of_all_that_wait_are_counted() -> None:
    queue = PendingQueue()
    one, two, three = (waiting(name, length=n) for n, name in enumerate("abc", start=1))
    for sequence in (one, two):
        queue.push(sequence)
    queue.push_front(three)
    assert (len(queue), queue.num_tokens) == (3, 6)
    assert repr(queue) == "PendingQueue(1 in front, 2 behind)"
    assert queue.peek() is queue.pop() is three
    assert (len(queue), queue.num_tokens) == (2, 3)
    queue.remove(two)
    assert (names(queue), queue.num_tokens) == (["a"], 1)
    assert queue.pop() is one
    assert (len(queue), queue.num_tokens) == (0, 0)
    with pytest.raises(IndexError):
        queue.peek()


def test_those_in_front_are_by_pages_and_arrival_and_their_holders_last_first() -> None:
    queue = PendingQueue()
    late, early, holder, other = (
        waiting("late", 3.0), waiting("early", 1.0), waiting("holder", 4.0), waiting("other", 2.0)
    )  # fmt: skip
    holder.pages, other.pages = (1,), (2,)
    queue.push(waiting("back"))
    for sequence in (late, holder, early, other):
        queue.push_front(sequence)
    assert names(queue) == ["other", "holder", "early", "late", "back"]
    assert [sequence.request_id for sequence in queue.holders()] == ["holder", "other"]
    for sequence in (holder, late):
        queue.remove(sequence)
    assert names(queue) == ["other", "early", "back"]


def test_those_in_front_that_came_together_are_by_first_entry() -> None:
    queue = PendingQueue()
    first, second, new = waiting("first"), waiting("second"), waiting("new")
    first.entry_order, second.entry_order = 0, 1
    for sequence in (new, second, first):
        queue.push_front(sequence)
    assert names(queue) == ["first", "second", "new"]


def test_removing_a_sequence_that_is_not_queued_is_an_error() -> None:
    queue = PendingQueue()
    queue.push(waiting("a"))
    with pytest.raises(ValueError, match="deque"):
        queue.remove(waiting("b"))
    assert names(queue) == ["a"]


def test_a_sequence_can_be_removed_and_queued_repeatedly() -> None:
    queue = PendingQueue()
    stays, moves = waiting("stays", 1.0), waiting("moves", 0.0)
    queue.push(stays)
    for _ in range(40):
        queue.push(moves)
        assert names(queue) == ["moves", "stays"]
        queue.remove(moves)
    assert names(queue) == ["stays"]
    assert queue.pop() is stays


def test_removed_sequences_are_dropped_before_their_turn() -> None:
    queue = PendingQueue()
    sequences = [waiting(str(number)) for number in range(60)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[1:]:
        queue.remove(sequence)
        assert len(queue._heap) <= 2 * len(queue) + 16
    assert names(queue) == ["0"]


def test_check_integrity_finds_inconsistent_counts() -> None:
    queue = PendingQueue()
    sequence = waiting("a")
    queue.push(sequence)
    queue.num_tokens += 1
    with pytest.raises(AssertionError, match="miscounts its tokens: 3"):
        queue.check_integrity()
    queue.num_tokens -= 1
    sequence.pages = (1,)
    with pytest.raises(AssertionError, match="pages are held at the back"):
        queue.check_integrity()
    sequence.pages = ()
    queue.push_front(sequence)
    with pytest.raises(AssertionError, match=r"holds \['a', 'a'\]"):
        queue.check_integrity()
