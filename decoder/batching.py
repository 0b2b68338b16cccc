"""Ready windows of many streams, joined by shape into as few decode calls as `max_batch` allows.

Nothing is padded, and samples never depend on who shared a call. Who is decoded when is decided by
the service, which knows whose listener waits; this module touches no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoder.base import AudioDecoder, DecodeWindow

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class ReadyWindow:
    """One block that can be rendered now, and the stream it belongs to."""

    stream_id: str
    window: DecodeWindow


def group_by_shape(ready: Sequence[ReadyWindow], max_batch: int) -> list[list[int]]:
    """Indices of windows that can share a decode call; groups by their oldest member."""
    groups: list[list[int]] = []
    open_groups: dict[tuple[int, ...], list[int]] = {}
    for index, item in enumerate(ready):
        group = open_groups.get(item.window.shape)
        if group is None or len(group) == max_batch:
            group = open_groups[item.window.shape] = []
            groups.append(group)
        group.append(index)
    return groups


def render(decoder: AudioDecoder, ready: Sequence[ReadyWindow]) -> list[np.ndarray]:
    """Emitted samples of each window, float32 [num_samples], in the order given.

    Raises what the decoder raises; then none of the windows has samples.
    """
    samples: dict[int, np.ndarray] = {}
    for group in group_by_shape(ready, decoder.options.max_batch):
        windows = [ready[index].window for index in group]
        audio = decoder.decode(windows).cpu().numpy()
        for index, window, row in zip(group, windows, audio, strict=True):
            samples[index] = row[window.skip_samples :][: window.num_samples].copy()
    return [samples[index] for index in range(len(ready))]
