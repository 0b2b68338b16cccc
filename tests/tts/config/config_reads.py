"""Recorder of the configuration fields that the service's code reads."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from llm import StrictModel
from tts.config.sources import inner_type, is_section

ROOT = Path(__file__).parents[3]
SERVICE = ("llm/", "decoder/", "tts/")
# These iterate over all fields or show them, which is not a use of a field.
NO_READERS = ("llm/config/strict.py", "llm/config/unsupported.py", "llm/config/report.py")
NO_READERS = (*NO_READERS, "tts/config/sources.py")


class Place(NamedTuple):
    """A field by the class that declares it, so fields of one name in two sections differ."""

    owner: str
    field: str


Reads = dict[Place, set[str]]
"""The files whose code read it."""


@contextmanager
def recorded() -> Iterator[Reads]:
    """Record every read of a field by name while the block runs, on any thread."""
    reads: Reads = defaultdict(set)
    plain = StrictModel.__getattribute__

    def watched(self: StrictModel, name: str) -> object:
        if name in type(self).model_fields:
            path = Path(sys._getframe(1).f_code.co_filename)
            source = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
            if source.startswith(SERVICE) and source not in NO_READERS:
                reads[place_of(type(self), name)].add(source)
        return plain(self, name)

    StrictModel.__getattribute__ = watched  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        del StrictModel.__getattribute__


def place_of(section: type[StrictModel], field: str) -> Place:
    """Return the declaring class of a field that a section may have inherited."""
    owners = [kind for kind in section.__mro__ if field in vars(kind).get("__annotations__", {})]
    return Place(owners[-1].__name__, field)


def places(root: type[StrictModel], prefix: str = "") -> dict[str, Place]:
    """Return the place of every field except sections, by dotted path."""
    found = {}
    for name, field in root.model_fields.items():
        kind = inner_type(field.annotation)
        if is_section(kind) and issubclass(kind, StrictModel):
            found |= places(kind, f"{prefix}{name}.")
        else:
            found[prefix + name] = place_of(root, name)
    return found
