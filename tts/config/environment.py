"""Environment variables of this process; only this module reads `os.environ`.

It imports nothing heavy: a command calls `prepare_libraries` before its libraries are imported.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping


def process_environment() -> MutableMapping[str, str]:
    """Return this process's environment, to be passed to child processes."""
    return os.environ


def prepare_libraries() -> None:
    """Set variables for libraries of this process and its children, unless the user has set them.

    Call it before they are imported.
    """
    # gRPC's core writes bytes from clients and causes of failed handshakes to standard error,
    # unescaped and past the log.
    process_environment().setdefault("GRPC_VERBOSITY", "NONE")
    # Threads of torch that spin while they wait take the core from those they wait for, where
    # other processes compete for it.
    process_environment().setdefault("OMP_WAIT_POLICY", "PASSIVE")
