"""Temporary things with an owner: what a killed process left is swept by a later one.

    sonant-NAME-lock    locked by the owner as long as it lives; says what else there is:
    sonant-NAME         a folder, or
    sonant-NAME-*       sockets

A lock ends with its process, however that ends. Only locks of this user are looked at.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX, LOCK = "sonant-", "-lock"
FOLDER, SOCKETS = b"folder\n", b"sockets\n"  # what a lock can be for


def lock(path: Path, owns: bytes) -> int:
    """Lock a file, which is made if need be; the open file that holds the lock.

    OSError when that is impossible: EWOULDBLOCK while another process holds it.
    """
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(descriptor, owns, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """A folder for this user alone, which ends with the block; else it is swept later on."""
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
    """Remove what dead processes of this user left in the temporary folder."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*{LOCK}"):
        with suppress(OSError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                _reclaim(path)


def remove_folder(folder: Path) -> None:
    """Remove a `temporary_folder` of another process, if that is dead."""
    with suppress(OSError):
        _reclaim(_lock_of(folder))


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK)


def _reclaim(path: Path) -> None:
    """Remove a lock and what it is for; OSError while its owner lives."""
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
            return  # empty: its process is about to lock it
        path.unlink()
    finally:
        os.close(descriptor)
