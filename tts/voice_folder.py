"""The folder that keeps created voices: one JSON file each, for all processes that have it.

Whoever writes or removes a file holds the folder's lock, so a file half written that is found under
the lock was left by a process that died.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from llm import CheckpointError, ConfigError
from tts.checkpoint import read_json
from tts.errors import StorageFullError, UnavailableError
from tts.voice import Voice, VoicePrompt
from tts.voice_files import checked_texts, whole_codes

logger = logging.getLogger(__name__)

PREFIX, SUFFIX = ".voice-", ".tmp"  # of files that are being written
MAX_FILE_BYTES = 64 * 2**20
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_KEYS = ("name", "display_name", "language_codes", "prompt", "consent")


class FileMark(NamedTuple):
    """Tells one file from another that has its name later."""

    inode: int
    modified_ns: int
    size: int


class VoiceFolder:
    """Voices as files. A folder that was removed holds no voices; the next one makes it anew.

    Raises ConfigError when the folder cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_missed = False
        try:
            with self._locked():
                pass
        except OSError as error:
            raise ConfigError(f"voice_folder={path} cannot be used: {error.strerror}") from error

    def marks(self) -> dict[str, FileMark]:
        """What is there now, by file name; nothing when the folder cannot be read."""
        try:
            found = _marks(self.path)
        except OSError as error:
            if not self._is_missed:
                logger.error("voice folder %s cannot be read: %s", self.path, error.strerror)
            self._is_missed = True
            return {}
        self._is_missed = False
        return found

    def read(self, name: str) -> Voice:
        """The voice in a file. CheckpointError for one that holds none."""
        path = self.path / name
        with suppress(OSError):  # gone: reading tells
            if path.stat().st_size > MAX_FILE_BYTES:
                raise CheckpointError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        return _from_json(path)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process creates or deletes voices meanwhile.

        Raises, for what happens inside as well, StorageFullError when the disk is full, and
        UnavailableError when the folder cannot be written for another reason.
        """
        try:
            with self._locked():
                yield
        except OSError as error:
            logger.error("voice folder %s cannot be written: %s", self.path, error.strerror)
            if error.errno in NO_ROOM:
                raise StorageFullError("there is no room to keep voices; delete some") from error
            raise UnavailableError(f"voices cannot be kept now: {error.strerror}") from error

    def write(self, voice: Voice) -> None:
        """Keep a voice; inside `alone`. A crash never leaves half a file under its name."""
        descriptor, name = tempfile.mkstemp(dir=self.path, prefix=PREFIX, suffix=SUFFIX)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(_to_json(voice), file)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self._file(voice.name))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        """Forget a voice, if it is there; inside `alone`."""
        self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for left_over in self.path.glob(f"{PREFIX}*{SUFFIX}"):
                left_over.unlink(missing_ok=True)
            yield
        finally:
            os.close(descriptor)


def _marks(folder: Path) -> dict[str, FileMark]:
    """Of regular files: anything else could be read for ever."""
    marks = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".json"):
                with suppress(OSError):
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode):
                        mark = FileMark(status.st_ino, status.st_mtime_ns, status.st_size)
                        marks[entry.name] = mark
    return dict(sorted(marks.items()))


def _to_json(voice: Voice) -> dict[str, Any]:
    values = asdict(voice)
    return {key: values[key] for key in _KEYS}


def _from_json(path: Path) -> Voice:
    values = read_json(path)
    try:
        prompt = values["prompt"]
        codes = whole_codes(path, prompt["codes"])
        if values["name"] != path.stem:
            raise CheckpointError(f"{path}: holds the voice '{values['name']}'")
        voice = Voice(
            name=values["name"],
            display_name=str(values["display_name"]),
            language_codes=tuple(map(str, values["language_codes"])),
            prompt=VoicePrompt(codes, str(prompt["transcript"])),
            consent=str(values["consent"]),
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is incomplete: {error}") from error
    return checked_texts(path, voice)
