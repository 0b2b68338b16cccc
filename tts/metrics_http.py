"""The HTTP server of the metrics: a few connections at once, a thread for each."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

logger = logging.getLogger("tts.metrics")

MAX_CONNECTIONS = 8


def start_metrics_server(
    host: str, port: int, registry: CollectorRegistry
) -> tuple[WSGIServer, threading.Thread]:
    """Serve GET /metrics on a thread; the server and its thread.

    Raises OSError when the address cannot be used.
    """
    server = make_server(host, port, make_wsgi_app(registry), _server_for(host, port), _Silent)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread


class _Bounded(ThreadingMixIn, WSGIServer):
    """When one connection too many comes, the one that is there for longest is closed.

    So connections that never ask for anything keep no scrape out, and need no time limit.
    """

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread of its own."""
        with self._lock:
            self._open.append(request)
            oldest = self._open.pop(0) if len(self._open) > MAX_CONNECTIONS else None
            if oldest is not None:
                _end(oldest)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell what the client library raised; a client that went away is not told."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("metrics could not be shown")

    def shutdown_request(self, request: Any) -> None:
        """A connection has been served."""
        with self._lock:
            if request in self._open:
                self._open.remove(request)
            super().shutdown_request(request)


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing of a request."""


def _end(connection: socket.socket) -> None:
    """Let the thread that reads from a connection find its end."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # its client was faster


def _server_for(host: str, port: int) -> type[WSGIServer]:
    """The server's class with the family of its address."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return type("_BoundedHere", (_Bounded,), {"address_family": family})
