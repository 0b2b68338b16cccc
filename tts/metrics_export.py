"""Who shows the metrics: the application, an HTTP server of one process, or one for several.

    INSTRUMENT_ONLY            Metrics ─▶ the client library's registry ─▶ whoever asks it
    LAUNCH_SERVER              Metrics ─▶ the registry ─▶ GET /metrics
    LAUNCH_MULTIPROC_SERVER    Metrics of each process ─▶ files in one folder ─▶ GET /metrics (sums)

The folder is there before a process counts anything: `metrics_folder` belongs around the start of
the processes, and `forget_process` is called when one of them has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from llm import ConfigError
from tts.leftovers import temporary_folder
from tts.metrics import Metrics
from tts.metrics_http import start_metrics_server

logger = logging.getLogger("tts.metrics")

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
LEFTOVERS = "*.db"


def register(metrics: Metrics) -> Callable[[], None]:
    """Put a server's metrics into the client library's registry; returns how to undo it."""
    REGISTRY.register(metrics.registry)
    return lambda: REGISTRY.unregister(metrics.registry)


def serve_metrics(
    metrics: Metrics, host: str, port: int, folder: Path | None = None
) -> Callable[[], None]:
    """Serve GET /metrics; returns how to stop. With a folder: of all processes that count in it.

    The engine's numbers are those that `metrics` was given: there is one engine. Raises
    ConfigError when the address cannot be used.
    """
    registry: CollectorRegistry = REGISTRY
    if folder is not None:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(folder))
        registry.register(metrics.engine)
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


@contextmanager
def metrics_folder(environ: MutableMapping[str, str]) -> Iterator[Path]:
    """The folder in which this process and those it starts count, named in their environment.

    Where the environment names one already it is made if need be and old counts in it are
    removed; else it is a new one. Either is empty or gone afterwards.
    """
    given = environ.get(FOLDER_VARIABLE)
    with nullcontext(Path(given)) if given else temporary_folder("metrics") as folder:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_counts(folder)
        environ[FOLDER_VARIABLE] = str(folder)
        former = values.ValueClass
        if not former._multiprocess:  # the library looked before the variable was there
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
    """A process that counted has ended: what it was in the middle of no longer goes on.

    Its counters stay in the sums, its gauges do not.
    """
    mark_process_dead(pid, str(folder))


def _remove_counts(folder: Path) -> None:
    for path in folder.glob(LEFTOVERS):
        path.unlink(missing_ok=True)
