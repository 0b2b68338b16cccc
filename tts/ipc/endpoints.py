"""Where one server's processes meet: four addresses made from `zmq_endpoint_base`, and its id.

    base-request    front ends ──▶ engine   work to do; bounded, a full one refuses
    base-cancel     front ends ──▶ engine   streams nobody reads any more; never behind a request
    base-control    front ends ──▶ engine   who is there, and what readers took
    base-response   engine ──▶ front end    everything that comes back

TCP has no suffixes: there the four are the base's port and the three after it, and the one after
those is the lock. Who meets the engine or a front end of another server all the same knows it by
the id, and refuses it.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llm import ConfigError
from tts.leftovers import LOCK, SOCKETS, lock

LAST_PORT = 65535
NAMES = ("request", "cancel", "control", "response")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Four addresses, which the engine binds; front ends connect. `server_id`: whose they are."""

    request: str
    cancel: str
    control: str
    response: str
    server_id: str = ""

    @classmethod
    def of(cls, base: str, server_id: str = "") -> Endpoints:
        """The addresses of a base such as ipc:///tmp/x, tcp://127.0.0.1:5555 or inproc://x.

        Raises ConfigError when a TCP base leaves no room for four ports and the lock's.
        """
        if base.startswith("tcp://"):
            host, port = _host_and_port(base)
            addresses = {n: f"tcp://{host}:{port + offset}" for offset, n in enumerate(NAMES)}
        else:
            addresses = {name: f"{base}-{name}" for name in NAMES}
        return cls(**addresses, server_id=server_id)

    def __iter__(self) -> Iterator[str]:
        return (getattr(self, name) for name in NAMES)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The socket files of ipc addresses."""
        return tuple(Path(a.removeprefix("ipc://")) for a in self if a.startswith("ipc://"))


@contextmanager
def reserved(base: str) -> Iterator[Endpoints]:
    """The endpoints of a base, for one new server alone; socket files are removed at the end.

    ZeroMQ takes a socket file over from whoever has it, and ports are free while an engine is
    restarted: so servers with the same base exclude each other by a lock, which ends with its
    process. Raises ConfigError when the base is in use.
    """
    endpoints = Endpoints.of(base, secrets.token_hex(8))
    release = _lock_of(base)
    try:
        yield endpoints
    finally:
        release()


def _lock_of(base: str) -> Callable[[], None]:
    """Take a base; the call that lets it go. `inproc` is this process's own."""
    try:
        if base.startswith("tcp://"):
            return _listening(base).close
        if base.startswith("ipc://"):
            return partial(_unlock, base, lock(_lock_path(base), SOCKETS))
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EWOULDBLOCK):
            raise ConfigError(f"zmq_endpoint_base={base} is another server's; choose one") from None
        raise ConfigError(f"zmq_endpoint_base={base} cannot be used: {error.strerror}") from error
    return lambda: None


def _listening(base: str) -> socket.socket:
    """The lock of a TCP base: a port that nobody connects to."""
    host, port = _host_and_port(base)
    address = host.strip("[]"), port + len(NAMES)
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    return socket.create_server(address, family=family, backlog=1)


def _host_and_port(base: str) -> tuple[str, int]:
    host, _, port = base.removeprefix("tcp://").rpartition(":")
    num_ports = len(NAMES) + 1
    if not host or not port.isdecimal() or not 0 < int(port) <= LAST_PORT - num_ports + 1:
        raise ConfigError(
            f"zmq_endpoint_base={base} must end with the first of {num_ports} free ports, "
            "such as tcp://127.0.0.1:5555"
        )
    return host, int(port)


def remove_leftovers(base: str) -> None:
    """Remove the socket files of a server that was killed, unless another has its base by now."""
    if base.startswith("ipc://"):
        with suppress(OSError):
            descriptor = lock(_lock_path(base), SOCKETS)
            _unlock(base, descriptor)


def _unlock(base: str, descriptor: int) -> None:
    for path in (*Endpoints.of(base).paths, _lock_path(base)):
        with suppress(FileNotFoundError):
            path.unlink()
    os.close(descriptor)


def _lock_path(base: str) -> Path:
    return Path(base.removeprefix("ipc://") + LOCK)
