"""Check of the packages of an extra."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from llm import ConfigError


def check_packages(field: str, extra: str, packages: Sequence[str]) -> None:
    """Raise ConfigError if packages are missing that an option needs."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{field} needs the packages {', '.join(missing)}; "
            f"install the extra '{extra}': pip install 'sonant[{extra}]'"
        )
