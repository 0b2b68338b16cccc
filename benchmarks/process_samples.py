"""Resources of a server's processes, read from /proc: memory, descriptors and threads."""

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

from tests.speech_server import Server

ROLE = re.compile(rb"tts\.(?:processes\.)?(\w+)\0")
SUPERVISOR = "serve"


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Resources of one process, or the sum of several."""

    pss: int = 0  # bytes; shared memory is divided among the processes
    rss: int = 0  # bytes; shared memory counts for each
    descriptors: int = 0
    threads: int = 0

    def __add__(self, other: ProcessUsage) -> ProcessUsage:
        return ProcessUsage(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of all processes of a server."""

    moment_s: float  # time.monotonic
    by_role: dict[str, ProcessUsage]

    @property
    def total(self) -> ProcessUsage:
        return sum(self.by_role.values(), ProcessUsage())


def sample(server: Server) -> Sample:
    """Take a sample. A process that ends meanwhile is left out."""
    moment_s, by_role = time.monotonic(), dict[str, ProcessUsage]()
    for pid in server.pids:
        with suppress(OSError):
            role = role_of(pid)
            by_role[role] = by_role.get(role, ProcessUsage()) + process_usage(pid)
    return Sample(moment_s, by_role)


def role_of(pid: int) -> str:
    """Return the role of a process: serve (the supervisor), engine or front_end; "" for others."""
    found = ROLE.search(Path(f"/proc/{pid}/cmdline").read_bytes())
    return found[1].decode() if found else ""


def pids_of(server: Server, role: str) -> list[int]:
    """Return the running processes of a role."""
    found = []
    for pid in server.pids:
        with suppress(OSError):
            if role_of(pid) == role:
                found.append(pid)
    return found


def process_usage(pid: int) -> ProcessUsage:
    """Read the resources of a process. Raises OSError when it has ended."""
    sizes = _sizes(Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    descriptors, threads = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task"))
    return ProcessUsage(sizes["Pss"], sizes["Rss"], descriptors, threads)


def _sizes(lines: Iterable[str]) -> dict[str, int]:
    """Return bytes by name, of lines such as `Rss:  12 kB`."""
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            found[name] = int(rest[:-3]) * 1024
    return found


def median(samples: Sequence[Sample], field: str, role: str = "") -> float:
    """Return the median of a field over all processes or a role's; 0 without samples."""
    each = [(s.by_role.get(role, ProcessUsage()) if role else s.total) for s in samples]
    return statistics.median(getattr(one, field) for one in each) if each else 0.0


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write one line of JSON per sample."""
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in samples), encoding="utf-8")
