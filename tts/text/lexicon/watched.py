"""`WatchedLexicons`: lexicons in files, read again when a file changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from llm import ConfigError
from tts.text.lexicon.entries import Lexicon

logger = logging.getLogger(__name__)

CHECK_S = 1.0  # between two checks of the files
PATIENCE_S = 0.05  # the caller waits for changes of a small file, and uses those of others later

Mark = tuple[int, int, int] | None
"""Inode, time of the last change in ns (also of its permissions), and size; None: no file."""


class WatchedLexicons:
    """Lexicons of one process, the file named last first. `current` checks the files.

    A file that cannot be read any more is logged once, and its last lexicon stays in use.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[Path], Lexicon],
        *,
        is_required: bool = True,
    ) -> None:
        """Raises ConfigError for a file that `read` refuses.

        Without `is_required` such a file is logged, and has no phrases until it changes.
        """
        self._read = read
        self._marks = {path: _mark(path) for path in reversed(paths)}
        self._lexicons: dict[Path, Lexicon] = {}
        self._broken: set[Path] = set()
        for path in self._marks:
            try:
                lexicon = read(path)
            except ConfigError as error:
                if is_required:
                    raise
                logger.error("%s; it is left out until it is mended", error)
                self._broken.add(path)
                lexicon = Lexicon()
            else:
                logger.info("lexicon %s: %d phrases", path, len(lexicon.entries))
            self._lexicons[path] = lexicon
        self._checked_s = time.monotonic()
        self._reload: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"WatchedLexicons({', '.join(map(str, self._lexicons))})"

    @property
    def num_broken(self) -> int:
        """Number of files that could not be read when they were read last."""
        return len(self._broken)

    def current(self) -> tuple[Lexicon, ...]:
        """Return the lexicons; read changed files again, at most once in `CHECK_S`."""
        now_s = time.monotonic()
        is_due = self._lexicons and now_s - self._checked_s >= CHECK_S
        if is_due and (self._reload is None or not self._reload.is_alive()):
            self._checked_s = now_s
            changed = {p: mark for p, known in self._marks.items() if (mark := _mark(p)) != known}
            if changed:
                self._marks |= changed
                self._reload = threading.Thread(target=self._renew, args=(changed,), daemon=True)
                self._reload.start()
                self._reload.join(PATIENCE_S)
        return tuple(self._lexicons.values())

    def _renew(self, paths: Iterable[Path]) -> None:
        for path in paths:
            try:
                lexicon = self._read(path)
            except ConfigError as error:
                logger.warning("%s; the former lexicon stays in use", error)
                self._broken.add(path)
            else:
                self._lexicons[path] = lexicon
                self._broken.discard(path)
                logger.info("lexicon %s: %d phrases, read again", path, len(lexicon.entries))


def _mark(path: Path) -> Mark:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns, status.st_size
