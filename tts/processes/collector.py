"""`tune_gc` and `collect_regularly`: Python's garbage collector in a serving process.

A step creates thousands of short-lived objects, so the default thresholds start a collection every
few steps; and each full collection visits every object of a loaded model, which stops all requests
for 10 to 20 ms. With rare collections each visits what all streams of some seconds have left, which
stops hundreds of streams for 50 ms and more. So young objects are collected by time: about 50 µs
for each stream that has begun since.
"""

from __future__ import annotations

import asyncio
import gc

from tts.cli.program import YOUNG_OBJECTS

YOUNG_S = 0.5  # between two collections of young objects
PASSES = 1200  # of them for a full one, which may stop hundreds of streams for 100 ms


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


def collect_regularly(loop: asyncio.AbstractEventLoop, passes: int = 1) -> None:
    """Collect young objects twice a second, and all of them every ten minutes, until the loop
    closes.
    """
    if passes % PASSES:
        gc.collect(0)
    else:
        gc.collect()
    loop.call_later(YOUNG_S, collect_regularly, loop, passes + 1)
