"""Keeps a grpc.aio server listening on one port.

grpcio 1.84.0 to 1.85.1, the newest there is, ends a server's loop when a call's path is not UTF-8
(1.83.2 does not): the listener closes, running calls go on, and the process seems to be well.
`Listener` notices and starts another server on the same port; the old one ends with its last call.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress

import grpc

logger = logging.getLogger("tts.listener")

CHECK_S = 0.02  # how often the loop is looked at: for so long new connections may be refused
RETRY_S = 0.1  # after the port could not be bound

Create = Callable[[], grpc.aio.Server]
Bind = Callable[[grpc.aio.Server, int], int]
"""Lets a server listen on a port (0: any free one) and returns it; RuntimeError where it cannot."""


class Unregistered:
    """A server as generated code sees it that adds services to it: no method is registered.

    For each registered method grpcio's server loop has a request under way in gRPC's core. When
    the loop ends by an error it frees what the core is going to write to.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Methods are found by their names among the generic handlers."""


class Listener:
    """A server from `start` to `stop`, and its successors. One event loop."""

    def __init__(self, create: Create, bind: Bind) -> None:
        self._create, self._bind = create, bind
        self._server = create()
        self._retired: set[asyncio.Task[None]] = set()
        self._old: list[grpc.aio.Server] = []
        self._keeping: asyncio.Task[None] | None = None
        self.is_up = False
        """Whether new connections are taken."""

    async def start(self, port: int) -> int:
        """Listen; the port. Raises RuntimeError when it cannot be bound."""
        bound = self._bind(self._server, port)
        await self._server.start()
        self.is_up = True
        self._keeping = asyncio.create_task(self._keep(bound))
        return bound

    async def stop(self, grace_s: float | None) -> None:
        """Take no more calls; cancel those that have not ended within the grace time."""
        if self._keeping is not None:
            self._keeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeping
        self.is_up = False
        await asyncio.gather(*(server.stop(grace_s) for server in (self._server, *self._old)))
        await asyncio.gather(*self._retired)

    async def _keep(self, port: int) -> None:
        while True:
            error = await self._ended()
            if error is not None:
                self.is_up = False
                logger.error("the server's loop ended (%s): listening anew", type(error).__name__)
                self._retire()
                await self._succeed(port)

    async def _ended(self) -> BaseException | None:
        """What ended the server's loop; None when that has not happened within a while."""
        waiting = asyncio.ensure_future(self._server.wait_for_termination(CHECK_S))
        try:
            await asyncio.wait((waiting,))
        finally:
            waiting.cancel()  # for where this task is cancelled itself
        return waiting.exception()

    def _retire(self) -> None:
        """Let the server's calls end in their own time."""
        old = self._server
        self._old.append(old)
        ending = asyncio.create_task(old.stop(math.inf))
        self._retired.add(ending)
        ending.add_done_callback(self._retired.discard)
        ending.add_done_callback(lambda _: self._old.remove(old))

    async def _succeed(self, port: int) -> None:
        """Start another server, as soon as the port is free."""
        self._server = self._create()
        while True:
            try:
                self._bind(self._server, port)
                break
            except RuntimeError:
                await asyncio.sleep(RETRY_S)
        await self._server.start()
        self.is_up = True
