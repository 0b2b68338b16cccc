"""Ready windows of many streams, joined by shape into as few decode calls as `max_batch` allows.

Nothing is padded, and samples never depend on who shared a call. Who is decoded when is decided by
the service, which knows whose listener waits. What a stream keeps between blocks (`StreamState`)
comes in with its windows and changes only when the whole call has succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from decoder.base import AudioDecoder, CodecSpec, DecoderOptions, DecodeWindow, StreamState

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class ReadyWindow:
    """One block that can be rendered now, and the stream it belongs to.

    Without a `state` the block stands alone: nothing is kept for or taken from its neighbours.
    """

    stream_id: str
    window: DecodeWindow
    state: StreamState | None = None


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

    Windows of one stream follow each other in its order. Raises what the decoder raises; then none
    of the windows has samples and no stream's state has changed.
    """
    states = [StreamState() if item.state is None else item.state for item in ready]
    latest = {id(state): replace(state) for state in states}
    rows = _rows(decoder, ready, [latest[id(state)] for state in states])
    fade = crossfade_samples(decoder.spec, decoder.options)
    samples = []
    for item, state, row in zip(ready, states, rows, strict=True):
        start, end = item.window.skip_samples, item.window.skip_samples + item.window.num_samples
        emitted = row[start:end].copy()
        if fade:
            blend(emitted, latest[id(state)].tail)
            latest[id(state)].tail = row[end : end + fade].copy()
        samples.append(emitted)
    for state in states:
        state.kept, state.tail = latest[id(state)].kept, latest[id(state)].tail
    return samples


def _rows(
    decoder: AudioDecoder, ready: Sequence[ReadyWindow], states: Sequence[StreamState]
) -> list[np.ndarray]:
    """The rendered windows, each [S]; where a stream's past is kept, block after block."""
    rows: dict[int, torch.Tensor] = {}
    if decoder.options.stateful:
        for index, (item, state) in enumerate(zip(ready, states, strict=True)):
            (rows[index],), state.kept = decoder.decode_next(item.window, state.kept)
    else:
        for group in group_by_shape(ready, decoder.options.max_batch):
            audio = decoder.decode([ready[index].window for index in group]).cpu()
            rows.update(zip(group, audio, strict=True))
    return [rows[index].cpu().numpy() for index in range(len(ready))]


def crossfade_samples(spec: CodecSpec, options: DecoderOptions) -> int:
    """The length of `crossfade_ms`."""
    return round((options.crossfade_ms or 0.0) * spec.sample_rate / 1000)


def blend(block: np.ndarray, tail: np.ndarray | None) -> None:
    """Fade in place from the former block's rendering of these samples to this one's: linear."""
    if tail is None or not len(tail):
        return
    import numpy as np

    size = min(len(tail), len(block))
    rising = ((np.arange(size) + 0.5) / len(tail)).astype(np.float32)
    block[:size] = tail[:size] * (1 - rising) + block[:size] * rising
