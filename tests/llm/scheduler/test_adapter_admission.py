"""`AdapterAdmission`: requests that may start while all slots for adapters are in use."""

from __future__ import annotations

from llm import Request
from llm.scheduler.adapters import LOOK_AHEAD, AdapterAdmission
from llm.scheduler.table import PendingQueue
from llm.sequence import Sequence


def asks(name: str, index: int) -> Request:
    return Request(f"{name or 'base'}{index}", (1, 2), lora=name)


def waiting(*requests: tuple[str, float]) -> PendingQueue:
    """Queue (adapter, arrival) of each, in order."""
    queue = PendingQueue()
    for index, (name, arrival_s) in enumerate(requests):
        queue.push(Sequence(asks(name, index), arrival_s))
    return queue


def started(admission: AdapterAdmission, queue: PendingQueue) -> list[str]:
    found = []
    while admission.skip_waiting():
        found.append(queue.pop().request_id)
    admission.close()
    return found


def test_a_request_that_waits_long_for_a_slot_is_not_overtaken() -> None:
    """Until then red joins red; then it waits behind green, so that green's turn comes."""
    line = (("green", 1.0), ("red", 1.1), ("", 1.2), ("green", 1.3), ("red", 1.4))
    for now, expected in ((2.9, ["red1", "base2", "red4"]), (3.0, ["base2"])):
        queue = waiting(*line)
        assert started(AdapterAdmission(1, {"red"}, queue, now), queue) == expected
        left = [name for name in ("green0", "red1", "green3", "red4") if name not in expected]
        assert [sequence.request_id for sequence in queue] == left
    queue = waiting(*line)
    assert started(AdapterAdmission(1, set(), queue, 2.9), queue) == ["green0", "base2", "green3"]


def test_the_gate_looks_only_so_far() -> None:
    queue = waiting(*[("green", 1.0)] * (LOOK_AHEAD + 1), ("", 1.0))
    assert started(AdapterAdmission(1, {"red"}, queue, 1.0), queue) == []
    assert len(queue) == LOOK_AHEAD + 2
    queue.check_integrity()


def test_slots_may_be_many() -> None:
    running = {f"adapter{index}" for index in range(300)}
    queue = waiting(("adapter7", 1.0), ("new", 1.0))
    assert started(AdapterAdmission(300, running, queue, 1.0), queue) == ["adapter70"]
    queue = waiting(("adapter7", 1.0), ("new", 1.0))
    assert started(AdapterAdmission(301, running, queue, 1.0), queue) == ["adapter70", "new1"]
