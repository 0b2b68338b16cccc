"""Endpoints of one server's processes: four addresses derived from `zmq_endpoint_base`, and an id.

    base-request    front ends ──▶ engine   requests; bounded, a full queue refuses
    base-cancel     front ends ──▶ engine   cancellations, which do not queue behind requests
    base-control    front ends ──▶ engine   connections and credit
    base-response   engine ──▶ front end    all responses

TCP addresses have no suffixes: they are the base's port and the three after it, and the next port
serves as the lock. Processes of different servers that connect nevertheless detect it by the id and
refuse each other. An engine that computes prompts for others has the format of its pages for an id:
engines of other servers may connect if their pages have the same.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path

from llm import ConfigError
from tts.leftovers import LOCK, SOCKETS, lock, when_released

LAST_PORT = 65535
OWNER_ONLY = 0o077
NAMES = ("request", "cancel", "control", "response")
LONGEST_PATH = 107 if sys.platform == "linux" else 103
"""Bytes of a socket file's path."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses that the engine binds and front ends connect to, and the id of their server."""

    request: str
    cancel: str
    control: str
    response: str
    server_id: str = ""
    base: str = ""
    by_format: bool = False
    """Whether the id is the format of an engine's pages, which engines of other servers share."""

    @classmethod
    def of(cls, base: str, server_id: str = "", *, by_format: bool = False) -> Endpoints:
        """Return the endpoints of a base such as ipc:///tmp/x, tcp://127.0.0.1:5555 or inproc://x.

        Raises ConfigError when a TCP base leaves no room for four ports and the lock's, and when
        the path of a socket file is too long for the system.
        """
        if base.startswith("tcp://"):
            host, port = _host_and_port(base)
            addresses = {n: f"tcp://{host}:{port + offset}" for offset, n in enumerate(NAMES)}
        else:
            addresses = {name: f"{base}-{name}" for name in NAMES}
        found = cls(**addresses, server_id=server_id, base=base, by_format=by_format)
        longest = max((len(os.fsencode(path)) for path in found.paths), default=0)
        if longest > LONGEST_PATH:
            raise ConfigError(
                f"zmq_endpoint_base={base}: paths of sockets have {longest} bytes, at most "
                f"{LONGEST_PATH} are possible: choose a shorter base, or a shorter TMPDIR"
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return (getattr(self, name) for name in NAMES)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Socket files of ipc addresses."""
        return tuple(Path(a.removeprefix("ipc://")) for a in self if a.startswith("ipc://"))


@dataclass(frozen=True, slots=True)
class ServerEndpoints:
    """Endpoints of all engines of a server."""

    model: tuple[Endpoints, ...]  # of each replica
    prefill: tuple[Endpoints, ...] = ()  # of each engine that computes prompts for them
    text: Endpoints | None = None  # of a text model
    admission: Endpoints | None = None  # of calls, where no engine admits them


def replica_base(base: str, number: int) -> str:
    """Return the base of a replica's endpoints, by its number from 0, which has the base itself.

    Raises ConfigError when a TCP base is invalid.
    """
    if not number:
        return base
    if base.startswith("tcp://"):
        host, port = _host_and_port(base)
        return f"tcp://{host}:{port + number * (len(NAMES) + 1)}"
    return f"{base}-{number}"


@contextmanager
def owner_only() -> Iterator[None]:
    """Create files for this user only inside the block; sockets are then not open to others."""
    former = os.umask(OWNER_ONLY)
    try:
        yield
    finally:
        os.umask(former)


@contextmanager
def reserved(base: str) -> Iterator[Endpoints]:
    """Reserve the endpoints of a base for one new server; remove their socket files at the end.

    ZeroMQ takes a socket file over from another process, and ports are free while an engine
    restarts. Servers with the same base therefore exclude each other by a lock, which is released
    when its process ends. Raises ConfigError when the base is in use.
    """
    endpoints = Endpoints.of(base, secrets.token_hex(8))
    release = _lock_of(base)
    try:
        yield endpoints
    finally:
        release()


def _lock_of(base: str) -> Callable[[], None]:
    """Lock a base; return the function that unlocks it. `inproc` needs no lock."""
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
    """Return the lock of a TCP base: a listening port without clients."""
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


def remove_leftovers(base: str, wait_s: float = 0.0) -> None:
    """Remove the socket files of a killed server, unless another server uses its base for longer
    than this time.
    """
    if base.startswith("ipc://"):
        when_released(lambda: _unlock(base, lock(_lock_path(base), SOCKETS)), wait_s)


def remove_stale_replicas(base: str) -> None:
    """Remove the socket files of other replicas, and of their admission, of a server with this base
    that was killed with all of its processes. It may have had more of them than the next one has.
    """
    if not base.startswith("ipc://"):
        return
    own = Path(base.removeprefix("ipc://"))
    for path in own.parent.glob(f"{escape(own.name)}-*{LOCK}"):
        number = path.name.removeprefix(f"{own.name}-").removesuffix(LOCK)
        if number.isdecimal():
            remove_leftovers(f"{base}-{number}")


def _unlock(base: str, descriptor: int) -> None:
    for path in (*Endpoints.of(base).paths, _lock_path(base)):
        with suppress(FileNotFoundError):
            path.unlink()
    os.close(descriptor)


def _lock_path(base: str) -> Path:
    return Path(base.removeprefix("ipc://") + LOCK)
