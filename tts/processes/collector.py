"""`tune_gc`: settings of Python's garbage collector for a serving process.

A step creates thousands of short-lived objects, so the default thresholds start a collection every
few steps; and each full collection visits every object of a loaded model, which stops all requests
for 10 to 20 ms.
"""

from __future__ import annotations

import gc

from tts.cli.program import YOUNG_OBJECTS


def tune_gc() -> None:
    """Exclude all objects that exist now from collection, and collect new ones more rarely.

    Call it when everything that stays is loaded. Collection is on afterwards: cyclic garbage is
    still found, later and more of it at once.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    _, middle, old = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, middle, old)
