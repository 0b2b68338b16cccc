"""What a server's processes hold, read from /proc: memory, descriptors and threads."""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.serving import Server

ROLE = re.compile(rb"tts\.(?:processes\.)?(\w+)\0")
SUPERVISOR = "serve"


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one process holds, or several together."""

    pss: int = 0  # bytes; what processes share is divided among them
    rss: int = 0  # bytes; what they share counts for each
    descriptors: int = 0
    threads: int = 0

    def __add__(self, other: Holdings) -> Holdings:
        return Holdings(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at all processes of a server."""

    moment_s: float  # time.monotonic
    by_role: dict[str, Holdings]

    @property
    def total(self) -> Holdings:
        return sum(self.by_role.values(), Holdings())


def sample(server: Server) -> Sample:
    """Look now. A process that ends meanwhile is left out."""
    moment_s, by_role = time.monotonic(), dict[str, Holdings]()
    for pid in server.pids:
        with suppress(OSError):
            role = role_of(pid)
            by_role[role] = by_role.get(role, Holdings()) + holdings(pid)
    return Sample(moment_s, by_role)


def role_of(pid: int) -> str:
    """What a process is for: serve (the supervisor), engine or front_end; "" for others."""
    found = ROLE.search(Path(f"/proc/{pid}/cmdline").read_bytes())
    return found[1].decode() if found else ""


def pids_of(server: Server, role: str) -> list[int]:
    """The server's processes of a role that are there now."""
    found = []
    for pid in server.pids:
        with suppress(OSError):
            if role_of(pid) == role:
                found.append(pid)
    return found


def holdings(pid: int) -> Holdings:
    """What a process holds. Raises OSError when it has gone."""
    sizes = _sizes(Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    descriptors, threads = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task"))
    return Holdings(sizes["Pss"], sizes["Rss"], descriptors, threads)


def _sizes(lines: Iterable[str]) -> dict[str, int]:
    """Bytes by name, of lines such as `Rss:  12 kB`."""
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            found[name] = int(rest[:-3]) * 1024
    return found


def median(samples: Sequence[Sample], field: str, role: str = "") -> float:
    """Of all processes together, or of a role's; 0 of no samples."""
    each = [(s.by_role.get(role, Holdings()) if role else s.total) for s in samples]
    return statistics.median(getattr(one, field) for one in each) if each else 0.0


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """A line of JSON each."""
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in samples), encoding="utf-8")
