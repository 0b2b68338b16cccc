"""Architectures from outside: modules named in the configuration, imported and registered.

A module is named as `module`, or as `folder:module` when its folder is not on Python's path. It
has a list `ARCHITECTURES`; the configuration class says which kinds of entries it takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from llm.errors import ConfigError

NAME = "ARCHITECTURES"


def load_plugins(names: list[str], take: Callable[[object], bool]) -> None:
    """Import each module and hand its entries to `take`, which says whether it takes them.

    Raises `ConfigError` naming the module and what is wrong with it.
    """
    for name in names:
        for entry in _entries(name):
            if not take(entry):
                raise ConfigError(f"custom_architectures={name}: {entry!r} is no architecture")


def _entries(name: str) -> list[object]:
    folder, found, module = name.rpartition(":")
    if ":" in folder or not module or (found and not folder):
        raise ConfigError(f"custom_architectures={name} must be module or folder:module")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        entries = getattr(import_module(module), NAME, None)
    except Exception as error:  # code of others: whatever goes wrong in it, the message is ours
        raise ConfigError(f"custom_architectures={name}: cannot import it: {error!r}") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"custom_architectures={name}: it has no list {NAME}, or an empty one")
    return entries
