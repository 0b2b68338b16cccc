"""One port for one server, whose front ends share it and nobody else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from llm import ConfigError


@contextmanager
def reserved_port(host: str, port: int, *, is_shared: bool) -> Iterator[int]:
    """A port (0: any free one) that front ends can listen on while the block lasts.

    Several share it through SO_REUSEPORT. A socket that has it would let any server of the same
    user in, so first one without it is bound: that fails where somebody listens. Raises
    ConfigError then.
    """
    with _bound(host, port, is_shared=False) as probe:
        number: int = probe.getsockname()[1]
    if not is_shared:
        yield number
        return
    with _bound(host, number, is_shared=True):  # holds it while no front end lives
        yield number


def _bound(host: str, port: int, *, is_shared: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    try:
        option = socket.SO_REUSEPORT if is_shared else socket.SO_REUSEADDR
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound
