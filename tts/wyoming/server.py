"""The Wyoming server: listens with the gRPC server, and shares its model, calls and limits.

Wyoming has neither tokens nor encryption. `ServerConfig` refuses an address other than loopback
for a server with tokens, unless `wyoming_without_token` allows it.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from llm import ConfigError
from tts.config.server import LOOPBACK, ServerConfig
from tts.errors import StreamLimitError
from tts.server.access import RETRY_S, AccessControl
from tts.server.call import client_at
from tts.server.context import ServerContext
from tts.server.sockets import address_of, bound_socket
from tts.server.status import status_of
from tts.wyoming import wire
from tts.wyoming.connection import Connection
from tts.wyoming.frames import MAX_LINE_BYTES

logger = logging.getLogger("tts.wyoming")

MAX_CONNECTIONS = 256
BACKLOG = 512
SEND_BUFFER_BYTES = 256 * 1024  # of the kernel, for each connection
KEEPALIVE_S, NUM_KEEPALIVES = 60, 3


class WyomingServer:
    """One listening server: `start` binds, `stop` ends it. Its calls are in `ServerContext`."""

    name = "wyoming"

    def __init__(self, config: ServerConfig, host: ServerContext, access: AccessControl) -> None:
        self._config, self._host, self._access = config, host, access
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.port = 0
        """Bound port; set by `start`."""

    @property
    def address(self) -> str:
        """Return host:port as a client writes it."""
        return address_of(self._config.wyoming_host, self.port)

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self._serving)

    async def start(self) -> None:
        """Bind the port. Raises ConfigError when the address cannot be used."""
        config = self._config
        if config.wyoming_host not in LOOPBACK:
            logger.warning(
                "every client that reaches %s may speak over Wyoming, which has no tokens and no "
                "encryption",
                config.wyoming_host,
            )
        bound = _listening_socket(config)
        try:
            self._server = await asyncio.start_server(
                self._accept, sock=bound, limit=MAX_LINE_BYTES, backlog=BACKLOG
            )
        except OSError as error:
            bound.close()
            raise ConfigError(f"cannot listen on {self.address}: {error.strerror}") from error
        self.port = bound.getsockname()[1]

    async def stop(self) -> None:
        """Cancel the remaining calls and close all connections and the port."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("peername")
        if address is None or self._server is None:  # disconnected, or accepted while stopping
            writer.transport.abort()
        elif len(self._serving) >= MAX_CONNECTIONS:
            self._refuse(writer)
        else:
            client = client_at(address[0])
            connection = Connection(self._host, self._access, client, reader, writer)
            task = asyncio.create_task(connection.serve())
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            task.add_done_callback(lambda _: writer.transport.abort())

    def _refuse(self, writer: asyncio.StreamWriter) -> None:
        """Close a connection with an error, without waiting for its client."""
        error = StreamLimitError(
            f"the server has {MAX_CONNECTIONS} Wyoming connections open, which is the limit",
            subject="server",
            retry_after_s=RETRY_S,
        )
        status = status_of(error)
        self._host.metrics.errors.labels(status.code.name, status.reason).inc()
        writer.write(wire.to_error(status))
        writer.close()


def _listening_socket(config: ServerConfig) -> socket.socket:
    """Return a bound socket, whose options its connections inherit. Raises ConfigError."""
    is_shared = config.front_ends > 1
    bound = bound_socket(config.wyoming_host, config.wyoming_port or 0, is_shared=is_shared)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_KEEPALIVES)
    return bound
