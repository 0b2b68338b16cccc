"""Batching of windows of many streams into as few decode calls as decoder and `max_batch` allow.

Samples never depend on the other windows of a call. The service decides on the order of windows.
The state of a stream (`StreamState`) comes with its windows and changes only when the whole call
has succeeded.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from decoder.base import (
    AudioDecoder,
    CodecSpec,
    DecodeRequest,
    StreamingOptions,
    StreamState,
    TailSlot,
)
from decoder.cuda.devices import URGENT, on_device, own_stream
from decoder.streaming import blend, crossfade_samples, tail_size

if TYPE_CHECKING:
    import numpy as np
    import torch

    from decoder.cuda.postprocess import GpuPostprocessor, PostprocessedRows


def group_windows(
    decoder: AudioDecoder, ready: Sequence[DecodeRequest], turns: Sequence[int] | None = None
) -> list[list[int]]:
    """Return indices of windows that can share a decode call; groups are ordered by their turn,
    then by their oldest member.

    Windows of different `turns` cannot share a call; None: all can.
    """
    turns = [0] * len(ready) if turns is None else turns
    groups: list[tuple[int, list[int]]] = []
    open_groups: dict[Hashable, list[int]] = {}
    for index, (item, turn) in enumerate(zip(ready, turns, strict=True)):
        key = turn, decoder.batch_key(item.window)
        group = open_groups.get(key)
        if group is None or len(group) == decoder.options.max_batch:
            group = open_groups[key] = []
            groups.append((turn, group))
        group.append(index)
    return [group for _, group in sorted(groups, key=itemgetter(0))]


def stream_turns(states: Sequence[StreamState]) -> list[int]:
    """Return for each window how many windows of its stream precede it."""
    seen: Counter[int] = Counter()
    turns = []
    for state in states:
        turns.append(seen[id(state)])
        seen[id(state)] += 1
    return turns


def key_turns(
    decoder: AudioDecoder, ready: Sequence[DecodeRequest], states: Sequence[StreamState]
) -> list[int]:
    """Return for each window how often the `batch_key` has changed in its stream before it.

    Groups in the order of these turns hold the windows of every stream in the stream's order.
    """
    last: dict[int, tuple[int, Hashable]] = {}
    turns = []
    for item, state in zip(ready, states, strict=True):
        key = decoder.batch_key(item.window)
        turn, former = last.get(id(state), (0, key))
        turn += key != former
        last[id(state)] = turn, key
        turns.append(turn)
    return turns


class DecodeResult(ABC):
    """Blocks of one or more streams that are being rendered or are finished."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether `samples` would return at once."""

    @property
    @abstractmethod
    def took_s(self) -> float:
        """Duration of the rendering in seconds; valid when it is ready."""

    def wait(self) -> None:  # noqa: B027 (what a CPU has rendered is ready)
        """Wait until it is ready, without the interpreter lock, if a device renders it."""

    @abstractmethod
    def samples(self) -> list[np.ndarray]:
        """Return the emitted samples of each window [num_samples]; to be called once.

        They are float32, or int16 if the window requests that and a GPU has rendered it. Call it in
        order for the batches of one stream: the end of a block is kept here for its crossfade.
        """


def render(decoder: AudioDecoder, ready: Sequence[DecodeRequest]) -> list[np.ndarray]:
    """Return the emitted samples of each window, float32 [num_samples], in the order given.

    Windows of one stream are in the order of the stream. Raises the errors of the decoder; then no
    window has samples and no stream's state has changed.
    """
    started_s = time.perf_counter()
    states = [item.state for item in ready]
    with on_device(decoder.device):
        parts = [(indices, rows.cpu()) for indices, rows in _render_rows(decoder, ready, states)]
    fade = crossfade_samples(decoder.spec, decoder.options)
    return HostResult(decoder.spec, fade, ready, parts, time.perf_counter() - started_s).samples()


class Renderer:
    """One decoder, on a GPU with its own high-priority stream, in parallel with other work.

    On a GPU the crossfade runs on the device, so that a stream must always use the same renderer,
    and memory for the results of streams of these `options` (None: the codec's recommended ones) is
    allocated in advance.
    """

    def __init__(self, decoder: AudioDecoder, options: StreamingOptions | None = None) -> None:
        self.decoder = decoder
        self._fade = crossfade_samples(decoder.spec, decoder.options)
        self._postprocessor: GpuPostprocessor | None = None
        self._on_stream: Callable[[], AbstractContextManager[object]] = nullcontext
        if decoder.device.startswith("cuda"):
            from decoder.cuda.postprocess import GpuPostprocessor

            self._on_stream = own_stream(decoder.device, URGENT)
            with self._on_stream():
                options = decoder.spec.recommended if options is None else options
                self._postprocessor = GpuPostprocessor(decoder, self._fade, options)

    def launch(self, ready: Sequence[DecodeRequest]) -> DecodeResult:
        """Start to render like `render`, possibly asynchronously. Raises the errors of `render`."""
        started_s, states = time.perf_counter(), [item.state for item in ready]
        if self._postprocessor is None:
            parts = list(_render_rows(self.decoder, ready, states))
            took_s, spec = time.perf_counter() - started_s, self.decoder.spec
            return HostResult(spec, self._fade, ready, parts, took_s)
        with self._on_stream():
            return self._launch(self._postprocessor, ready, states)

    def _launch(
        self,
        postprocessor: GpuPostprocessor,
        ready: Sequence[DecodeRequest],
        states: Sequence[StreamState],
    ) -> DecodeResult:
        tails = {id(state): _on_device(state.tail) for state in states}
        started = _event_now()
        parts: list[tuple[list[int], PostprocessedRows]] = []
        for indices, rows in _render_rows(self.decoder, ready, states):
            # Immediately: the decoder's next call may reuse the memory.
            own = [ready[index] for index in indices]
            as_s16 = all(item.as_s16 for item in own)
            parts.append((indices, postprocessor.finish(rows, own, tails, as_s16=as_s16)))
        for state in states:
            state.tail = tails[id(state)]
        return DeviceResult(postprocessor, ready, parts, (started, _event_now()))


def _on_device(tail: np.ndarray | TailSlot | None) -> TailSlot | None:
    assert tail is None or isinstance(tail, TailSlot)
    return tail


def _render_rows(
    decoder: AudioDecoder, ready: Sequence[DecodeRequest], states: Sequence[StreamState]
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Iterate over rendered rows [B, S] and the indices of their windows.

    The windows of one stream come in their order, as a GPU blends them one after the other. The
    states change after all blocks have been rendered.
    """
    if not decoder.spec.keeps_state:
        has_distinct_streams = len(set(map(id, states))) == len(states)
        turns = None if has_distinct_streams else key_turns(decoder, ready, states)
        for group in group_windows(decoder, ready, turns):
            yield group, decoder.decode([ready[index].window for index in group])
        return
    kept = {id(state): state.kept for state in states}
    for group in group_windows(decoder, ready, stream_turns(states)):
        own = [id(states[index]) for index in group]
        windows = [ready[index].window for index in group]
        rows, following = decoder.decode_next(windows, [kept[key] for key in own])
        kept |= zip(own, following, strict=True)
        yield group, rows
    for state in states:
        state.kept = kept[id(state)]


_Part: TypeAlias = "tuple[list[int], torch.Tensor]"
"""Indices of windows, and their rows [B, S] on the host, which begin with the emitted samples."""


class HostResult(DecodeResult):
    """Rows in host memory, before the crossfade."""

    is_ready = True
    took_s = 0.0

    def __init__(
        self,
        spec: CodecSpec,
        fade: int,  # samples of a crossfade
        ready: Sequence[DecodeRequest],
        parts: Sequence[_Part],
        took_s: float,
    ) -> None:
        self._spec, self._fade = spec, fade
        self._ready, self._parts, self.took_s = ready, parts, took_s

    def samples(self) -> list[np.ndarray]:
        rows, found, fade = _in_order(self._parts), [], self._fade
        for index, item in enumerate(self._ready):
            row, count, tail = rows[index], item.window.num_samples, item.state.tail
            assert not isinstance(tail, TailSlot)
            emitted = row[:count].copy()
            if fade:
                blend(emitted, tail)
                item.state.tail = row[count:][: tail_size(self._spec, item.window, fade)].copy()
            found.append(emitted)
        return found


class DeviceResult(DecodeResult):
    """Rows that a GPU blends and copies to the host behind its queued work."""

    def __init__(
        self,
        postprocessor: GpuPostprocessor,
        ready: Sequence[DecodeRequest],
        parts: Sequence[tuple[list[int], PostprocessedRows]],
        events: tuple[torch.cuda.Event, torch.cuda.Event],
    ) -> None:
        self._postprocessor, self._ready, self._parts = postprocessor, ready, parts
        self._started, self._ended = events

    @property
    def is_ready(self) -> bool:
        return self._ended.query()

    @property
    def took_s(self) -> float:
        return self._started.elapsed_time(self._ended) / 1000

    def wait(self) -> None:
        """See DecodeResult."""
        self._ended.synchronize()

    def samples(self) -> list[np.ndarray]:
        self._ended.synchronize()
        rows = _in_order([(indices, finished.rows) for indices, finished in self._parts])
        found = [
            rows[index][: item.window.num_samples].copy() for index, item in enumerate(self._ready)
        ]
        for _, finished in self._parts:
            self._postprocessor.give_back(finished)
        return found


def _in_order(parts: Sequence[_Part]) -> dict[int, np.ndarray]:
    return {
        index: row
        for indices, rows in parts
        for index, row in zip(indices, rows.numpy(), strict=True)
    }


def _event_now() -> torch.cuda.Event:
    """Record an event on the current stream."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
