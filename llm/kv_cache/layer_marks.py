"""`LayerMarks`: up to where a device has stored the keys and values of a forward.

forward's stream   layer 0 ─┬─ layer 1 ─┬─ layer 2 ─┬─ … sampling ─┬─
another stream     wait(0)  └▶ copy 0   └▶ copy 1   └▶ copy 2      └▶ layers without a mark
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class LayerMarks:
    """Marks of one forward. `note` and `note_end` belong to its stream and its thread; `wait` may
    run on any thread once `note_end` has returned.
    """

    def __init__(self, create_event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._create_event = create_event
        self._stored: dict[int, Any] = {}
        self._end: Any = None

    def note(self, layer: int) -> None:
        """Mark that the work queued so far stores a layer's keys and values."""
        event = self._create_event()
        event.record()
        self._stored[layer] = event

    def note_end(self) -> None:
        """Mark that the work queued so far stores those of all layers."""
        event = self._create_event()
        event.record()
        self._end = event

    def wait(self, layer: int) -> None:
        """Have the current stream wait for a layer's keys and values."""
        self._stored.get(layer, self._end).wait()
