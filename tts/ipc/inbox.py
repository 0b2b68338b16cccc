"""`Inbox` and `Outlet`: contents of KV pages between two processes of one machine.

    reader: Inbox(slot_bytes) ── its path, in a Room ──▶ writer: Outlet.open(path)
    reader: read(slot) ◀── slot, as an answer ── writer: put(data)
    reader: shut() ── False while the writer holds the inbox

The slots are those of a file in shared memory, used in turn. A stream's window allows for one slot
fewer than there are, so that a slot is written again after it was read. The writer removes
the file's name when it has opened it, so that nothing is left when both processes end. It locks the
file for as long as it may write to it, or to the reader's pool; the system frees the lock of a
process that ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from tts.engine.prefill_client import NUM_SLOTS

FOLDER = Path("/dev/shm")
_PATH = re.compile(re.escape(str(FOLDER)) + "/sonant-pages-[0-9]{1,20}-[0-9a-f]{32}")


class Inbox:
    """Slots of `slot_bytes` that another process of this user fills."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self.path = ""
        """Path for the writer; empty where there is no shared memory."""
        with suppress(OSError):
            path = f"{FOLDER}/sonant-pages-{os.getpid()}-{secrets.token_hex(16)}"
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self.path = path
            os.ftruncate(self._file, NUM_SLOTS * slot_bytes)  # memory is taken when it is written

    def read(self, slot: int, out: np.ndarray) -> None:
        """Copy the beginning of a slot to `out`, uint8. Raises ValueError for an invalid slot."""
        if not (self.path and 0 <= slot < NUM_SLOTS and out.nbytes <= self._slot_bytes):
            raise ValueError(f"{out.nbytes} bytes in slot {slot} of {self!r}")
        if os.preadv(self._file, [out.data], slot * self._slot_bytes) != out.nbytes:
            raise ValueError(f"{self!r} is too short")

    def shut(self) -> bool:
        """Keep writers out from now on; return False, without an effect, while there is one."""
        if not self.path:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.ftruncate(self._file, 0)
        return True

    def __enter__(self) -> Inbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self.path:
            Path(self.path).unlink(missing_ok=True)  # if no writer has opened it
            os.close(self._file)
            self.path = ""

    def __repr__(self) -> str:
        return f"Inbox({NUM_SLOTS} x {self._slot_bytes} bytes)"


class Outlet:
    """The writer's end of an inbox."""

    def __init__(self, file: int, slot_bytes: int) -> None:
        self._file, self._slot_bytes = file, slot_bytes
        self._next = 0

    @classmethod
    def open(cls, path: str) -> Outlet | None:
        """Open an inbox of this user; None when there is none at this path on this machine."""
        if not _PATH.fullmatch(path):
            return None
        try:
            file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            os.close(file)
            return None
        with suppress(OSError):
            os.unlink(path)
        size = 0
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            size = os.fstat(file).st_size
        if not size:  # it is shut
            os.close(file)
            return None
        return cls(file, size // NUM_SLOTS)

    def put(self, data: np.ndarray) -> int:
        """Write uint8 data to the next slot; return its number, or -1 when it does not fit, also
        when the shared memory is full.
        """
        slot = self._next
        if data.nbytes > self._slot_bytes:
            return -1
        try:
            if os.pwrite(self._file, data.data, slot * self._slot_bytes) != data.nbytes:
                return -1
        except OSError:
            return -1
        self._next = (slot + 1) % NUM_SLOTS
        return slot

    def __enter__(self) -> Outlet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)
