"""Ready windows of many streams, joined into as few decode calls as decoder and `max_batch` allow.

Samples never depend on who shared a call. Who is decoded when is decided by
the service, which knows whose listener waits. What a stream keeps between blocks (`StreamState`)
comes in with its windows and changes only when the whole call has succeeded.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

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


def group_windows(decoder: AudioDecoder, ready: Sequence[ReadyWindow]) -> list[list[int]]:
    """Indices of windows that can share a decode call; groups by their oldest member."""
    groups: list[list[int]] = []
    open_groups: dict[Hashable, list[int]] = {}
    for index, item in enumerate(ready):
        key = decoder.batch_key(item.window)
        group = open_groups.get(key)
        if group is None or len(group) == decoder.options.max_batch:
            group = open_groups[key] = []
            groups.append(group)
        group.append(index)
    return groups


class Rendered(ABC):
    """Blocks of one or more streams that a decoder works on or has rendered."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether `samples` would return at once."""

    @property
    @abstractmethod
    def took_s(self) -> float:
        """How long the decoder was at it; once it is ready."""

    @abstractmethod
    def samples(self) -> list[np.ndarray]:
        """Emitted samples of each window, float32 [num_samples]; to be called once.

        Of the batches of one stream in their order: what a block's end is faded into is kept here.
        """


def render(decoder: AudioDecoder, ready: Sequence[ReadyWindow]) -> list[np.ndarray]:
    """Emitted samples of each window, float32 [num_samples], in the order given.

    Windows of one stream follow each other in its order. Raises what the decoder raises; then none
    of the windows has samples and no stream's state has changed.
    """
    return launch(decoder, ready).samples()


class Renderer:
    """One decoder, on a stream of its own where it runs on a GPU: other work goes on beside it, and
    gives way to it.
    """

    def __init__(self, decoder: AudioDecoder) -> None:
        self.decoder = decoder
        self._on_stream: Callable[[], AbstractContextManager[object]] = nullcontext
        if decoder.device.startswith("cuda"):
            import torch

            from decoder.cuda_graphs import URGENT

            stream = torch.cuda.Stream(torch.device(decoder.device), priority=URGENT)
            self._on_stream = partial(torch.cuda.stream, stream)

    def launch(self, ready: Sequence[ReadyWindow]) -> Rendered:
        """As the function `launch`."""
        with self._on_stream():
            return launch(self.decoder, ready)


def launch(decoder: AudioDecoder, ready: Sequence[ReadyWindow]) -> Rendered:
    """As `render`, but a device may still be at it when this returns. Raises what `render` does."""
    if decoder.device == "cpu":
        started_s = time.perf_counter()
        return _OnHost(*_launched(decoder, ready), time.perf_counter() - started_s)
    started = _event_now()
    return _OnItsWay(*_launched(decoder, ready), started, _event_now())


def _launched(
    decoder: AudioDecoder, ready: Sequence[ReadyWindow]
) -> tuple[list[_Block], list[_Part]]:
    """Blocks and the rows that they are in, or will be."""
    states = [StreamState() if item.state is None else item.state for item in ready]
    kept = {id(state): state.kept for state in states}
    fade = crossfade_samples(decoder.spec, decoder.options)
    parts: list[_Part] = []
    for indices, rows in _rows(decoder, ready, states, kept):
        # At once: the next call of a decoder may use the same memory again.
        parts.append((indices, _to_host(rows)))
    for state in states:
        state.kept = kept[id(state)]
    blocks = [
        _Block(item.window.num_samples, tail_size(decoder.spec, item.window, fade), state)
        for item, state in zip(ready, states, strict=True)
    ]
    return blocks, parts


def tail_size(spec: CodecSpec, window: DecodeWindow, fade: int) -> int:
    """How many samples after its block a window renders for the next one to fade in from."""
    return min(fade, int(window.future_len * spec.samples_per_code))


def _rows(
    decoder: AudioDecoder,
    ready: Sequence[ReadyWindow],
    states: Sequence[StreamState],
    kept: dict[int, object],
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Rendered windows [B, S] and which they are; where a stream's past is kept, block by block."""
    if decoder.options.stateful:
        for index, (item, state) in enumerate(zip(ready, states, strict=True)):
            row, kept[id(state)] = decoder.decode_next(item.window, kept[id(state)])
            yield [index], row
    else:
        for group in group_windows(decoder, ready):
            yield group, decoder.decode([ready[index].window for index in group])


_Part: TypeAlias = "tuple[list[int], torch.Tensor]"
"""Which windows, and their rows [B, S], which begin with what is emitted."""


@dataclass(frozen=True, slots=True)
class _Block:
    num_samples: int
    tail_size: int
    state: StreamState


class _OnHost(Rendered):
    """Rows that are in host memory, or will be when somebody has waited for them."""

    def __init__(self, blocks: Sequence[_Block], parts: Sequence[_Part], took_s: float) -> None:
        self._blocks, self._parts, self._took_s = blocks, parts, took_s

    @property
    def took_s(self) -> float:
        return self._took_s

    @property
    def is_ready(self) -> bool:
        return True

    def samples(self) -> list[np.ndarray]:
        rows = {
            index: row
            for group, rows in self._parts
            for index, row in zip(group, rows.numpy(), strict=True)
        }
        return [self._emitted(rows[index], block) for index, block in enumerate(self._blocks)]

    def _emitted(self, row: np.ndarray, block: _Block) -> np.ndarray:
        emitted = row[: block.num_samples].copy()
        blend(emitted, block.state.tail)
        block.state.tail = row[block.num_samples :][: block.tail_size].copy()
        return emitted


class _OnItsWay(_OnHost):
    """Rows that a GPU copies to the host behind what it still has to do."""

    def __init__(
        self,
        blocks: Sequence[_Block],
        parts: Sequence[_Part],
        started: torch.cuda.Event,
        ended: torch.cuda.Event,
    ) -> None:
        super().__init__(blocks, parts, 0.0)
        self._started, self._ended = started, ended

    @property
    def is_ready(self) -> bool:
        return self._ended.query()

    @property
    def took_s(self) -> float:
        return self._started.elapsed_time(self._ended) / 1000

    def samples(self) -> list[np.ndarray]:
        self._ended.synchronize()
        return super().samples()


def _event_now() -> torch.cuda.Event:
    """On the current stream."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _to_host(rows: torch.Tensor) -> torch.Tensor:
    """The rows in host memory; from a GPU, in pinned memory that is filled when it gets there."""
    if rows.device.type == "cpu":
        return rows
    import torch

    target = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    return target.copy_(rows, non_blocking=True)


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
