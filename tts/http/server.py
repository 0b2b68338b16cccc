"""The HTTP server of a front end: uvicorn's connections on a socket and an event loop of ours.

uvicorn's own server is not used, because it takes the process's signals and listens without a limit
on TLS handshakes; what it does besides is to drain, which `CallTracker` does for all protocols.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import suppress

from uvicorn.config import Config
from uvicorn.server import ServerState

from llm import ConfigError
from tts.config.server import ServerConfig
from tts.http.app import create_app
from tts.http.connection import KEEP_ALIVE_S, Connection, ConnectionLimits
from tts.http.endpoint import Shared
from tts.http.websocket import PING_S, PING_TIMEOUT_S, WebSocketConnection
from tts.server.access import AccessControl
from tts.server.context import ServerContext
from tts.server.sockets import address_of, bound_socket

SEND_BUFFER_BYTES = 256 * 1024  # of the kernel, for each connection
BACKLOG = 512
POLL_S = 0.01
LAST_WORDS_S = 1.0  # time to deliver final responses after the last call


class HttpServer:
    """One listening server: `start` binds, `stop` ends it. Its calls are in `ServerContext`."""

    name = "http"

    def __init__(self, config: ServerConfig, host: ServerContext, access: AccessControl) -> None:
        self._config, self._host = config, host
        self._limits = ConnectionLimits(config)
        self._uvicorn = _uvicorn_config(Shared(host, access))
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self.port = 0
        """Bound port; set by `start`."""

    def __repr__(self) -> str:
        return f"HttpServer({self.address}, {self._limits!r})"

    @property
    def address(self) -> str:
        """Return host:port as a client writes it."""
        return address_of(self._config.host, self.port)

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return self._limits.num_open

    async def start(self) -> None:
        """Bind the port; calls are refused until the model is loaded.

        Raises ConfigError when the address or the TLS files cannot be used.
        """
        config = self._config
        context = _tls_context(config)
        self._uvicorn.load()
        bound = bound_socket(config.host, config.http_port or 0, is_shared=config.front_ends > 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        timeout_s = config.receive_timeout_s if context else None
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connect,
                sock=bound,
                ssl=context,
                backlog=BACKLOG,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=timeout_s,
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
        for connection in list(self._state.connections):
            connection.shutdown()
        tasks = self._state.tasks
        if tasks:
            await asyncio.wait(tasks, timeout=0 if self._host.calls.num_open else LAST_WORDS_S)
        for task in tasks:
            if not task.cancelling():  # a second one would break into what the first closes
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                while self._state.connections:
                    await asyncio.sleep(POLL_S)
        for connection in list(self._state.connections):
            connection.transport.abort()

    def _connect(self) -> Connection:
        return Connection(self._uvicorn, self._state, self._limits)


def _uvicorn_config(shared: Shared) -> Config:
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # clients cause its warnings
    return Config(
        create_app(shared),
        http=Connection,
        ws=WebSocketConnection,
        ws_max_size=shared.host.config.max_message_bytes,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_TIMEOUT_S,
        ws_per_message_deflate=False,
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",  # clients cause its errors and warnings; ours are logged as calls
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def _tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context; None for plain text. With a CA, client certificates are required."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    path = config.tls_cert
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
        if config.tls_client_ca is not None:
            path = config.tls_client_ca
            context.load_verify_locations(path)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"cannot use {path} for HTTP: {error}") from error
    return context
