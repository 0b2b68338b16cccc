"""Starts a server's processes, restarts those that die, and ends them in order.

    start     engine and front ends at once: the port answers NOT_SERVING while the model loads
    death     of any: start it again, later each time; too often: give up, status 1
    silence   of any, once it worked: kill it, which is a death
    no entry  where connections could be made and cannot any more: kill all front ends
    SIGTERM   front ends drain and end, then the engine

A process that ends before it ever worked is not started again: its status is the server's.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import msgspec

from llm import ConfigError
from tts.config import PrometheusMetricsMode
from tts.ipc.endpoints import Endpoints, reserved
from tts.ipc.pulse import Pulse
from tts.leftovers import temporary_folder
from tts.processes.child import Launch, Ready, Signals
from tts.processes.ports import reserved_port
from tts.processes.reach import unreachable
from tts.processes.restarts import Restarts
from tts.serve_config import ServeConfig

logger = logging.getLogger("tts.supervisor")

ENGINE, FRONT_END = "tts.processes.engine", "tts.processes.front_end"
STALL_S = 15.0  # without a sign of life for so long, a process hangs
STOP_S = 15.0  # for a process that has nothing left to drain

OnEnd = Callable[[int], None]  # told the id of a process that has ended


def _ignore(_: int) -> None:
    pass


class WorkerError(Exception):
    """A process cannot be kept alive; `status` is what the server ends with."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Worker:
    """One process that is kept alive from `run` until `stop`."""

    def __init__(
        self,
        module: str,
        launch: Launch,
        max_restarts: int,
        on_end: OnEnd,
    ) -> None:
        self._module, self._launch, self._on_end = module, launch, on_end
        self._restarts = Restarts(max_restarts)
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._worked_at: float | None = None
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        """What it told the first time it was ready."""

    def __repr__(self) -> str:
        return f"Worker({self._launch.name}, {self._restarts!r})"

    async def run(self) -> None:
        """Start it, and again when it dies, until `stop` or `kill`.

        Raises WorkerError when that is hopeless.
        """
        while not self._stopping.is_set():
            status = await self._live()
            if not self._stopping.is_set():
                delay_s = self._delay_s(status)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def stop(self, grace_s: float) -> None:
        """Ask it to end; after the grace time it is killed."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            logger.warning("%s does not end: killing it", self._launch.name)
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def restart(self, reason: str) -> None:
        """End the process at once, for `run` to start it again as after any death."""
        process = self._process
        if process is not None and process.returncode is None:
            logger.error("%s %s: killing it", self._launch.name, reason)
            with suppress(ProcessLookupError):
                process.kill()

    async def _live(self) -> int:
        """One life of the process, from its start to its exit status."""
        self._worked_at = None
        pipe = asyncio.subprocess.PIPE
        # In a session of its own: Ctrl-C on the terminal is the supervisor's to handle.
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, stdin=pipe, stdout=pipe, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(self._launch.to_bytes())
        if self._stopping.is_set():
            self.kill()
        pulse = Pulse(STALL_S)
        reading = asyncio.create_task(self._read(process, pulse))
        watching = asyncio.create_task(self._watch(pulse))
        status = await process.wait()
        watching.cancel()
        await reading
        process.stdin.close()
        self._on_end(process.pid)
        return status

    async def _watch(self, pulse: Pulse) -> None:
        await pulse.stopped()
        self.restart("gives no sign of life")

    async def _read(self, process: asyncio.subprocess.Process, pulse: Pulse) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            pulse.felt()
            if not line.strip():
                continue
            ready = msgspec.json.decode(line, type=Ready)
            self._worked_at = time.monotonic()
            if not self.ready.done():
                self.ready.set_result(ready)
            else:
                logger.info("%s is back, process %d", self._launch.name, process.pid)

    def _delay_s(self, status: int) -> float:
        """How long to wait before the next start."""
        name, ended = self._launch.name, _how(status)
        if not self.ready.done():
            raise WorkerError(f"{name} {ended} before it was ready", status if status > 0 else 1)
        up_s = 0.0 if self._worked_at is None else time.monotonic() - self._worked_at
        delay_s = self._restarts.next_delay_s(up_s)
        if delay_s is None:
            raise WorkerError(f"{name} {ended} once too often; giving up", 1)
        logger.error("%s %s; starting it again in %.1f s", name, ended, delay_s)
        return delay_s


class Workers:
    """The engine and the front ends of one server. `on_end` is told the id of each that ends."""

    def __init__(
        self,
        config: ServeConfig,
        endpoints: Endpoints,
        port: int,
        voice_folder: Path,
        on_end: OnEnd = _ignore,
    ) -> None:
        most = config.server.max_restarts
        self._config, self._port = config.server, port
        self._drain_s = config.server.drain_delay_s + config.server.drain_grace_s + STOP_S
        self.engine = Worker(ENGINE, Launch(config, "engine", endpoints), most, on_end)
        self.front_ends = []
        for number in range(config.server.front_ends):
            launch = Launch(config, f"front-end-{number}", endpoints, port, voice_folder)
            self.front_ends.append(Worker(FRONT_END, launch, most, on_end))

    async def run(self) -> None:
        """Keep all alive until they are stopped. Raises WorkerError, when all have ended."""
        running = [asyncio.ensure_future(worker.run()) for worker in self._all]
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.exception() for task in done):
            self.kill()
        await asyncio.wait(running)
        for task in running:
            task.result()

    async def ready(self) -> Ready:
        """What is served, once all front ends serve it."""
        answers = await asyncio.gather(*(asyncio.shield(w.ready) for w in self.front_ends))
        return answers[0]

    async def watch_port(self) -> None:
        """Start the front ends again whenever clients cannot connect any more. Never returns."""
        while True:
            await unreachable(self._config, self._port, STALL_S)
            for worker in self.front_ends:
                worker.restart("takes no connections")

    async def stop(self) -> None:
        """Front ends drain and end, then the engine."""
        await asyncio.gather(*(worker.stop(self._drain_s) for worker in self.front_ends))
        await self.engine.stop(STOP_S)

    def kill(self) -> None:
        """End all at once."""
        for worker in self._all:
            worker.kill()

    @property
    def _all(self) -> list[Worker]:
        return [self.engine, *self.front_ends]


async def supervise(config: ServeConfig, folder: Path | None = None) -> int:
    """Serve with processes until a signal; the exit status.

    `folder` is where they count together; then their metrics are shown here, as this process
    outlives the others. Raises ConfigError for what cannot be bound.
    """
    check_processes(config)
    server = config.server
    async with AsyncExitStack() as held:
        files = held.enter_context(ExitStack())
        is_shared = server.front_ends > 1
        port = files.enter_context(reserved_port(server.host, server.port, is_shared=is_shared))
        endpoints = files.enter_context(reserved(config.model.zmq_endpoint_base))
        voices = files.enter_context(temporary_folder("voices"))
        on_end: OnEnd = _ignore
        if folder is not None:
            from tts.processes.shared_metrics import shown_metrics

            on_end = await held.enter_async_context(shown_metrics(config, endpoints, folder))
        return await _kept(Workers(config, endpoints, port, voices, on_end), files)


def check_processes(config: ServeConfig) -> None:
    """Raise ConfigError for what does not go with several processes."""
    if config.model.zmq_endpoint_base.startswith("inproc:"):
        raise ConfigError(
            f"zmq_endpoint_base={config.model.zmq_endpoint_base} reaches no other process; "
            "use ipc:// or tcp://, or front_ends=0"
        )
    mode = config.model.prometheus_metrics_mode
    if config.server.front_ends > 1 and mode is PrometheusMetricsMode.LAUNCH_SERVER:
        raise ConfigError(
            f"prometheus_metrics_mode={mode.value} shows one front end; with front_ends="
            f"{config.server.front_ends} use launch_multiproc_server"
        )


async def _kept(workers: Workers, files: ExitStack) -> int:
    """`files` are let go of even when the second signal ends everything at once."""

    def end() -> None:
        workers.kill()
        files.close()

    signals = Signals(on_second=end)
    running = asyncio.ensure_future(workers.run())
    others = [
        asyncio.ensure_future(signals.asked.wait()),
        asyncio.ensure_future(_announce(workers)),
    ]
    watching = asyncio.ensure_future(workers.watch_port())
    try:
        await asyncio.wait((running, others[0]), return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()  # a front end that drains closes its door by itself
        if not running.done():
            await workers.stop()
        await running
    except WorkerError as error:
        logger.error("%s", error)
        return error.status
    finally:
        for task in others:
            task.cancel()
    return 0


async def _announce(workers: Workers) -> None:
    print(await workers.ready(), flush=True)


def _how(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
