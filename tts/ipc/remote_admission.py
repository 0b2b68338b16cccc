"""`RemoteAdmission`: admission of calls over all front ends, by an engine's process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from tts.errors import EngineLostError
from tts.ipc.remote_client import RemoteEngineClient


class RemoteAdmission:
    """Implementation of `Admission`'s interface for one front end. One event loop.

    The first engine admits all calls. While it is lost, or has unloaded its model, the next one
    does, for the calls that need that engine only; it does not count the calls that the first one
    admitted. If all have unloaded their models, the first one is started.
    """

    def __init__(
        self,
        engines: Sequence[RemoteEngineClient],
        note: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._engines, self._note = engines, note
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
            async with AsyncExitStack() as slot:
                await self._take(slot, client)
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

    async def _take(self, slot: AsyncExitStack, client: str) -> None:
        """Wait for a slot of the first engine that is connected; `slot` gives it back."""
        *others, last = sorted(self._engines, key=lambda engine: engine.is_unloaded)
        for engine in others:
            with suppress(EngineLostError):
                await slot.enter_async_context(engine.admit(client))
                return
        await slot.enter_async_context(last.admit(client))

    def _count(self, running: int, waiting: int) -> None:
        self.running += running
        self.waiting += waiting
        self._note(self.running, self.waiting)
