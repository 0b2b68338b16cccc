"""Listening sockets: one port for a server, or shared by the front ends of one."""

from __future__ import annotations

import socket

from llm import ConfigError


def bound_socket(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """Return a TCP socket bound to a port (0: any free one), not listening yet.

    Several processes bind a port that is shared. Raises ConfigError when the address cannot be
    used.
    """
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


def address_of(host: str, port: int) -> str:
    """Return host:port as a client writes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
