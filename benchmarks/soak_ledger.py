"""What became of every call of a soak: as its client saw it, and as the server's log tells it.

A call is lost when its client saw no end, or one that it had no reason to expect. From the moment
an engine is killed until it is back, UNAVAILABLE is to be expected.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tts.rpc import REQUEST_ID_KEY

OK, CANCELLED, VANISHED, UNAVAILABLE = "OK", "CANCELLED", "VANISHED", "UNAVAILABLE"
LEFT = frozenset({CANCELLED, VANISHED})  # the client's own ends
WRITE_FAILED = "WRITE_FAILED"
"""grpc.aio's own status of a call that ended while its client wrote: the server's is lost."""
OWN_WORDS = "Internal error from Core"  # the details of such a status
CALL_ENDED = "call ended"  # the log's message


def code_of(error: grpc.aio.AioRpcError) -> str:
    """A call's status, or WRITE_FAILED."""
    is_local = error.code().name == "INTERNAL" and error.details() == OWN_WORDS
    return WRITE_FAILED if is_local else str(error.code().name)


@dataclass(slots=True)
class Asked:
    """One call as its client sees it. Moments are of time.monotonic."""

    kind: str
    request_id: str
    expected: frozenset[str]
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    code: str = ""  # a status, or VANISHED
    first_audio_s: float | None = None  # after it began
    audio_s: float = 0.0  # how long its audio is

    def heard(self) -> None:
        """There is audio."""
        if self.first_audio_s is None:
            self.first_audio_s = time.monotonic() - self.began_s

    def adopt(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """The id that the server tells, which is its own where it takes none."""
        for key, value in metadata or ():
            if key == REQUEST_ID_KEY:
                self.request_id = str(value)

    def fail(self, error: grpc.aio.AioRpcError) -> None:
        """It ended with a status."""
        self.adopt(error.trailing_metadata())
        self.end(code_of(error))

    def end(self, code: str) -> None:
        """The first end counts."""
        if self.ended_s is None:
            self.code, self.ended_s = code, time.monotonic()

    def overlaps(self, window: Window) -> bool:
        """Whether it was under way then."""
        return self.began_s <= window.end_s and (
            self.ended_s is None or self.ended_s >= window.start_s
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.request_id}: {self.code or 'no end'}"


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time.monotonic."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def share(self, start: float, end: float) -> Window:
        """A part of it: from and to these shares of its length."""
        return Window(self.start_s + start * self.length_s, self.start_s + end * self.length_s)

    def __contains__(self, moment_s: float) -> bool:
        return self.start_s <= moment_s < self.end_s


def lost(calls: Iterable[Asked], kills: Sequence[Window] = ()) -> list[Asked]:
    """Calls without an end, or with one that was not to be expected."""
    return [call for call in calls if not _is_accounted_for(call, kills)]


def _is_accounted_for(call: Asked, kills: Sequence[Window]) -> bool:
    if call.code in call.expected:
        return True
    return call.code == UNAVAILABLE and any(call.overlaps(kill) for kill in kills)


def first_audio_ms(calls: Iterable[Asked], kind: str, window: Window) -> tuple[float, int]:
    """The median of calls of a kind that began then, and of how many; 0 of none."""
    found = [
        1000 * call.first_audio_s
        for call in calls
        if call.kind == kind and call.first_audio_s is not None and call.began_s in window
    ]
    return (statistics.median(found) if found else 0.0), len(found)


@dataclass(frozen=True, slots=True)
class Log:
    """What a server's log (in JSON) says."""

    codes: dict[str, str]  # of calls that ended, by request id
    num_calls: int
    troubles: tuple[str, ...]  # its errors, and lines that are no JSON

    @classmethod
    def read(cls, path: Path, start: int = 0, end: int | None = None) -> Log:
        """Lines between two positions in bytes."""
        data = path.read_bytes()[start:end]
        codes, num_calls, troubles = {}, 0, []
        for line in data.decode(errors="replace").splitlines():
            record = _record(line)
            if record.get("message") == CALL_ENDED:
                codes[str(record["request_id"])] = str(record["code"])
                num_calls += 1
            elif record.get("level", "error") in ("error", "critical"):
                troubles.append(line)
        return cls(codes, num_calls, tuple(troubles))


def complete(calls: Iterable[Asked], log: Log) -> None:
    """Give calls whose status the client's library has lost the one that the log tells."""
    for call in calls:
        if call.code == WRITE_FAILED:
            call.code = log.codes.get(call.request_id, WRITE_FAILED)


def _record(line: str) -> dict[str, object]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def disagreements(calls: Sequence[Asked], log: Log) -> Iterator[str]:
    """Calls of which only one side knows, or whose ends differ.

    A client that leaves may do so before the server has read the call's id, and while the last
    words are under way: then the log has another id, or the status that the client did not wait
    for.
    """
    known = {call.request_id for call in calls}
    unknown = Counter(code for name, code in log.codes.items() if name not in known)
    missing = [call for call in calls if call.request_id not in log.codes]
    for call in missing:
        if call.code not in LEFT:
            yield f"not in the log: {call}"
    early = sum(call.code in LEFT for call in missing)
    if unknown.pop(CANCELLED, 0) > early:
        yield f"more than {early} calls in the log were cancelled before their id was read"
    for code, count in unknown.items():
        yield f"{count} calls in the log that ended {code} are no client's"
    for call in calls:
        told = log.codes.get(call.request_id)
        if told not in (None, call.code) and call.code not in LEFT:
            yield f"the log says {told}: {call}"
