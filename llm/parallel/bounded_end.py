"""`BoundedEnd`: the end of a group of NCCL, for which its process waits a limited time only.

NCCL waits until every captured graph with one of its collectives is destroyed, and for threads that
wait for other ranks. No signal interrupts it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

logger = logging.getLogger(__name__)

END_S = 10.0


class BoundedEnd:
    """Ends a group on a thread of its own, which holds it until then: meanwhile no other thread
    runs its destructor, which waits in the same way. A thread that does not return ends with the
    process.
    """

    def __init__(self, group: Any) -> None:
        """`group` has `abort`. It also ends when this object is collected."""
        self._is_asked, self._has_ended = threading.Event(), threading.Event()
        work = (group, self._is_asked, self._has_ended)
        threading.Thread(target=_end, args=work, name="group end", daemon=True).start()
        weakref.finalize(self, self._is_asked.set).atexit = False  # other ranks end first

    def begin(self) -> None:
        """Let the group's collectives raise, and end it. Idempotent; callable from any thread."""
        self._is_asked.set()

    def wait(self) -> None:
        """Begin, and wait until it has ended, for at most `END_S`."""
        self.begin()
        if not self._has_ended.wait(END_S):
            text = "NCCL has not ended within %g s: its connections end with this process"
            logger.error(text, END_S)


def _end(group: Any, is_asked: threading.Event, has_ended: threading.Event) -> None:
    is_asked.wait()
    try:
        group.abort()
    except RuntimeError as error:
        logger.warning("NCCL has ended with an error: %s", error)
    finally:
        has_ended.set()
