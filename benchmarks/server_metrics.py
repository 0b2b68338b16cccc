"""What a server counts, read from its metrics port, and the time between two readings."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Samples:
    """Values by name and labels, or how much they grew."""

    values: Mapping[tuple[str, Labels], float] = field(default_factory=dict)

    def __sub__(self, earlier: Samples) -> Samples:
        """What was added since."""
        return Samples({k: v - earlier.values.get(k, 0.0) for k, v in self.values.items()})

    def get(self, name: str, **labels: str) -> float:
        """A value, 0 when there is none."""
        return self.values.get((name, frozenset(labels.items())), 0.0)

    def total(self, name: str) -> float:
        """The sum over all labels."""
        return sum(value for (found, _), value in self.values.items() if found == name)

    def mean(self, name: str) -> float:
        """Of a histogram's observations, over all labels; 0 when there are none."""
        count = self.total(f"{name}_count")
        return self.total(f"{name}_sum") / count if count else 0.0


def scrape(port: int) -> Samples:
    """Read them now; the engine's own are at most half a second old."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return Samples(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
