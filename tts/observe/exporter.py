"""Exporter of metrics: the client library's registry, or an HTTP server for one or many processes.

    INSTRUMENT_ONLY            Metrics ─▶ the client library's registry ─▶ the application
    LAUNCH_SERVER              Metrics ─▶ the registry ─▶ GET /metrics
    LAUNCH_MULTIPROC_SERVER    Metrics of each process ─▶ files in one folder ─▶ GET /metrics (sums)

The folder must exist before a process writes metrics: start the processes inside `metrics_folder`,
and call `forget_process` when one of them has ended.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    generate_latest,
    make_wsgi_app,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from llm import ConfigError
from tts.leftovers import temporary_folder
from tts.observe.metrics import Metrics

logger = logging.getLogger("tts.metrics")

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
LEFTOVERS = "*.db"
CONTENT_TYPE = CONTENT_TYPE_LATEST


def register(metrics: Metrics) -> Callable[[], None]:
    """Add a server's metrics to the client library's registry; return the undo function."""
    REGISTRY.register(metrics.registry)
    return lambda: REGISTRY.unregister(metrics.registry)


def serve_metrics(
    metrics: Metrics, host: str, port: int, folder: Path | None = None
) -> Callable[[], None]:
    """Serve GET /metrics; return a function that stops the server.

    With a folder the metrics are sums over all processes that write to it, except the engine's
    status, which is that of `metrics`. Raises ConfigError when the address cannot be used.
    """
    registry: CollectorRegistry = REGISTRY
    if folder is not None:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(folder))
        metrics.register_engines(registry)
    try:
        http, thread = start_metrics_server(host, port, registry)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error}") from error
    logger.info("metrics on http://%s:%d/metrics", host, http.server_port)

    def stop() -> None:
        http.shutdown()
        http.server_close()
        thread.join()

    return stop


def is_shared() -> bool:
    """Return whether the processes of this server add their metrics up, see `metrics_folder`."""
    return bool(values.ValueClass._multiprocess)


def exposition(metrics: Metrics) -> bytes:
    """Return the metrics as text; sums over all processes if they are shared."""
    if not is_shared():
        return generate_latest(metrics.registry)
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    metrics.register_engines(registry)
    return generate_latest(registry)


@contextmanager
def metrics_folder(environ: MutableMapping[str, str]) -> Iterator[Path]:
    """Set up the folder for the metrics of this process and its children, named in `environ`.

    If `environ` already names a folder, it is created if needed, and old files in it are removed;
    else it is a new temporary folder. Afterwards the folder is empty or removed.
    """
    given = environ.get(FOLDER_VARIABLE)
    with nullcontext(Path(given)) if given else temporary_folder("metrics") as folder:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_counts(folder)
        environ[FOLDER_VARIABLE] = str(folder)
        former = values.ValueClass
        if not former._multiprocess:  # the library was imported before the variable was set
            values.ValueClass = values.MultiProcessValue()
        try:
            yield folder
        finally:
            values.ValueClass = former
            if given:
                _remove_counts(folder)
            else:
                del environ[FOLDER_VARIABLE]


def forget_process(pid: int, folder: Path) -> None:
    """Remove the gauges of an ended process from the sums; its counters remain."""
    mark_process_dead(pid, str(folder))


def _remove_counts(folder: Path) -> None:
    for path in folder.glob(LEFTOVERS):
        path.unlink(missing_ok=True)


logger = logging.getLogger("tts.metrics")

MAX_CONNECTIONS = 8


def start_metrics_server(
    host: str, port: int, registry: CollectorRegistry
) -> tuple[WSGIServer, threading.Thread]:
    """Serve GET /metrics on a thread; return the server and its thread.

    Raises OSError when the address cannot be used.
    """
    server = make_server(host, port, make_wsgi_app(registry), _server_for(host, port), _Silent)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread


class _Bounded(ThreadingMixIn, WSGIServer):
    """HTTP server with a maximum number of connections: a new one closes the oldest.

    Idle connections therefore cannot block a scrape and need no timeout.
    """

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a new thread."""
        with self._lock:
            self._open.append(request)
            oldest = self._open.pop(0) if len(self._open) > MAX_CONNECTIONS else None
            if oldest is not None:
                _end(oldest)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of the client library; ignore disconnected clients."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("metrics could not be exported")

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was served."""
        with self._lock:
            if request in self._open:
                self._open.remove(request)
            super().shutdown_request(request)


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Do not log requests."""


def _end(connection: socket.socket) -> None:
    """Shut a connection down, which ends the thread that reads from it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the client has closed it already


def _server_for(host: str, port: int) -> type[WSGIServer]:
    """Return the server class for the family of an address."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return type("_BoundedHere", (_Bounded,), {"address_family": family})
