"""A few fixed inputs of every target; `python -m tests.fuzz` tries more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.__main__ import TARGETS
from tests.fuzz.base import random_of
from tests.fuzz.frames import Sender
from tests.fuzz.http import Breaker, Poster
from tests.fuzz.rpcs import FILES, Caller, methods
from tests.fuzz.run import Slice, tried
from tests.fuzz.server import Served, served

SEED = 1
INPUTS = {"texts": 25, "markup": 200, "files": 60, "schemas": 100, "clips": 300}
CALLS, CONNECTIONS, REQUESTS = 60, 60, 80
LONG_S = 10_000.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the targets that need one."""
    with served(tmp_path_factory.mktemp("fuzz")) as running:
        yield running
        running.check_at_end()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_a_target(name: str, tmp_path: Path) -> None:
    part = Slice(TARGETS[name], SEED, 0, LONG_S, INPUTS[name])
    assert [found.text for found in tried(part, tmp_path)] == []


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("rpcs", Caller, CALLS),
        ("frames", Sender, CONNECTIONS),
        ("http", Poster, REQUESTS),
        ("http_connections", Breaker, CONNECTIONS),
    ],
)
def test_inputs_of_a_server(
    server: Served, name: str, kind: type[Caller | Sender | Poster | Breaker], count: int
) -> None:
    """`try_one` raises when an invariant does not hold."""
    target = kind(server)
    for index in range(count):
        target.try_one(random_of(SEED, name, index))


def test_every_target_is_tried_here() -> None:
    assert set(TARGETS) == {*INPUTS, "rpcs", "frames", "http", "http_connections"}


def test_all_methods_are_called() -> None:
    paths = {method.path for method in methods()}
    assert {"/tts.v1.TextService/Embed", "/grpc.health.v1.Health/List"} <= paths
    assert len(paths) == sum(len(s.methods) for f in FILES for s in f.services_by_name.values())
