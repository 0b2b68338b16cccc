"""Folder of created voices, one JSON file each, shared by several processes.

A process that writes or removes a file holds the folder's lock. A partial file that is found under
the lock was therefore left by a process that died.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from llm import VECTOR_WIDTH, CheckpointError, ConfigError
from tts.checkpoint.files import read_json
from tts.errors import StorageFullError, UnavailableError
from tts.voices.files import (
    checked_texts,
    pronunciations_json,
    read_pronunciations,
    whole_codes,
)
from tts.voices.types import Voice, VoicePrompt

logger = logging.getLogger(__name__)

PREFIX, SUFFIX = ".voice-", ".tmp"  # of files that are being written
MAX_FILE_BYTES = 64 * 2**20
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_KEYS = ("name", "display_name", "language_codes", "prompt", "consent", "codec")


class FileMark(NamedTuple):
    """Identity of a file's version, which changes when another file gets its name."""

    inode: int
    modified_ns: int
    size: int


class VoiceFolder:
    """Storage of voices as files. A removed folder is empty; the next write creates it again.

    Raises ConfigError when the folder cannot be created.
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
        """Return the present files by name; none when the folder cannot be read."""
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
        """Return the voice in a file. Raises CheckpointError for an invalid file."""
        path = self.path / name
        with suppress(OSError):  # removed: reading raises the error
            if path.stat().st_size > MAX_FILE_BYTES:
                raise CheckpointError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        return _from_json(path)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude other processes from creating and deleting voices.

        An OSError of the block becomes StorageFullError when the disk is full, else
        UnavailableError.
        """
        try:
            with self._locked():
                yield
        except OSError as error:
            logger.error("voice folder %s cannot be written: %s", self.path, error.strerror)
            if error.errno in NO_ROOM:
                raise StorageFullError("there is no space to store voices; delete some") from error
            raise UnavailableError(f"voices cannot be kept now: {error.strerror}") from error

    def write(self, voice: Voice) -> None:
        """Store a voice atomically; to be called inside `exclusive`."""
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
        """Remove a voice, if it exists; to be called inside `exclusive`."""
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
    """Return the versions of regular files: reading any other kind might never end."""
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
    if voice.prompt is not None:
        values["prompt"]["vector"] = b64encode(voice.prompt.vector).decode()
    said = pronunciations_json(voice.pronunciations)
    return {**{key: values[key] for key in _KEYS}, "pronunciations": said}


def _from_json(path: Path) -> Voice:
    values = read_json(path)
    try:
        prompt = values["prompt"]
        vector = _vector(path, prompt.get("vector", ""))
        codes = () if vector and not prompt["codes"] else whole_codes(path, prompt["codes"])
        if values["name"] != path.stem:
            raise CheckpointError(f"{path}: holds the voice '{values['name']}'")
        voice = Voice(
            name=values["name"],
            display_name=str(values["display_name"]),
            language_codes=tuple(map(str, values["language_codes"])),
            prompt=VoicePrompt(codes, str(prompt["transcript"]), vector),
            consent=str(values["consent"]),
            codec=str(values.get("codec", "")),  # files of 0.1 have none
            pronunciations=read_pronunciations(path, values.get("pronunciations", [])),
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is incomplete: {error}") from error
    return checked_texts(path, voice)


def _vector(path: Path, text: Any) -> bytes:
    """Return the bytes of a vector. Raises CheckpointError for other text."""
    try:
        vector = b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: vector must be in base64") from error
    if len(vector) % VECTOR_WIDTH:
        raise CheckpointError(f"{path}: vector must have numbers of {VECTOR_WIDTH} bytes")
    return vector
