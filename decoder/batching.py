"""Ready windows of many streams, joined into as few decode calls as decoder and `max_batch` allow.

Samples never depend on who shared a call. Who is decoded when is decided by the service, which
knows whose listener waits. What a stream keeps between blocks (`StreamState`) comes in with its
windows and changes only when the whole call has succeeded.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from decoder.base import (
    AudioDecoder,
    CodecSpec,
    DecoderOptions,
    DecodeWindow,
    StreamState,
    TailSlot,
)
from decoder.devices import URGENT, on_device, own_stream

if TYPE_CHECKING:
    import numpy as np
    import torch

    from decoder.finishing import Finished, Finisher


class ReadyWindow(NamedTuple):
    """One block that can be rendered now.

    Without a `state` the block stands alone: nothing is kept for or taken from its neighbours.
    `as_s16` asks for 16-bit samples, which come from where that costs the host nothing.
    """

    window: DecodeWindow
    state: StreamState | None = None
    as_s16: bool = False


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
        """Emitted samples of each window, float32 or, where it asked for that and a GPU rendered
        them, perhaps int16 [num_samples]; to be called once.

        Of the batches of one stream in their order: what a block's end is faded into is kept here.
        """


def render(decoder: AudioDecoder, ready: Sequence[ReadyWindow]) -> list[np.ndarray]:
    """Emitted samples of each window, float32 [num_samples], in the order given.

    Windows of one stream follow each other in its order. Raises what the decoder raises; then none
    of the windows has samples and no stream's state has changed.
    """
    started_s = time.perf_counter()
    states = _states(ready)
    with on_device(decoder.device):
        parts = [(indices, rows.cpu()) for indices, rows in _rows(decoder, ready, states)]
    return _OnHost(
        _blocks(decoder, ready, states), parts, time.perf_counter() - started_s
    ).samples()


class Renderer:
    """One decoder, on a stream of its own where it runs on a GPU: other work goes on beside it, and
    gives way to it.

    There blocks are faded into each other on the device, so a stream stays with one renderer.
    """

    def __init__(self, decoder: AudioDecoder) -> None:
        self.decoder = decoder
        self._finisher: Finisher | None = None
        self._on_stream: Callable[[], AbstractContextManager[object]] = nullcontext
        if decoder.device.startswith("cuda"):
            from decoder.finishing import Finisher

            self._on_stream = own_stream(decoder.device, URGENT)
            with self._on_stream():
                self._finisher = Finisher(decoder, crossfade_samples(decoder.spec, decoder.options))

    def launch(self, ready: Sequence[ReadyWindow]) -> Rendered:
        """As `render`, but a device may still be at it when this returns. Raises what `render`
        does. On a GPU the windows of one stream in a call must have one `batch_key`: they fade
        into each other in the order of the calls that they are joined in.
        """
        started_s, states = time.perf_counter(), _states(ready)
        if self._finisher is None:
            parts = list(_rows(self.decoder, ready, states))
            blocks = _blocks(self.decoder, ready, states)
            return _OnHost(blocks, parts, time.perf_counter() - started_s)
        with self._on_stream():
            return self._launch(self._finisher, ready, states)

    def _launch(
        self, finisher: Finisher, ready: Sequence[ReadyWindow], states: Sequence[StreamState]
    ) -> Rendered:
        blocks = _blocks(self.decoder, ready, states)
        tails = {id(state): _on_device(state.tail) for state in states}
        started = _event_now()
        parts: list[tuple[list[int], Finished]] = []
        for indices, rows in _rows(self.decoder, ready, states):
            # At once: the next call of a decoder may use the same memory again.
            as_s16 = all(ready[index].as_s16 for index in indices)
            own = [blocks[index] for index in indices]
            parts.append((indices, finisher.finish(rows, own, tails, as_s16=as_s16)))
        for state in states:
            state.tail = tails[id(state)]
        return _OnItsWay(finisher, blocks, parts, (started, _event_now()))


def _on_device(tail: np.ndarray | TailSlot | None) -> TailSlot | None:
    assert tail is None or isinstance(tail, TailSlot)
    return tail


def _states(ready: Sequence[ReadyWindow]) -> list[StreamState]:
    return [StreamState() if item.state is None else item.state for item in ready]


def _blocks(
    decoder: AudioDecoder, ready: Sequence[ReadyWindow], states: Sequence[StreamState]
) -> list[Block]:
    fade = crossfade_samples(decoder.spec, decoder.options)
    return [
        Block(item.window.num_samples, tail_size(decoder.spec, item.window, fade), state)
        for item, state in zip(ready, states, strict=True)
    ]


def tail_size(spec: CodecSpec, window: DecodeWindow, fade: int) -> int:
    """How many samples after its block a window renders for the next one to fade in from."""
    if not window.future_len:
        return 0
    ratio = spec.samples_per_code
    return min(fade, window.future_len * ratio.numerator // ratio.denominator)


def _rows(
    decoder: AudioDecoder, ready: Sequence[ReadyWindow], states: Sequence[StreamState]
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Rendered rows [B, S] and which windows they are; where a stream's past is kept, block by
    block. What is kept changes when all have been rendered.
    """
    if not decoder.options.stateful:
        for group in group_windows(decoder, ready):
            yield group, decoder.decode([ready[index].window for index in group])
        return
    kept = {id(state): state.kept for state in states}
    for index, (item, state) in enumerate(zip(ready, states, strict=True)):
        row, kept[id(state)] = decoder.decode_next(item.window, kept[id(state)])
        yield [index], row
    for state in states:
        state.kept = kept[id(state)]


class Block(NamedTuple):
    """What a row is for: its samples, those after them to fade in from, the stream."""

    num_samples: int
    tail_size: int
    state: StreamState


_Part: TypeAlias = "tuple[list[int], torch.Tensor]"
"""Which windows, and their rows [B, S] on the host, which begin with what is emitted."""


class _OnHost(Rendered):
    """Rows that are in host memory and are still to be faded into each other."""

    is_ready = True

    def __init__(self, blocks: Sequence[Block], parts: Sequence[_Part], took_s: float) -> None:
        self._blocks, self._parts, self._took_s = blocks, parts, took_s

    @property
    def took_s(self) -> float:
        return self._took_s

    def samples(self) -> list[np.ndarray]:
        rows = _in_order(self._parts)
        return [self._emitted(rows[index], block) for index, block in enumerate(self._blocks)]

    def _emitted(self, row: np.ndarray, block: Block) -> np.ndarray:
        emitted = row[: block.num_samples].copy()
        tail = block.state.tail
        assert not isinstance(tail, TailSlot)
        blend(emitted, tail)
        block.state.tail = row[block.num_samples :][: block.tail_size].copy()
        return emitted


class _OnItsWay(Rendered):
    """Rows that a GPU fades and copies to the host behind what it still has to do."""

    def __init__(
        self,
        finisher: Finisher,
        blocks: Sequence[Block],
        parts: Sequence[tuple[list[int], Finished]],
        events: tuple[torch.cuda.Event, torch.cuda.Event],
    ) -> None:
        self._finisher, self._blocks, self._parts = finisher, blocks, parts
        self._started, self._ended = events

    @property
    def is_ready(self) -> bool:
        return self._ended.query()

    @property
    def took_s(self) -> float:
        return self._started.elapsed_time(self._ended) / 1000

    def samples(self) -> list[np.ndarray]:
        self._ended.synchronize()
        rows = _in_order([(indices, finished.rows) for indices, finished in self._parts])
        found = [
            rows[index][: block.num_samples].copy() for index, block in enumerate(self._blocks)
        ]
        for _, finished in self._parts:
            self._finisher.give_back(finished)
        return found


def _in_order(parts: Sequence[_Part]) -> dict[int, np.ndarray]:
    return {
        index: row
        for indices, rows in parts
        for index, row in zip(indices, rows.numpy(), strict=True)
    }


def _event_now() -> torch.cuda.Event:
    """On the current stream."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


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
