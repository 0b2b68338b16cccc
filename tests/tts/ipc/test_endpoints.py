"""Addresses derived from a base, and which server may reserve them."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from threading import Thread

import pytest

from llm import ConfigError
from tests.deadlines import HANG_S
from tests.tts.ipc.remote_engine import new_tcp_base
from tts.ipc.endpoints import (
    LONGEST_PATH,
    Endpoints,
    remove_leftovers,
    remove_stale_replicas,
    replica_base,
    reserved,
)
from tts.leftovers import SOCKETS, lock


def test_ipc_and_inproc_have_suffixes() -> None:
    assert list(Endpoints.of("ipc:///tmp/x")) == [
        "ipc:///tmp/x-request",
        "ipc:///tmp/x-cancel",
        "ipc:///tmp/x-control",
        "ipc:///tmp/x-response",
    ]
    assert Endpoints.of("inproc://x").request == "inproc://x-request"


def test_tcp_has_ports() -> None:
    assert list(Endpoints.of("tcp://127.0.0.1:5555")) == [
        f"tcp://127.0.0.1:{port}" for port in range(5555, 5559)
    ]


@pytest.mark.parametrize(
    "base", ["tcp://localhost", "tcp://localhost:0", "tcp://h:65532", "tcp://:5555"]
)
def test_tcp_needs_five_ports(base: str) -> None:
    with pytest.raises(ConfigError, match="zmq_endpoint_base"):
        Endpoints.of(base)


def test_a_path_that_is_too_long_for_a_socket_is_reported() -> None:
    room = LONGEST_PATH - len("/-response")
    assert Endpoints.of(f"ipc:///{'x' * room}").paths
    with pytest.raises(ConfigError, match=rf"{LONGEST_PATH + 2} bytes, at most {LONGEST_PATH}"):
        Endpoints.of(f"ipc:///{'x' * (room - 2)}éé")


def test_a_base_belongs_to_one_server(tmp_path: Path) -> None:
    base = f"ipc://{tmp_path / 'x'}"
    with reserved(base) as endpoints:
        for path in endpoints.paths:
            path.touch()
        with pytest.raises(ConfigError, match="another server's"), reserved(base):
            pass
        assert len(list(tmp_path.iterdir())) == 5
    assert list(tmp_path.iterdir()) == []
    with reserved(base):
        pass


def test_a_tcp_base_belongs_to_one_server_also_while_no_engine_listens() -> None:
    base = new_tcp_base()
    with reserved(base) as endpoints:
        for other in (base, base.replace("127.0.0.1", "localhost")):
            with pytest.raises(ConfigError, match="another server's"), reserved(other):
                pass
        assert len(endpoints.server_id) == 16
    with reserved(base) as again:
        assert list(again) == list(endpoints)
        assert again.server_id != endpoints.server_id


def test_a_tcp_host_that_does_not_exist_is_reported() -> None:
    with pytest.raises(ConfigError, match="cannot be used"), reserved("tcp://no-such.invalid:5000"):
        pass


def test_files_of_a_dead_server_do_not_block_a_new_one(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "x-lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.close(descriptor)
    with reserved(f"ipc://{tmp_path / 'x'}"):
        pass


def test_leftovers_are_removed_but_not_from_under_another_server(tmp_path: Path) -> None:
    base = f"ipc://{tmp_path / 'x'}"
    for path in Endpoints.of(base).paths:
        path.touch()
    with reserved(base):
        remove_leftovers(base)
        assert len(list(tmp_path.iterdir())) == 5
    for path in Endpoints.of(base).paths:
        path.touch()
    remove_leftovers(base)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_that_of_the_file_which_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A former owner may remove the file after it was opened, and before it is locked."""
    path, flock, calls = tmp_path / "x-lock", fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not calls:
            path.unlink()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    held = lock(path, SOCKETS)
    monkeypatch.undo()
    assert len(calls) == 2
    with pytest.raises(BlockingIOError):
        lock(path, SOCKETS)
    os.close(held)


def test_leftovers_are_removed_as_soon_as_the_lock_is_released(tmp_path: Path) -> None:
    """A killed server's pipes are closed, and its children notice it, before its lock is free."""
    base = f"ipc://{tmp_path / 'x'}"
    descriptor = os.open(tmp_path / "x-lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    for path in Endpoints.of(base).paths:
        path.touch()
    children = [Thread(target=remove_leftovers, args=(base, HANG_S)) for _ in range(3)]
    for child in children:
        child.start()
    time.sleep(0.2)
    assert len(list(tmp_path.iterdir())) == 5
    os.close(descriptor)
    for child in children:
        child.join()
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_dead_server_s_replicas_are_removed(tmp_path: Path) -> None:
    """But not those of living servers, and nothing that no server has locked."""
    base = f"ipc://{tmp_path / 'x'}"
    for number in (1, 2, 3):
        for path in Endpoints.of(replica_base(base, number)).paths:
            path.touch()
    kept = {"x-3-request", "x-3-cancel", "x-3-control", "x-3-response", "x-2-lock"}
    kept |= {path.name for path in Endpoints.of(replica_base(base, 2)).paths}
    for name in ("x-1-lock", "x-old-lock", "y-1-lock"):
        (tmp_path / name).touch()
    with reserved(replica_base(base, 2)):
        remove_stale_replicas(base)
        remove_stale_replicas("tcp://127.0.0.1:5555")
        found = {path.name for path in tmp_path.iterdir()}
    assert found == kept | {"x-old-lock", "y-1-lock"}


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"), reserved(f"ipc://{tmp_path}/none/x"):
        pass
