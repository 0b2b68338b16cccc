"""Where one server's processes meet: four addresses made from `zmq_endpoint_base`.

    base-request    front ends ──▶ engine   work to do; bounded, a full one refuses
    base-cancel     front ends ──▶ engine   streams nobody reads any more; never behind a request
    base-control    front ends ──▶ engine   who is there, and what readers took
    base-response   engine ──▶ front end    everything that comes back

TCP has no suffixes: there the four are the base's port and the three after it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path

from llm import ConfigError

LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The four addresses; the engine binds them, front ends connect."""

    request: str
    cancel: str
    control: str
    response: str

    @classmethod
    def of(cls, base: str) -> Endpoints:
        """The addresses of a base such as ipc:///tmp/x, tcp://127.0.0.1:5555 or inproc://x.

        Raises ConfigError when a TCP base leaves no room for four ports.
        """
        names = [field.name for field in fields(cls)]
        if not base.startswith("tcp://"):
            return cls(*(f"{base}-{name}" for name in names))
        host, _, port = base.rpartition(":")
        if not port.isdecimal() or not 0 < int(port) <= LAST_PORT - len(names) + 1:
            raise ConfigError(
                f"zmq_endpoint_base={base} must end with the first of {len(names)} free ports, "
                "such as tcp://127.0.0.1:5555"
            )
        return cls(*(f"{host}:{int(port) + offset}" for offset in range(len(names))))

    def __iter__(self) -> Iterator[str]:
        return (getattr(self, field.name) for field in fields(self))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The socket files of ipc addresses."""
        return tuple(Path(a.removeprefix("ipc://")) for a in self if a.startswith("ipc://"))


@contextmanager
def reserved(base: str) -> Iterator[Endpoints]:
    """The endpoints of a base, for one server alone; socket files are removed at the end.

    ZeroMQ takes a socket file over from whoever has it, so servers with the same base exclude each
    other by a lock, which ends with its process. Raises ConfigError when the base is in use.
    """
    endpoints = Endpoints.of(base)
    if not base.startswith("ipc://"):
        yield endpoints
        return
    try:
        descriptor = _lock(base)
    except BlockingIOError:
        raise ConfigError(f"zmq_endpoint_base={base} is another server's; choose one") from None
    except OSError as error:
        raise ConfigError(f"zmq_endpoint_base={base} cannot be used: {error.strerror}") from error
    try:
        yield endpoints
    finally:
        _remove(base)
        os.close(descriptor)


def remove_leftovers(base: str) -> None:
    """Remove the socket files of a server that was killed, unless another has its base by now."""
    if base.startswith("ipc://"):
        with suppress(OSError):
            descriptor = _lock(base)
            _remove(base)
            os.close(descriptor)


def _lock(base: str) -> int:
    """Lock a base; the open file that holds the lock. OSError when that is impossible."""
    descriptor = os.open(_lock_path(base), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(base: str) -> None:
    for path in (*Endpoints.of(base).paths, _lock_path(base)):
        with suppress(FileNotFoundError):
            path.unlink()


def _lock_path(base: str) -> Path:
    return Path(base.removeprefix("ipc://") + "-lock")
