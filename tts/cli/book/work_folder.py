"""The work folder of a book: finished pieces on disk, so that a killed run can be continued.

book.mp3.parts/   lock            held while a run uses the folder
                  manifest.json   the text, voice and settings that the pieces belong to
                  000012.piece    a line of JSON, then the samples; complete if it exists
                  output.mp3      what is being joined
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from tts.cli.options import UsageError
from tts.cli.timestamps import Segment
from tts.leftovers import lock

LOCK, MANIFEST, PIECE, OUTPUT, TEMPORARY = "lock", "manifest.json", ".piece", "output", ".tmp"

_DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for a file that is no JSON of its type."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The inputs that a book's samples depend on; texts and settings as digests."""

    version: str  # of this package
    text: str
    voice: str
    settings: str
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise ValueError("the seed is out of range")

    def difference(self, other: Manifest) -> str:
        """Return the first thing in which the two differ, as a phrase; "" if they are equal."""
        phrases = {
            "version": "this program has another version",
            "text": "the text has changed",
            "voice": "it was begun with another voice",
            "settings": "it was begun with other settings",
            "seed": "it was begun with another --seed",
        }
        ours, theirs = asdict(self), asdict(other)
        return next((phrase for name, phrase in phrases.items() if ours[name] != theirs[name]), "")


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """Description of a stored piece of samples."""

    key: str  # of the manifest, the piece's place and its text
    sample_rate: int  # Hz
    digest: str  # of the samples
    segments: tuple[Segment, ...] = ()
    words: tuple[Segment, ...] = ()
    warnings: tuple[str, ...] = ()


def digest_of(*parts: bytes) -> str:
    """Return a digest of byte strings, which depends on where each ends."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class WorkFolder:
    """A work folder that this process has locked; see `open_work_folder`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._identity = msgspec.json.encode(manifest)

    def key(self, index: int, text: str) -> str:
        """Return what identifies a piece and everything that its samples depend on."""
        return digest_of(self._identity, str(index).encode(), text.encode())

    def output(self, suffix: str) -> Path:
        """Return the path of a file that is moved to its place when it is complete."""
        return self.path / f"{OUTPUT}{suffix}"

    def store(self, index: int, record: PieceRecord, samples: bytes) -> None:
        """Write a piece, whole or not at all."""
        _replace(self._piece(index), msgspec.json.encode(record) + b"\n" + samples)

    def load(self, index: int, key: str) -> tuple[PieceRecord, bytes] | None:
        """Return a piece; None if it is missing or damaged.

        Raises UsageError for a piece with another key: it belongs to another run.
        """
        try:
            line, _, samples = self._piece(index).read_bytes().partition(b"\n")
            record = msgspec.json.decode(line, type=PieceRecord)
        except (FileNotFoundError, *_DAMAGED):
            return None
        if record.key != key:
            raise UsageError(
                f"{self._piece(index)} belongs to another run than {MANIFEST}; "
                "begin again with --restart"
            )
        return (record, samples) if digest_of(samples) == record.digest else None

    @property
    def is_empty(self) -> bool:
        """Whether no piece is stored."""
        return not any(self.path.glob(f"*{PIECE}"))

    def remove(self) -> None:
        """Remove the folder and this command's files in it; files of others stay."""
        _clear(self.path)
        (self.path / LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # a file of another program is in it
            self.path.rmdir()

    def _piece(self, index: int) -> Path:
        return self.path / f"{index:06}{PIECE}"


@contextmanager
def open_work_folder(
    path: Path, manifest: Manifest, *, has_seed: bool, resume: bool, restart: bool
) -> Iterator[WorkFolder]:
    """Lock a work folder, which is created if needed; without pieces it is removed at the end.

    With `resume` an unfinished run is continued, with its seed if `has_seed` is False; with
    `restart` its pieces are removed. Raises UsageError when it cannot be continued or written, or
    when another process uses it.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        path.mkdir(exist_ok=True)
        held = _lock(path)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or path}: {error.strerror}") from error
    try:
        known = _known_manifest(path, restart=restart)
        if known is not None and not resume:
            raise UsageError(
                f"{path} has an unfinished run; continue it with --resume, or begin again with "
                "--restart"
            )
        if known is not None and not has_seed:
            manifest = replace(manifest, seed=known.seed)
        if known is not None and (difference := manifest.difference(known)):
            raise UsageError(
                f"{path} cannot be continued: {difference}; begin again with --restart"
            )
        _replace(path / MANIFEST, msgspec.json.encode(manifest))
        work = WorkFolder(path, manifest)
        try:
            yield work
        finally:
            if path.exists() and work.is_empty:
                work.remove()
    finally:
        os.close(held)


def _lock(path: Path) -> int:
    try:
        return lock(path / LOCK, b"")
    except BlockingIOError:
        raise UsageError(f"{path} is in use by another run") from None


def _known_manifest(path: Path, *, restart: bool) -> Manifest | None:
    """Return the manifest of an unfinished run, if there is one."""
    if restart:
        _clear(path)
    try:
        return msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        others = [name for name in os.listdir(path) if name not in (LOCK, MANIFEST + TEMPORARY)]
        if others:
            raise UsageError(
                f"{path} has no {MANIFEST}, but other files, such as {others[0]}; remove it, or "
                "choose another output"
            ) from None
        return None
    except _DAMAGED as error:
        raise UsageError(
            f"{path / MANIFEST} is damaged ({error}); begin again with --restart"
        ) from error


def _clear(path: Path) -> None:
    """Remove this command's files, but for the lock."""
    for file in path.iterdir():
        is_ours = file.suffix in (PIECE, TEMPORARY) or file.stem == OUTPUT or file.name == MANIFEST
        if is_ours and file.is_file():
            file.unlink()


def _replace(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.write_bytes(data)
    os.replace(temporary, path)
