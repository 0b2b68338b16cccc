"""Runner of targets: each in a separate process, so that crashes and hangs are found, too."""

from __future__ import annotations

import multiprocessing
import re
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from tests.fuzz.base import Case, Target, random_of

HANG_S = 600.0  # for one input, which takes less than a second on a busy machine
MAX_BYTES = 24 << 30  # address space of a process, most of which is never used
SPARE_KIB = 3 << 20  # of this process's memory, in addition to opening the target
MAX_TEXT = 4000
AT_THE_END = -1
MESSAGE = re.compile(r"[\w.]+(Error|Exception)\b")
NUMBERS = re.compile(r"'[^']*'|[0-9a-f]{8,}|\d+")
MAX_MESSAGE = 160

_processes = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Find:
    """One input for which an invariant does not hold; an index of -1 means the check at the end."""

    target: str
    seed: int
    index: int
    text: str

    @property
    def place(self) -> str:
        """Place and message of the error, which are equal for the same cause."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        raised = [number for number, line in enumerate(lines) if line.startswith("File ")]
        last = raised[-1] if raised else -1
        message = next((line for line in lines[last + 1 :] if MESSAGE.match(line)), "")
        return f"{lines[last]}: {NUMBERS.sub('#', message)[:MAX_MESSAGE]}"

    @property
    def command(self) -> str:
        """Command that tries the same input again."""
        first = f" --first {self.index} --count 1" if self.index >= 0 else ""
        return f"python -m tests.fuzz --only {self.target} --seed {self.seed}{first}"


@dataclass(slots=True)
class TargetCounts:
    """Counts of a target."""

    num_inputs: int = 0
    seconds: float = 0.0
    finds: dict[str, Find] = field(default_factory=dict)
    """By place: of several with the same cause the first is kept."""

    def add(self, found: Find) -> bool:
        """Add a find; return whether its cause is new."""
        is_new = found.place not in self.finds
        self.finds.setdefault(found.place, found)
        return is_new


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a run: inputs from `first` on, for so many seconds or up to `count` of them."""

    target: Target
    seed: int
    first: int
    seconds: float
    count: int | None = None

    @property
    def indices(self) -> Iterator[int]:
        """Indices of the inputs, until the time has passed."""
        begun = time.monotonic()
        index = self.first
        while time.monotonic() - begun < self.seconds:
            if self.count is not None and index >= self.first + self.count:
                return
            yield index
            index += 1


def run_slice(part: Slice, counts: TargetCounts, hang_s: float = HANG_S) -> Iterator[Find]:
    """Try a slice in another process and count it; iterate over finds with a new cause.

    After a crash or a hang the later inputs are tried in a new process.
    """
    begun = time.monotonic()
    first = part.first
    while True:
        left = part.seconds - (time.monotonic() - begun)
        done = 0 if part.count is None else first - part.first
        count = None if part.count is None else part.count - done
        now = Slice(part.target, part.seed, first, left, count)
        last, ended, finds = _in_a_process(now, hang_s)
        counts.num_inputs += last + 1 - first
        yield from (found for found in finds if counts.add(found))
        first = last + 1
        is_over = time.monotonic() - begun > part.seconds or count == 1
        if ended or is_over:
            break
    counts.seconds += time.monotonic() - begun


def _in_a_process(part: Slice, hang_s: float) -> tuple[int, bool, list[Find]]:
    """Return the last index tried, whether the process ended by itself, and the finds."""
    receiver, sender = _processes.Pipe(duplex=False)
    current: Synchronized[int] = _processes.Value("q", part.first - 1)
    process = _processes.Process(target=_work, args=(part, current, sender), daemon=False)
    process.start()
    sender.close()
    finds: list[Find] = []
    seen, since = current.value, time.monotonic()
    while True:
        try:
            if receiver.poll(0.2):
                finds.append(receiver.recv())
        except EOFError:
            process.join()
            break
        if current.value != seen:
            seen, since = current.value, time.monotonic()
        elif time.monotonic() - since > (hang_s if seen >= part.first else HANG_S):
            process.kill()
            process.join()
            finds.append(_found(part, seen, f"hangs: no answer within {hang_s:g} s"))
            return seen, False, finds
    if process.exitcode:
        finds.append(_found(part, current.value, f"the process died: {process.exitcode}"))
    return current.value, not process.exitcode, finds


def _work(part: Slice, current: Synchronized[int], sender: Connection) -> None:
    """Open the target in this process, try input after input, and send finds."""
    # protects the machine's memory
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    with sender, tempfile.TemporaryDirectory() as folder:
        for found in tried(part, Path(folder), current):
            sender.send(found)


def tried(part: Slice, folder: Path, current: Any = None) -> Iterator[Find]:
    """Try a slice in this process; iterate over the finds."""
    try:
        with part.target.open(folder) as case:
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(1)
            most_kib = _peak_kib() + SPARE_KIB
            for index in part.indices:
                if current is not None:
                    current.value = index
                text = _tried_one(part, index, case)
                if not text and _peak_kib() > most_kib:
                    text = f"{_peak_kib() >> 10} MiB in memory"
                    most_kib *= 2
                if text:
                    yield _found(part, index, text)
    except Exception:
        yield _found(part, AT_THE_END, traceback.format_exc())


def _tried_one(part: Slice, index: int, case: Case) -> str:
    """Return the error of one input; empty without one. A panic of a Rust library is a
    BaseException.
    """
    try:
        case(random_of(part.seed, part.target.name, index))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return traceback.format_exc()
    return ""


def _found(part: Slice, index: int, text: str) -> Find:
    return Find(part.target.name, part.seed, index, text[-MAX_TEXT:])


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_all(
    targets: Sequence[Target], seed: int, minutes: float, first: int = 0, count: int | None = None
) -> dict[str, TargetCounts]:
    """Run the targets in turns for so long in total; print finds at once."""
    all_counts = {target.name: TargetCounts() for target in targets}
    rounds = 1 if count is not None else max(1, int(minutes // 10))
    seconds = minutes * 60 / rounds / len(targets)
    for number in range(rounds):
        for target in targets:
            counts = all_counts[target.name]
            begin = first if not number else first + counts.num_inputs
            for found in run_slice(Slice(target, seed, begin, seconds, count), counts):
                print(f"FOUND: {found.command}\n{found.text}", flush=True)
            print(_line(target, counts), flush=True)
    return all_counts


def _line(target: Target, counts: TargetCounts) -> str:
    rate = counts.num_inputs / max(counts.seconds, 1e-9)
    num_finds = len(counts.finds)
    return f"{target.name}: {counts.num_inputs} inputs, {rate:.1f} per second, {num_finds} finds"
