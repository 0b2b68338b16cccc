"""`RemoteAdmission`: admission of calls over all front ends, by an engine's process.

request ─▶ Admit ─▶ the body begins ─▶ Speak, which waits for the slot in that process
                                    ─▶ held: Admitted, or the error of a refusal
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from tts.engine.client import EngineClient, Speak
from tts.errors import EngineLostError
from tts.ipc.messages import Admitted
from tts.ipc.remote_client import RemoteEngineClient, RemoteStream


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
    async def request(
        self, client: str, on_held: Callable[[], None] = lambda: None
    ) -> AsyncIterator[RemoteSlot]:
        """Request a slot to the end of the body, which begins at once. Raises EngineLostError."""

        def held() -> None:
            self._count(1, -1)
            on_held()

        self._count(0, 1)
        slot = None
        try:
            async with AsyncExitStack() as stack:
                engines = sorted(self._engines, key=lambda engine: engine.is_unloaded)
                slot = RemoteSlot(engines, client, stack, held)
                await slot.ask()
                yield slot
        finally:
            if slot is not None and slot.is_held:
                self._count(-1, 0)
            else:
                self._count(0, -1)

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts contradict each other."""
        assert self.running >= 0, self
        assert self.waiting >= 0, self

    def _count(self, running: int, waiting: int) -> None:
        self.running += running
        self.waiting += waiting
        self._note(self.running, self.waiting)


class RemoteSlot:
    """`Slot` of the first of `engines` that is connected; `stack` gives it back."""

    def __init__(
        self,
        engines: Sequence[RemoteEngineClient],
        client: str,
        stack: AsyncExitStack,
        on_held: Callable[[], None],
    ) -> None:
        self._engine, *self._others = engines  # that admits the call, and the next ones
        self._client, self._stack, self._on_held = client, stack, on_held
        self._stream: RemoteStream
        self.is_held = False
        """Whether the call holds the slot."""

    async def ask(self) -> None:
        """Send the request. Raises EngineLostError when no engine is connected."""
        while True:
            try:
                asked = self._engine.admit(self._client)
                self._stream = await self._stack.enter_async_context(asked)
                return
            except EngineLostError:
                if not self._others:
                    raise
                self._engine = self._others.pop(0)

    def speak_behind(self, client: EngineClient) -> Speak | None:
        """See `Slot`."""
        return partial(self._engine.speak, slot=self._stream) if client is self._engine else None

    async def held(self) -> None:
        """See `Slot`."""
        while not self.is_held:
            try:
                answer = await self._stream.next()
            except EngineLostError:
                if not self._others:
                    raise
                self._engine = self._others.pop(0)
                await self.ask()
            else:
                assert isinstance(answer, Admitted)
                self.is_held = True
                self._on_held()
