"""`python -m tts.serve` as a child of a test: its lines, its log, its processes, its end."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from tests.deadlines import HANG_S
from tests.tts.serving import CHANNEL_OPTIONS, health
from tts.v1.speech_pb2_grpc import SpeechServiceStub

ROOT = Path(__file__).parents[2]
SERVING = health_pb2.HealthCheckResponse.SERVING
NUM_CHECKS = 12  # all go to one of two front ends once in 2,048 times
READY = re.compile(r"ready: (127\.0\.0\.1:\d+) model=(\S+) voices=(.+)\n")
IMPATIENT_S = 5.0  # for tests of processes that hang, instead of the supervisor's STALL_S
SOON_S = 3.0  # for tests of processes beyond the restart limit, instead of LONGEST_DELAY_S
CHANGED = """
import sys
from tts import serve
from tts.processes import supervisor
supervisor.{name} = {value}
sys.exit(serve.main())
"""

ENGINE, FRONT_END = "tts.processes.engine", "tts.processes.front_end"

Value = TypeVar("Value")
Result = TypeVar("Result")


class Process:
    """One running command; its standard error is collected while it runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.errors: list[str] = []
        self._reading = asyncio.create_task(self._read_errors())

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.errors.append(line.decode())

    @property
    def log(self) -> str:
        return "".join(self.errors)

    async def line(self) -> str:
        """Return the next line of standard output; empty at its end."""
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), HANG_S)).decode()

    async def ready(self) -> str:
        """Wait until calls are accepted and return the address."""
        line = await self.line()
        match = READY.fullmatch(line)
        assert match, (line, self.log)
        return match[1]

    async def logged(self, pattern: str, start: int = 0) -> re.Match[str]:
        """Wait until the log has this after its first `start` characters."""
        for _ in range(int(HANG_S) * 100):
            if match := re.search(pattern, self.log[start:]):
                return match
            assert self.process.returncode is None, self.log
            await asyncio.sleep(0.01)
        raise AssertionError(f"never logged: {pattern}\n{self.log}")

    async def ended(self, timeout_s: float = HANG_S) -> int:
        status = await asyncio.wait_for(self.process.wait(), timeout_s)
        await self._reading
        return status


def serving_process(checkpoint: Path, **flags: object) -> AbstractAsyncContextManager[Process]:
    """Run the command on a tiny checkpoint and a free port; kill it at the end if it still runs."""
    return _running(("-m", "tts.serve"), checkpoint, flags)


def impatient_process(checkpoint: Path, **flags: object) -> AbstractAsyncContextManager[Process]:
    """Run the same with a supervisor that restarts processes that hang after IMPATIENT_S."""
    return _running(("-c", CHANGED.format(name="STALL_S", value=IMPATIENT_S)), checkpoint, flags)


def restarting_process(checkpoint: Path, **flags: object) -> AbstractAsyncContextManager[Process]:
    """Run the same with a supervisor that restarts any process after SOON_S at the latest."""
    program = CHANGED.format(name="LONGEST_DELAY_S", value=SOON_S)
    return _running(("-c", program), checkpoint, flags)


@asynccontextmanager
async def _running(
    program: tuple[str, str], checkpoint: Path, flags: dict[str, object]
) -> AsyncIterator[Process]:
    values = {"model.model-path": checkpoint, "port": 0, **flags}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, *program, *arguments)
    process = Process(
        await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, cwd=ROOT)
    )
    try:
        yield process
    finally:
        if process.process.returncode is None:
            process.process.kill()
        await process.ended()
        process.process._transport.close()  # type: ignore[attr-defined]


class Shared(Generic[Value]):
    """Value of an asynchronous context, and the event loop of all tests that share it."""

    def __init__(self, runner: asyncio.Runner, value: Value) -> None:
        self._runner = runner
        self.value = value

    def run(self, work: Coroutine[Any, Any, Result], timeout_s: float = HANG_S) -> Result:
        return self._runner.run(asyncio.wait_for(work, timeout_s))


@contextmanager
def shared(context: AbstractAsyncContextManager[Value]) -> Iterator[Shared[Value]]:
    """Enter an asynchronous context for several tests, as a fixture of their module."""

    async def leave() -> None:
        await context.__aexit__(None, None, None)

    async def enter() -> Value:
        return await context.__aenter__()

    with asyncio.Runner() as runner:
        value = runner.run(enter())
        try:
            yield Shared(runner, value)
        finally:
            runner.run(leave())


@dataclass(frozen=True)
class Killable:
    """A server with two front ends and all protocols; the addresses of gRPC and the others."""

    process: Process
    address: str
    http: str
    wyoming: str

    async def until_whole(self) -> None:
        """Wait until all processes run and all calls are served."""
        while not (self._all_run() and await self._all_serve()):
            await asyncio.sleep(0.05)

    def _all_run(self) -> bool:
        counts = [len(processes_of(self.process, module)) for module in (ENGINE, FRONT_END)]
        return counts == [1, 2]

    async def _all_serve(self) -> bool:
        """Return what health checks say; the kernel spreads them over the front ends."""
        for _ in range(NUM_CHECKS):
            async with grpc.aio.insecure_channel(self.address, CHANNEL_OPTIONS) as channel:
                try:
                    status = await health(channel)
                except grpc.aio.AioRpcError:
                    return False
            if status != SERVING:
                return False
        return True


@asynccontextmanager
async def killable_server(checkpoint: Path) -> AsyncIterator[Killable]:
    """Run such a server, then let it drain."""
    flags = {"front_ends": 2, "http_port": 0, "wyoming_port": 0}
    async with serving_process(checkpoint, max_restarts=100, **flags) as process:
        line = await process.line()
        match = re.match(r"ready: (\S+) http=(\S+) wyoming=(\S+) model=", line)
        assert match, (line, process.log)
        yield Killable(process, *match.groups())
        process.process.terminate()
        assert await process.ended() == 0
        assert "Traceback" not in process.log


@asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[SpeechServiceStub]:
    async with grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        yield SpeechServiceStub(channel)


def processes_of(process: Process, module: str) -> list[int]:
    """Return the ids of a server's child processes that run this module."""
    parent = process.process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if module in command_line(int(pid))]


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; none of one that has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except FileNotFoundError:
        return []
