"""`calm_collector`: Python's garbage collection in a process that serves.

A step makes thousands of small objects that die with it, which looks like garbage to be looked
for every few steps; and each whole collection walks through everything a loaded model consists
of, in 10 to 20 ms during which nobody gets a token.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 50_000  # more than a step makes; Python's own number is 700


def calm_collector() -> None:
    """Call when everything that stays is loaded: it is never looked at again.

    Cyclic garbage is still found, later and more of it at once.
    """
    gc.collect()
    gc.freeze()
    _, middle, old = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, middle, old)
