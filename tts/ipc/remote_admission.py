"""`RemoteAdmission`: admission of calls over all front ends, by the engine's process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tts.ipc.remote_client import RemoteEngineClient


class RemoteAdmission:
    """Implementation of `Admission`'s interface for one front end. One event loop."""

    def __init__(
        self, client: RemoteEngineClient, note: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        self._client, self._note = client, note
        self.running = 0
        """Number of this front end's calls that hold a slot."""
        self.waiting = 0
        """Number of this front end's calls that wait for a slot or have just requested one."""

    def __repr__(self) -> str:
        return f"RemoteAdmission(running={self.running}, waiting={self.waiting})"

    @asynccontextmanager
    async def enter(self, client: str) -> AsyncIterator[None]:
        """Hold a slot while the body runs; wait for a free one first.

        Raises StreamLimitError or ServerBusyError when a limit is reached, and EngineLostError.
        """
        self._count(0, 1)
        is_waiting = True
        try:
            async with self._client.admit(client):
                is_waiting = False
                self._count(1, -1)
                try:
                    yield
                finally:
                    self._count(-1, 0)
        finally:
            if is_waiting:
                self._count(0, -1)

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts contradict each other."""
        assert self.running >= 0, self
        assert self.waiting >= 0, self

    def _count(self, running: int, waiting: int) -> None:
        self.running += running
        self.waiting += waiting
        self._note(self.running, self.waiting)
