"""An engine that runs inside a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llm.engine.engine import Engine


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """Start an engine, and shut it down at the end."""
    engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()
