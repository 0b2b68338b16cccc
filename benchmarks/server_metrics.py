"""Metrics of a server from its metrics port, and utilisation from the device's driver."""

from __future__ import annotations

import math
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import torch
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Samples:
    """Values by name and labels, or their increases."""

    values: Mapping[tuple[str, Labels], float] = field(default_factory=dict)

    def __sub__(self, earlier: Samples) -> Samples:
        """Return the increases since an earlier sample."""
        return Samples({k: v - earlier.values.get(k, 0.0) for k, v in self.values.items()})

    def get(self, name: str, **labels: str) -> float:
        """Return a value, 0 when there is none."""
        return self.values.get((name, frozenset(labels.items())), 0.0)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all other labels."""
        return sum(
            value
            for (found, given), value in self.values.items()
            if found == name and given >= labels.items()
        )

    def mean(self, name: str, **labels: str) -> float:
        """Return the mean of a histogram's observations, over all other labels; 0 when there are
        none.
        """
        count = self.total(f"{name}_count", **labels)
        return self.total(f"{name}_sum", **labels) / count if count else 0.0

    def at_most(self, name: str, percent: int) -> float:
        """Return a bound of a histogram that so many of its observations, over all labels, are
        below.
        """
        counts: dict[float, float] = {}
        for (found, labels), value in self.values.items():
            if found == f"{name}_bucket":
                bound = float(dict(labels)["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        return least_bound(counts, percent)


def least_bound(counts: Mapping[float, float], percent: int) -> float:
    """Return the least bound with so many of all observations at or below it; infinity without any.

    `counts` are of the observations at or below each bound; infinity is among the bounds.
    """
    wanted = percent / 100 * counts.get(math.inf, 0.0)
    enough = (bound for bound, count in counts.items() if 0 < wanted <= count)
    return min(enough, default=math.inf)


def scrape(port: int) -> Samples:
    """Read the current values; the engine's are at most half a second old."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return Samples(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


@contextmanager
def device_busy(num_gpus: int = 1) -> Iterator[list[float]]:
    """Collect the percentage of time in which a kernel runs on the first GPUs that this process
    sees, five readings a second of each; none without a GPU.
    """
    readings: list[float] = []
    if not torch.cuda.is_available():
        yield readings
        return
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    ids = ",".join(seen.split(",")[:num_gpus])
    query = ["nvidia-smi", "--id=" + ids, "--query-gpu=utilization.gpu"]
    query += ["--format=csv,noheader,nounits"]
    with subprocess.Popen([*query, "-lms", "200"], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield readings
        finally:
            process.terminate()
            readings += map(float, process.communicate()[0].split()[:-1])


Threads = Mapping[int, Mapping[int, float]]
"""Processor seconds by process and thread."""


def processor_s(pids: Sequence[int]) -> Threads:
    """Return the processor time of all threads of the processes that still exist."""
    return {pid: _threads_of(pid) for pid in pids if Path(f"/proc/{pid}").exists()}


def _threads_of(pid: int) -> Mapping[int, float]:
    found: dict[int, float] = {}
    with suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has
                # The name in parentheses may have spaces; user and system time are 12 fields on.
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])
                found[int(thread.name)] = ticks / os.sysconf("SC_CLK_TCK")
    return found


def busiest(before: Threads, after: Threads, seconds: float) -> list[list[float]]:
    """Return, for each process, the busiest first, the percentage of the time that it used
    processors, and that of each thread, in descending order.

    A process of Python whose threads add up to 100 % has no time left but outside the interpreter.
    """
    shares = []
    for pid, threads in after.items():
        former = before.get(pid, {})
        used = [100 * (now_s - former.get(tid, 0.0)) / seconds for tid, now_s in threads.items()]
        shares.append([sum(used), *sorted(used, reverse=True)])
    return sorted(shares, reverse=True)


def free_port() -> int:
    """Return a port that is currently free."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
