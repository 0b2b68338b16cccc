"""Comparison of the calls of a soak test as recorded by the clients and by the server's log.

A call is lost when its client saw no end, or an unexpected one. UNAVAILABLE is expected between the
kill of an engine and its restart.
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

from tts.server.call import REQUEST_ID_KEY

OK, CANCELLED, VANISHED, UNAVAILABLE = "OK", "CANCELLED", "VANISHED", "UNAVAILABLE"
LEFT = frozenset({CANCELLED, VANISHED})  # ends caused by the client
WRITE_FAILED = "WRITE_FAILED"
"""grpc.aio's status of a call that ended while its client wrote: the server's status is lost."""
OWN_WORDS = "Internal error from Core"  # the details of such a status
CALL_ENDED = "call ended"  # the log's message


def code_of(error: grpc.aio.AioRpcError) -> str:
    """Return a call's status, or WRITE_FAILED."""
    is_local = error.code().name == "INTERNAL" and error.details() == OWN_WORDS
    return WRITE_FAILED if is_local else str(error.code().name)


@dataclass(slots=True)
class CallRecord:
    """One call as recorded by its client. Times are of time.monotonic."""

    kind: str
    request_id: str
    expected: frozenset[str]
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    code: str = ""  # a status, or VANISHED
    first_audio_s: float | None = None  # after it began
    audio_s: float = 0.0  # duration of its audio

    def record_audio(self) -> None:
        """Record audio."""
        if self.first_audio_s is None:
            self.first_audio_s = time.monotonic() - self.began_s

    def adopt(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Take the id from the server's metadata, which differs if it does not accept the
        client's.
        """
        for key, value in metadata or ():
            if key == REQUEST_ID_KEY:
                self.request_id = str(value)

    def fail(self, error: grpc.aio.AioRpcError) -> None:
        """Record an end with an error status."""
        self.adopt(error.trailing_metadata())
        self.end(code_of(error))

    def end(self, code: str) -> None:
        """Record an end; only the first one counts."""
        if self.ended_s is None:
            self.code, self.ended_s = code, time.monotonic()

    def overlaps(self, window: Window) -> bool:
        """Whether the call was active in a window."""
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
        """Return a part of the window, from and to these shares of its length."""
        return Window(self.start_s + start * self.length_s, self.start_s + end * self.length_s)

    def __contains__(self, moment_s: float) -> bool:
        return self.start_s <= moment_s < self.end_s


def lost(calls: Iterable[CallRecord], kills: Sequence[Window] = ()) -> list[CallRecord]:
    """Return calls without an end, or with an unexpected one."""
    return [call for call in calls if not _is_accounted_for(call, kills)]


def _is_accounted_for(call: CallRecord, kills: Sequence[Window]) -> bool:
    if call.code in call.expected:
        return True
    return call.code == UNAVAILABLE and any(call.overlaps(kill) for kill in kills)


def first_audio_ms(calls: Iterable[CallRecord], kind: str, window: Window) -> tuple[float, int]:
    """Return the median of calls of a kind that began in a window, and their number; 0 without
    calls.
    """
    found = [
        1000 * call.first_audio_s
        for call in calls
        if call.kind == kind and call.first_audio_s is not None and call.began_s in window
    ]
    return (statistics.median(found) if found else 0.0), len(found)


@dataclass(frozen=True, slots=True)
class Log:
    """Content of a server's log (in JSON)."""

    codes: dict[str, str]  # of calls that ended, by request id
    num_calls: int
    troubles: tuple[str, ...]  # errors, and lines that are not JSON

    @classmethod
    def read(cls, path: Path, start: int = 0, end: int | None = None) -> Log:
        """Read lines between two positions in bytes."""
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


def complete(calls: Iterable[CallRecord], log: Log) -> None:
    """Set the status of calls for which the client's library lost it, from the log."""
    for call in calls:
        if call.code == WRITE_FAILED:
            call.code = log.codes.get(call.request_id, WRITE_FAILED)


def _record(line: str) -> dict[str, object]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def disagreements(calls: Sequence[CallRecord], log: Log) -> Iterator[str]:
    """Iterate over calls that only one side recorded, or whose ends differ.

    A client that cancels may do so before the server has read the call's id, or while the last
    messages are in transfer: then the log has another id, or the status that the client did not
    wait for.
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
            yield f"the log has {told}: {call}"
