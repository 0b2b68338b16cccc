"""`python -m tts.cluster.process`: `tts.serve` that drains when its standard input ends.

The actor that has started it holds the other end: it ends with the actor, however that ends.
"""

from __future__ import annotations

import os
import signal
import sys
from threading import Thread

from tts import serve


def _drain_at_end() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    Thread(target=_drain_at_end, daemon=True).start()
    sys.exit(serve.main())
