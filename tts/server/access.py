"""Access to the server, for all its protocols: tokens, calls of one client, messages in flight.

gRPC's core buffers the beginning of a message until the rest has arrived, however slowly, and so
does an HTTP server with a body. A message is therefore requested only in one of a few slots, which
bounds the memory of partial messages:

    slot ─▶ one is free ─▶ receive ─▶ release: to the waiting client that holds the fewest
                │                     slots; among equals, the one served least recently
                │ no, and none becomes free in time
                ▼
            the message of the client that holds the most slots is aborted, if it is late
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from tts.config.server import ServerConfig
from tts.errors import ForbiddenError, IdleTimeoutError, StreamLimitError, UnauthenticatedError

RECEIVING_BYTES = 128 * 2**20  # memory for messages in flight
RETRY_S = 1.0
PATIENCE_S = 1.0  # a message that takes no longer is never aborted
OWN_PATIENCE_S = 5.0  # the same, in favour of a client that holds as many slots


class AccessControl:
    """Checks of calls before their messages are read; one for all protocols. One event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._user_token, self._admin_token = config.auth_token, config.admin_token
        self.needs_token = config.auth_token is not None or config.admin_token is not None
        """Whether any call needs a token."""
        self._most_calls = config.max_streams_per_client
        self._open: Counter[str] = Counter()
        self.slots = ReceiveSlots(max(1, RECEIVING_BYTES // config.max_message_bytes))
        """Slots of the messages that are being received."""

    def __repr__(self) -> str:
        return f"AccessControl(calls={self._open.total()}, {self.slots!r})"

    def check_token(self, authorization: str, *, is_admin_call: bool) -> None:
        """Raise unless the value of an `authorization` header allows the call.

        Raises UnauthenticatedError without a valid token, and ForbiddenError for a call that
        needs the admin token. Compares in constant time, always with both tokens. Without an admin
        token the user token allows every call; without both, every call is allowed.
        """
        if not self.needs_token:
            return
        scheme, _, rest = authorization.partition(" ")
        presented = rest.strip() if scheme.lower() == "bearer" else ""
        is_user, is_admin = (
            token is not None and hmac.compare_digest(presented.encode(), token.encode())
            for token in (self._user_token, self._admin_token)
        )
        if not (is_user or is_admin):
            raise UnauthenticatedError("send 'authorization: Bearer TOKEN' with a valid token")
        if is_admin_call and self._admin_token and not is_admin:
            raise ForbiddenError("changing voices needs the admin token")

    @contextmanager
    def counted(self, client: str) -> Iterator[None]:
        """Count an open call of a client. Raises StreamLimitError when it has too many."""
        if self._open[client] >= self._most_calls:
            raise StreamLimitError(
                f"this client has {self._most_calls} calls open, which is the limit; "
                "close one first",
                subject="client",
                retry_after_s=RETRY_S,
            )
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]


@dataclass(eq=False, slots=True)
class _Slot:
    """Slot of one message, taken or waited for."""

    client: str
    limit: asyncio.Timeout
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    since_s: float = 0.0


class ReceiveSlots:
    """Fair scheduler of slots among clients. One event loop."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._waiting: list[_Slot] = []
        self._taken: list[_Slot] = []  # oldest first
        self._turns: dict[str, float] = {}  # time of the last slot of each present client

    def __repr__(self) -> str:
        return f"ReceiveSlots(taken={len(self._taken)}, waiting={len(self._waiting)})"

    @asynccontextmanager
    async def slot(self, client: str, timeout_s: float) -> AsyncIterator[None]:
        """Hold a slot while the body receives a message; wait for a free slot first.

        Raises IdleTimeoutError when waiting and receiving take longer than the timeout, or when
        the message is late and other clients wait for the slot.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                slot = _Slot(client, limit)
                try:
                    self._waiting.append(slot)
                    self._hand_out()
                    if not slot.taken.is_set():
                        await self._wait(slot)
                    yield
                finally:
                    self._leave(slot)
        except TimeoutError:
            raise IdleTimeoutError(
                f"the message was not there within {timeout_s:g} s, or took too long while "
                "others waited; send it at once"
            ) from None

    def check_integrity(self) -> None:
        """Raise AssertionError if slots were lost, or one is free while a message waits."""
        assert self._num_free >= 0, self
        assert not (self._num_free and self._waiting), self
        clients = {slot.client for slot in (*self._waiting, *self._taken)}
        assert self._turns.keys() <= clients, self

    async def _wait(self, slot: _Slot) -> None:
        while not slot.taken.is_set():
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await slot.taken.wait()
            except TimeoutError:
                self._give_up_for(slot)

    def _leave(self, slot: _Slot) -> None:
        if slot in self._waiting:
            self._waiting.remove(slot)
        elif slot in self._taken:
            self._taken.remove(slot)
            self._num_free += 1
            self._hand_out()
        if all(slot.client != other.client for other in (*self._waiting, *self._taken)):
            self._turns.pop(slot.client, None)

    def _hand_out(self) -> None:
        while self._num_free and self._waiting:
            slot, turns = self._waiting[0], self._turns
            if len(self._waiting) > 1:
                held = Counter(slot.client for slot in self._taken)
                slot = min(self._waiting, key=lambda s: (held[s.client], turns.get(s.client, 0.0)))
            self._waiting.remove(slot)
            self._taken.append(slot)
            self._num_free -= 1
            slot.since_s = turns[slot.client] = time.monotonic()
            slot.taken.set()

    def _give_up_for(self, waiting: _Slot) -> None:
        """Abort a late message, so that a waiting one can be received."""
        held, now_s = Counter(slot.client for slot in self._taken), time.monotonic()
        own = held[waiting.client]

        def is_late(slot: _Slot) -> bool:
            patience_s = PATIENCE_S if held[slot.client] > own else OWN_PATIENCE_S
            return now_s - slot.since_s > patience_s and not slot.limit.expired()

        late = [slot for slot in self._taken if is_late(slot)]
        if late:
            largest = max(late, key=lambda slot: held[slot.client])
            largest.limit.reschedule(asyncio.get_running_loop().time())
