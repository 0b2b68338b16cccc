"""Temporary files with an owner process: those of a killed process are removed by a later one.

    sonant-NAME-lock    locked while the owner is alive; contains the kind of the other files:
    sonant-NAME         a folder, or
    sonant-NAME-*       sockets

The operating system releases a lock when its process ends. Only locks of this user are examined.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RETRY_S = 0.01
PREFIX, LOCK = "sonant-", "-lock"
FOLDER, SOCKETS = b"folder\n", b"sockets\n"  # contents of a lock file


def lock(path: Path, owns: bytes) -> int:
    """Lock a file, which is created if needed; return the descriptor that holds the lock.

    Raises OSError on failure: EWOULDBLOCK while another process holds the lock.
    """
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(descriptor, owns, 0)
        except OSError:
            os.close(descriptor)
            raise
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # its former owner removed the file before it was locked here


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Create a folder for this user only and remove it after the block.

    If the process is killed, a later `sweep` removes the folder."""
    sweep()
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}{kind}-{secrets.token_hex(8)}"
    held = lock(_lock_of(folder), FOLDER)
    try:
        folder.mkdir(0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _lock_of(folder).unlink(missing_ok=True)
        os.close(held)


def sweep() -> None:
    """Remove the temporary files of this user's dead processes."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*{LOCK}"):
        with suppress(OSError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                _reclaim(path)


def remove_folder(folder: Path, wait_s: float = 0.0) -> None:
    """Remove a `temporary_folder` of another process, if that process is dead or dies within this
    time.
    """
    when_released(lambda: _reclaim(_lock_of(folder)), wait_s)


def when_released(remove: Callable[[], None], wait_s: float) -> None:
    """Call a function that needs a lock; repeat it while another process holds the lock, for at
    most this time. Other errors of the operating system end it, too.

    A killed process closes its pipes before it releases its locks.
    """
    deadline_s = time.monotonic() + wait_s
    with suppress(OSError):
        while True:
            try:
                return remove()
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    return None
                time.sleep(RETRY_S)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK)


def _reclaim(path: Path) -> None:
    """Remove a lock and the files of its owner. Raises OSError while the owner is alive."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        name = path.with_name(path.name.removesuffix(LOCK))
        owned = os.read(descriptor, 16)
        if owned == FOLDER:
            shutil.rmtree(name, ignore_errors=True)
        elif owned == SOCKETS:
            for socket in filter(Path.is_socket, name.parent.glob(f"{name.name}-*")):
                socket.unlink(missing_ok=True)
        else:
            return  # empty: its process is about to lock it and write the kind
        path.unlink()
    finally:
        os.close(descriptor)
