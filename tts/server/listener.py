"""Listener that keeps a grpc.aio server on one port and replaces it after a failure.

grpcio 1.84.0 to 1.85.1 (the newest release) ends a server's loop when a call's path is not UTF-8;
1.83.2 does not. The port closes, running calls continue, and the process appears healthy.
`Listener` detects this and starts another server on the same port; the old one stops after its
last call.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress

import grpc

logger = logging.getLogger("tts.listener")

CHECK_S = 0.05  # polling interval of the loop: new connections may be refused for so long
RETRY_S = 0.1  # after the port could not be bound

Create = Callable[[], grpc.aio.Server]
Bind = Callable[[grpc.aio.Server, int], int]
"""Bind a server to a port (0: any free one) and return the port; raise RuntimeError on failure."""


class Unregistered:
    """Server interface for generated code that leaves out the registration of methods.

    For each registered method, grpcio's server loop has a pending request in gRPC's core. A loop
    that ends with an error frees memory that the core still writes to.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Do nothing: methods are found by name among the generic handlers."""


class Listener:
    """A server and its replacements, from `start` to `stop`. One event loop."""

    def __init__(self, create: Create, bind: Bind) -> None:
        self._create, self._bind = create, bind
        self._server = create()
        self._retired: set[asyncio.Task[None]] = set()
        self._old: list[grpc.aio.Server] = []
        self._keeping: asyncio.Task[None] | None = None
        self.is_up = False
        """Whether new connections are accepted."""

    async def start(self, port: int) -> int:
        """Listen and return the port. Raises RuntimeError when it cannot be bound."""
        bound = self._bind(self._server, port)
        await self._server.start()
        self.is_up = True
        self._keeping = asyncio.create_task(self._keep(bound))
        return bound

    async def stop(self, grace_s: float | None) -> None:
        """Accept no more calls; cancel those that have not ended within the grace period."""
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
                logger.error("the server's loop ended (%s): listening again", type(error).__name__)
                self._retire()
                await self._succeed(port)

    async def _ended(self) -> BaseException | None:
        """Return the error that ended the server's loop; None if it still runs after CHECK_S."""
        waiting = asyncio.ensure_future(self._server.wait_for_termination(CHECK_S))
        try:
            await asyncio.wait((waiting,))
        finally:
            waiting.cancel()  # in case this task itself is cancelled
        return waiting.exception()

    def _retire(self) -> None:
        """Stop the server after its running calls have ended."""
        old = self._server
        self._old.append(old)
        ending = asyncio.create_task(old.stop(math.inf))
        self._retired.add(ending)
        ending.add_done_callback(self._retired.discard)
        ending.add_done_callback(lambda _: self._old.remove(old))

    async def _succeed(self, port: int) -> None:
        """Start another server as soon as the port is free."""
        self._server = self._create()
        while True:
            try:
                self._bind(self._server, port)
                break
            except RuntimeError:
                await asyncio.sleep(RETRY_S)
        await self._server.start()
        self.is_up = True
