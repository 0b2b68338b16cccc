"""Supervisor: starts a server's processes, restarts those that die, and stops them in order.

    start        engine and front ends at once: the port answers NOT_SERVING while the model loads
    exit         of a process: restart with back-off; after too many: give up, status 1, unless
                 it is a replica and another one has not ended too often
    unloaded     of an idle engine: start it when a front end reports that it is wanted
    drained      of one replica, by a signal to its process: start it again at once
    heartbeats   stop, or do not begin after a restart: kill the process, then restart
    connections  fail after they have worked: kill and restart all front ends
    SIGTERM      front ends drain and exit, then the engine

A process that exits before it was ever ready is not restarted: the server exits with its status.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from llm import ConfigError, PipelineRole
from tts.config.pipeline import PrometheusMetricsMode
from tts.config.serve import ServeConfig
from tts.config.server import CPU, ServerConfig
from tts.ipc.endpoints import (
    Endpoints,
    ServerEndpoints,
    remove_stale_replicas,
    replica_base,
    reserved,
)
from tts.ipc.heartbeat import Heartbeat
from tts.leftovers import temporary_folder
from tts.processes.child import (
    DRAINED,
    ENGINE_NAME,
    TEXT_ENGINE_NAME,
    UNLOADED,
    Launch,
    Ready,
    Signals,
    Wanted,
    prefill_name,
    replica_name,
)
from tts.processes.reach import unreachable
from tts.server.sockets import bound_socket

logger = logging.getLogger("tts.supervisor")

CHILD, ENGINE, FRONT_END = "tts.processes", "tts.processes.engine", "tts.processes.front_end"
STALL_S = 15.0  # without a heartbeat for so long, a process hangs
STOP_S = 15.0  # grace period of a process without calls
REPORT_BYTES = 2**26  # longest line of a process: its report names every voice

OnEnd = Callable[[int], None]  # called with the id of a process that has ended
OnWanted = Callable[[str], None]  # called with the name of an engine that calls wait for


def _ignore(_: object) -> None:
    pass


class WorkerError(Exception):
    """Error for a process that cannot be kept alive; `status` is the server's exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Worker:
    """Process that is kept alive from `run` until `stop`."""

    def __init__(
        self,
        module: str,
        launch: Launch,
        max_restarts: int,
        on_end: OnEnd,
        on_wanted: OnWanted = _ignore,
        may_give_up: Callable[[], bool] = lambda: True,
    ) -> None:
        self._module, self._launch = module, launch
        self._on_end, self._on_wanted, self._may_give_up = on_end, on_wanted, may_give_up
        self._restarts = Restarts(max_restarts)
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._wanted = asyncio.Event()  # also when it stops
        self._worked_at: float | None = None
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        """Its first report of readiness."""
        self.fails = False
        """Whether it has ended too often, and has not been up since."""

    @property
    def endpoints(self) -> Endpoints:
        """The engine's endpoints; of a front end those of its first engine."""
        return self._launch.endpoints

    def __repr__(self) -> str:
        return f"Worker({self._launch.name}, {self._restarts!r})"

    async def run(self) -> None:
        """Start the process, and restart it when it dies, until `stop` or `kill`.

        Raises WorkerError after too many restarts.
        """
        while not self._stopping.is_set():
            status = await self._live()
            if status == UNLOADED:
                await self._wait_wanted()
            elif status == DRAINED and not self._stopping.is_set():
                logger.info("%s has drained; starting it again", self._launch.name)
            elif not self._stopping.is_set():
                delay_s = self._delay_s(status)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM; kill the process after the grace period."""
        self._end()
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
        """Kill the process."""
        self._end()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def wake(self) -> None:
        """Start the process if it has unloaded its model; may be called at any time."""
        self._wanted.set()

    def _end(self) -> None:
        self._stopping.set()
        self._wanted.set()

    async def _wait_wanted(self) -> None:
        """Wait until the process is wanted after this moment, or stops.

        What was reported before does not count: front ends repeat it.
        """
        logger.info("%s has unloaded its model", self._launch.name)
        if not self._stopping.is_set():
            self._wanted.clear()
        await self._wanted.wait()

    def restart(self, reason: str) -> None:
        """Kill the process; `run` restarts it."""
        process = self._process
        if process is not None and process.returncode is None:
            logger.error("%s %s: killing it", self._launch.name, reason)
            with suppress(ProcessLookupError):
                process.kill()

    async def _live(self) -> int:
        """Run the process once; return its exit status."""
        self._worked_at = None
        pipe = asyncio.subprocess.PIPE
        # Its own group, so that only the supervisor receives Ctrl-C of the terminal, in the same
        # session: Linux may share the processor among sessions before it compares priorities.
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", CHILD, self._module),
            stdin=pipe,
            stdout=pipe,
            limit=REPORT_BYTES,
            process_group=0,
        )
        assert process.stdin is not None
        launch = replace(self._launch, is_restart=self.ready.done())
        process.stdin.write(launch.to_bytes())
        if self._stopping.is_set():
            self.kill()
        heartbeat = Heartbeat(STALL_S)
        reading = asyncio.create_task(self._read(process, heartbeat))
        watching = asyncio.create_task(self._watch(heartbeat, launch))
        status = await process.wait()
        watching.cancel()
        await reading
        process.stdin.close()
        self._on_end(process.pid)
        return status

    async def _watch(self, heartbeat: Heartbeat, launch: Launch) -> None:
        """Kill a process that hangs. The first start has no limit: nothing is served before it."""
        limit_s = launch.config.server.load_timeout_s
        try:
            await asyncio.wait_for(heartbeat.began(), limit_s if launch.is_restart else None)
        except TimeoutError:
            self.restart(f"is not ready after {limit_s:g} s (load_timeout_s)")
            return
        await heartbeat.stopped()
        self.restart("sends no heartbeats")

    async def _read(self, process: asyncio.subprocess.Process, heartbeat: Heartbeat) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            report = msgspec.json.decode(line, type=Ready | Wanted) if line.strip() else None
            if isinstance(report, Wanted):  # no heartbeat: those begin with Ready
                self._on_wanted(report.engine)
                continue
            heartbeat.beat()
            if report is None:
                continue
            self._worked_at, self.fails = time.monotonic(), False
            if not self.ready.done():
                self.ready.set_result(report)
                logger.info("%s is ready, process %d", self._launch.name, process.pid)
            else:
                logger.info("%s is back, process %d", self._launch.name, process.pid)

    def _delay_s(self, status: int) -> float:
        """Return the seconds to wait before the next start. Raises WorkerError to give up."""
        name, ended = self._launch.name, _exit_text(status)
        if not self.ready.done():
            raise WorkerError(f"{name} {ended} before it was ready", status if status > 0 else 1)
        up_s = 0.0 if self._worked_at is None else time.monotonic() - self._worked_at
        delay_s = self._restarts.next_delay_s(up_s)
        self.fails = delay_s is None
        if delay_s is None and not self._may_give_up():
            delay_s = LONGEST_DELAY_S
        if delay_s is None:
            raise WorkerError(f"{name} {ended} once too often; giving up", 1)
        logger.error("%s %s; starting it again in %.1f s", name, ended, delay_s)
        return delay_s


class Workers:
    """Engines and front ends of one server.

    `on_end` is called with the id of each process that has ended.
    """

    def __init__(
        self,
        config: ServeConfig,
        endpoints: ServerEndpoints,
        ports: Mapping[str, int],
        voice_folder: Path,
        on_end: OnEnd = _ignore,
    ) -> None:
        most = config.server.max_restarts
        self._config, self._port = config.server, ports.get("port", 0)
        self._drain_s = config.server.drain_delay_s + config.server.drain_grace_s + STOP_S
        replicas = endpoints.model if len(endpoints.model) > 1 else ()
        self.engines = {
            launch.name: Worker(
                ENGINE, launch, most, on_end, may_give_up=partial(self.may_give_up, launch)
            )
            for launch in _launches_of_engines(config, endpoints)
        }
        self.front_ends = []
        for number in range(0 if _has_no_calls(config) else config.server.front_ends):
            name = f"front-end-{number}"
            launch = Launch(
                config,
                name,
                endpoints.model[0],
                ports,
                voice_folder,
                endpoints.text,
                replicas,
                endpoints.admission,
            )
            self.front_ends.append(Worker(FRONT_END, launch, most, on_end, self._wake))

    async def run(self) -> None:
        """Keep all processes alive until `stop`. Raises WorkerError once all have ended."""
        running = [asyncio.ensure_future(worker.run()) for worker in self._all]
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.exception() for task in done):
            self.kill()
        await asyncio.wait(running)
        for task in running:
            task.result()

    async def ready(self) -> Ready:
        """Wait until all front ends serve; return what they serve. Without any, engines serve."""
        serving = self.front_ends or [*self.engines.values()]
        answers = await asyncio.gather(*(asyncio.shield(worker.ready) for worker in serving))
        if self.front_ends:
            return answers[0]
        bases = ",".join(worker.endpoints.base for worker in serving)
        return Ready(address=bases, model=answers[0].model)

    async def watch_port(self) -> None:
        """Restart the front ends, if there are any, whenever clients can no longer connect."""
        while self.front_ends:
            await unreachable(self._config, self._port, STALL_S)
            for worker in self.front_ends:
                worker.restart("takes no connections")

    async def stop(self) -> None:
        """Drain and stop the front ends, then stop the engines."""
        await asyncio.gather(*(worker.stop(self._drain_s) for worker in self.front_ends))
        await asyncio.gather(*(worker.stop(STOP_S) for worker in self.engines.values()))

    def kill(self) -> None:
        """Kill all processes."""
        for worker in self._all:
            worker.kill()

    def may_give_up(self, launch: Launch) -> bool:
        """Whether no other replica serves, or will, while this engine fails.

        Those that only compute prompts for others here are not needed.
        """
        if launch.is_prefill and self.front_ends:
            return False
        others = (
            worker
            for worker in self.engines.values()
            if worker.endpoints in launch.replicas and worker.endpoints != launch.endpoints
        )
        return all(other.fails for other in others)

    def _wake(self, engine: str) -> None:
        self.engines[engine].wake()

    @property
    def _all(self) -> list[Worker]:
        return [*self.engines.values(), *self.front_ends]


def _launches_of_engines(config: ServeConfig, endpoints: ServerEndpoints) -> list[Launch]:
    """Return the launch parameters of all engines: replicas, those for prompts, and the text
    model's.
    """
    prefills, count = tuple(each.base for each in endpoints.prefill), config.num_engines
    replicas = endpoints.model if len(endpoints.model) > 1 else ()
    launches = []
    for number, own in enumerate(endpoints.model):
        of_replica = config.of_replica(number, own.base, prefills)
        name = replica_name(number) if replicas else ENGINE_NAME
        if _has_no_calls(config):
            name = prefill_name(number)
        launches.append(Launch(of_replica, name, own, replicas=replicas, num_engines=count))
    for number, own in enumerate(endpoints.prefill):
        of_prefill = config.of_prefill(number, own.base)
        launches.append(Launch(of_prefill, prefill_name(number), own, num_engines=count))
    if config.text is not None and endpoints.text is not None:
        of_text = replace(config, model=config.text, text=None)
        launches.append(Launch(of_text, TEXT_ENGINE_NAME, endpoints.text))
    return launches


def _has_no_calls(config: ServeConfig) -> bool:
    """Whether this server's engines only compute prompts for those of other servers."""
    return config.model.pipeline_role is PipelineRole.PrefillOnly


async def supervise(config: ServeConfig, folder: Path | None = None) -> int:
    """Serve with several processes until a signal; return the exit status.

    With a `folder`, in which they write their metrics, this process exports the sums, as it
    outlives the others. Raises ConfigError for an address that cannot be bound.
    """
    check_processes(config)
    server = config.server
    async with AsyncExitStack() as held:
        files = held.enter_context(ExitStack())
        is_shared = server.front_ends > 1
        addresses = {} if _has_no_calls(config) else listening_addresses(server)
        ports = {
            field: files.enter_context(reserved_port(*address, is_shared=is_shared))
            for field, address in addresses.items()
        }
        endpoints = _reserved_endpoints(config, files)
        if endpoints.admission is not None:
            from tts.processes.shared_admission import shared_admission

            await held.enter_async_context(shared_admission(server, endpoints.admission))
        voices = files.enter_context(temporary_folder("voices"))
        on_end: OnEnd = _ignore
        if folder is not None:
            from tts.processes.shared_metrics import exported_metrics

            on_end = await held.enter_async_context(exported_metrics(config, endpoints, folder))
        workers = Workers(config, endpoints, ports, voices, on_end)
        return await _keep_alive(workers, files)


def _reserved_endpoints(config: ServeConfig, files: ExitStack) -> ServerEndpoints:
    """Reserve the endpoints of all engines until `files` is closed.

    Raises ConfigError when a base is in use.
    """
    base, count = config.model.zmq_endpoint_base, config.num_replicas
    remove_stale_replicas(base)
    model = tuple(files.enter_context(reserved(replica_base(base, n))) for n in range(count))
    text = admission = None
    if config.text is not None:
        text = files.enter_context(reserved(config.text.zmq_endpoint_base))
    if count > 1 and config.server.front_ends > 1 and not _has_no_calls(config):
        admission = files.enter_context(reserved(replica_base(base, count)))
    prefill = tuple(
        files.enter_context(reserved(replica_base(base, count + 1 + number)))
        for number in range(len(config.server.prefill_devices))
    )
    return ServerEndpoints(model, prefill, text, admission)


def check_processes(config: ServeConfig) -> None:
    """Raise ConfigError for options that do not work with several processes."""
    for model in filter(None, (config.model, config.text)):
        if model.zmq_endpoint_base.startswith("inproc:"):
            raise ConfigError(
                f"zmq_endpoint_base={model.zmq_endpoint_base} reaches no other process; "
                "use ipc:// or tcp://, or front_ends=0"
            )
    if config.num_engines > 1:
        _check_replicas(config)
    _check_roles(config)
    if config.text is not None and config.text.model.data_parallel_degree > 1:
        raise ConfigError(
            "text_model_config: model.data_parallel_degree must be 1: the text model has one "
            "engine; a speech_server lets a server of its own have several"
        )
    mode = config.model.prometheus_metrics_mode
    if config.server.front_ends > 1 and mode is PrometheusMetricsMode.LAUNCH_SERVER:
        raise ConfigError(
            f"prometheus_metrics_mode={mode.value} shows one front end; with front_ends="
            f"{config.server.front_ends} use launch_multiproc_server"
        )


def _check_replicas(config: ServeConfig) -> None:
    """Raise ConfigError for options that do not work with several replicas."""
    refused = {
        "unload_after_s": (
            config.server.unload_after_s is not None,
            "the choice of a replica does not count the time to load a model",
        ),
        "profiling.trace_file": (
            config.model.profiling.trace_file is not None,
            "all engines would write the same file",
        ),
    }
    for name, (is_set, reason) in refused.items():
        if is_set:
            cause = (
                "model.data_parallel_degree=1" if config.num_replicas > 1 else "no prefill_devices"
            )
            raise ConfigError(f"{name} needs {cause}: {reason}")


def _check_roles(config: ServeConfig) -> None:
    """Raise ConfigError for roles of engines that do not go together."""
    model, server = config.model, config.server
    role, devices = model.pipeline_role, server.prefill_devices
    if devices:
        if role is not PipelineRole.PrefillAndDecode:
            raise ConfigError(
                f"prefill_devices sets the roles; leave out pipeline_role={role.value}"
            )
        model.check_moves_pages("prefill_devices")
        taken = set(devices).intersection(model.model.device_specs)
        if model.model.on_cpu != (set(devices) == {CPU}) or taken - {CPU}:
            raise ConfigError(
                f"prefill_devices={','.join(devices)} must be GPUs other than "
                f"model.device_specs={','.join(model.model.device_specs)}, or all of them the CPU"
            )
    has_prefills = bool(model.prefill_endpoints)
    if role is PipelineRole.DecodeOnly and not has_prefills:
        raise ConfigError(f"pipeline_role={role.value} needs prefill_endpoints, or prefill_devices")
    if config.text is not None and config.text.pipeline_role is not PipelineRole.PrefillAndDecode:
        raise ConfigError("text_model_config: pipeline_role must be prefill_and_decode")
    if role is not PipelineRole.PrefillAndDecode and server.unload_after_s is not None:
        raise ConfigError(f"unload_after_s excludes pipeline_role={role.value}")
    exposes = model.prometheus_metrics_mode is not PrometheusMetricsMode.INSTRUMENT_ONLY
    if _has_no_calls(config) and (exposes or config.text is not None):
        field = "prometheus_metrics_mode" if exposes else "text_model"
        raise ConfigError(f"{field} needs front ends, and pipeline_role={role.value} has none")


async def _keep_alive(workers: Workers, files: ExitStack) -> int:
    """Keep the workers alive until they stop; return the exit status.

    A second signal kills them; `files` are closed in any case."""

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
        watching.cancel()  # a draining front end closes its port itself
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


def _exit_text(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def listening_addresses(config: ServerConfig) -> dict[str, tuple[str, int]]:
    """Return host and port of all protocols that are on, by the fields of the ports."""
    ports = {
        "port": (config.host, config.port),
        "http_port": (config.host, config.http_port),
        "wyoming_port": (config.wyoming_host, config.wyoming_port),
    }
    return {field: (host, port) for field, (host, port) in ports.items() if port is not None}


@contextmanager
def reserved_port(host: str, port: int, *, is_shared: bool) -> Iterator[int]:
    """Reserve a port (0: any free one) for the front ends inside the block.

    Several front ends share it through SO_REUSEPORT. That option would also admit other servers of
    the same user, so a socket without it is bound first, which fails when the port is in use.
    Raises ConfigError then.
    """
    with bound_socket(host, port, is_shared=False) as probe:
        number: int = probe.getsockname()[1]
    if not is_shared:
        yield number
        return
    with bound_socket(host, number, is_shared=True):  # holds the port while no front end runs
        yield number


FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 10.0
MAX_DOUBLINGS = 10  # more than LONGEST_DELAY_S needs, and few enough for a float
STEADY_S = 60.0


class Restarts:
    """Counter of successive restarts; a process that was up for STEADY_S resets it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def __repr__(self) -> str:
        return f"Restarts({self.count} of {self._limit})"

    def next_delay_s(self, up_s: float) -> float | None:
        """Return the seconds before the next start, doubled each time; None to give up.

        `up_s` is the time for which the process was ready.
        """
        if up_s >= STEADY_S:
            self.count = 0
        if self.count >= self._limit:
            return None
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self.count, MAX_DOUBLINGS))
        self.count += 1
        return delay_s
