"""The three metrics modes: the library's registry, HTTP, HTTP for several processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import generate_latest, values

from llm import ConfigError
from tests.deadlines import HANG_S
from tts import serve
from tts.observe.engine_status import EngineStatus
from tts.observe.exporter import (
    FOLDER_VARIABLE,
    MAX_CONNECTIONS,
    forget_process,
    metrics_folder,
    serve_metrics,
)
from tts.observe.metrics import Metrics
from tts.processes.calls import expose_metrics

ROOT = Path(__file__).parents[3]
WORKER = """
import sys
from tts.observe.metrics import Metrics
metrics = Metrics()
metrics.audio.inc(float(sys.argv[1]))
metrics.first_audio.observe(0.125)
metrics.note_requests(running=int(sys.argv[2]), waiting=1)
print("counted", flush=True)
sys.stdin.read()
"""


def config(*flags: str) -> serve.ServeConfig:
    return serve.read_config(serve.build_parser().parse_args(["--metrics-port=0", *flags]))


def listening() -> set[str]:
    """Inodes of the sockets of this process that listen."""
    table = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    listeners = {line.split()[9] for line in table if line.split()[3] == "0A"}
    links = (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if exists(fd))
    return listeners & {link.removeprefix("socket:[").rstrip("]") for link in links}


def exists(fd: str) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()


@pytest.fixture
def address(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """Return a function that reads the address of the metrics from the log."""
    with caplog.at_level("INFO", "tts.metrics"):
        yield lambda: caplog.messages[-1].removeprefix("metrics on ")


def scrape(url: str) -> dict[str, float]:
    """Return the value of each sample by its name and labels as written."""
    with urllib.request.urlopen(url, timeout=HANG_S) as response:
        assert response.status == 200
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_the_registry_alone_opens_no_port() -> None:
    """A program that embeds the service exposes the registry itself."""
    metrics, before = Metrics(), listening()
    with expose_metrics(config(), metrics, None):
        metrics.audio.inc(3)
        assert listening() == before
        assert "sonant_audio_seconds_total 3.0" in generate_latest().decode()
    assert "sonant_" not in generate_latest().decode()


def test_the_exporter_shows_rising_counters(address: Callable[[], str]) -> None:
    metrics, before = Metrics(), listening()
    launch = config("--prometheus-metrics-mode=launch_server")
    with expose_metrics(launch, metrics, None):
        assert len(listening() - before) == 1
        metrics.audio.inc(1)
        assert scrape(address())["sonant_audio_seconds_total"] == 1
        metrics.audio.inc(2)
        assert scrape(address())["sonant_audio_seconds_total"] == 3
    assert listening() == before


def test_idle_connections_do_not_block_scrapes(
    address: Callable[[], str],
) -> None:
    """The number of threads is bounded for any number of connections."""
    metrics, before = Metrics(), threading.active_count()
    with expose_metrics(config("--prometheus-metrics-mode=launch_server"), metrics, None):
        metrics.audio.inc(1)
        host, port = re.findall(r"//(.*):(\d+)/", address())[0]
        with ExitStack() as held:
            for _ in range(50):
                held.enter_context(socket.create_connection((host, int(port))))
                assert scrape(address())["sonant_audio_seconds_total"] == 1
            wait_for(lambda: threading.active_count() - before <= MAX_CONNECTIONS + 1)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_address_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = (
            "--prometheus-metrics-mode=launch_server",
            f"--metrics-port={taken.getsockname()[1]}",
        )
        with pytest.raises(ConfigError, match=r"cannot serve metrics on 127\.0\.0\.1:"):
            expose_metrics(config(*flags), Metrics(), None)
    assert "sonant_" not in generate_latest().decode()


def start_worker(environ: dict[str, str], audio_s: float, running: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(audio_s), str(running)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)


def test_processes_are_summed_and_dead_ones_removed(
    address: Callable[[], str], tmp_path: Path
) -> None:
    environ = {**os.environ, FOLDER_VARIABLE: str(tmp_path / "made" / "here")}
    with ExitStack() as ending:
        folder = ending.enter_context(metrics_folder(environ))
        workers = [
            ending.enter_context(start_worker(environ, *numbers)) for numbers in ((2, 3), (5, 4))
        ]
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "counted\n"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(FOLDER_VARIABLE, str(folder))
            own = Metrics()  # this process counts too
        own.audio.inc(0.5)
        own.engine.status = EngineStatus(9, 0, 1, 2, 0, 0, 0)
        ending.callback(serve_metrics(own, "127.0.0.1", 0, folder))
        shown = scrape(address())
        assert shown["sonant_audio_seconds_total"] == 7.5
        assert shown["sonant_time_to_first_audio_seconds_count"] == 2
        assert shown['sonant_time_to_first_audio_seconds_bucket{le="0.15"}'] == 2
        assert shown['sonant_requests{state="running"}'] == 7
        assert shown['sonant_engine_sequences{state="running"}'] == 9  # one engine, not summed

        workers[0].kill()
        workers[0].wait()
        forget_process(workers[0].pid, folder)
        shown = scrape(address())
        assert shown["sonant_audio_seconds_total"] == 7.5
        assert shown['sonant_requests{state="running"}'] == 4
        workers[1].kill()
    assert list((tmp_path / "made" / "here").iterdir()) == []


def test_the_folder_is_created_exported_and_removed() -> None:
    environ: dict[str, str] = {}
    with metrics_folder(environ) as folder:
        assert folder.is_dir()
        assert environ == {FOLDER_VARIABLE: str(folder)}
        assert values.ValueClass._multiprocess
    assert not folder.exists()
    assert environ == {}
    assert not values.ValueClass._multiprocess


def test_counts_of_an_earlier_run_are_discarded(tmp_path: Path) -> None:
    (tmp_path / "counter_1.db").touch()
    (tmp_path / "notes.txt").touch()
    with metrics_folder({FOLDER_VARIABLE: str(tmp_path)}):
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_only_the_multiprocess_mode_has_a_folder() -> None:
    with serve.shared_folder(config()) as folder:
        assert folder is None
    several = config("--prometheus-metrics-mode=launch_multiproc_server")
    with serve.shared_folder(several) as folder:
        assert folder is not None
        assert os.environ[FOLDER_VARIABLE] == str(folder)
    assert FOLDER_VARIABLE not in os.environ
