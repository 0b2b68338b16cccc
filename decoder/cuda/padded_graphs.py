"""`PaddedGraphs`: any windows of the configured schedule in one launch.

    call shapes of the schedule × batch sizes 1, 2, 4, 8, 12 … max_batch ──▶ graphs
    decode(any 5 windows) ──▶ the smallest shape that holds them, 8 rows ──▶ one launch ──▶ 5 rows

There are few shapes: that of a stream's first block, one that holds every
window of the schedule, and some for first blocks with a long voice prompt. Rows beyond the windows
hold old values. A window that fits no shape (a client's own chunk sizes) is rendered
without graphs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from decoder.base import DecodeWindow, PrependPromptSpeechTokens, StreamingOptions
from decoder.cuda.graphs import CapturedDecoder, GraphRecorder, batch_sizes
from decoder.cuda.host_memory import Staging
from decoder.window_inputs import CallShape, PaddedNetwork, WindowInputs, joined

PROMPT_S = 30.0  # maximum length of voice prompts with a captured shape
MIN_PROMPT = 32  # frames
REMEMBERED = 1024  # number of cached window shapes


class _WindowShape(NamedTuple):
    """Shape of windows, and the graph for them."""

    shape: CallShape  # of a call for one of them
    fitting: int | None  # index of the smallest captured shape that holds it


class PaddedGraphs(CapturedDecoder):
    """A `CapturedDecoder` of a codec with padding: each row equals its window alone."""

    _network: PaddedNetwork

    def __init__(self, network: PaddedNetwork, record: GraphRecorder) -> None:
        super().__init__(network, record)
        self._shapes: list[CallShape] = []
        self._common = 0
        self._stages: dict[CallShape, Staging] = {}
        self._fitting = lru_cache(REMEMBERED)(self._find_fitting)
        self._window_shapes: dict[Hashable, _WindowShape] = {}

    def capture_schedule(self, options: StreamingOptions) -> None:
        """Capture the calls of streams of these options."""
        self._shapes, self._common = call_shapes(self._network, options)
        self._window_shapes.clear()
        self._fitting.cache_clear()
        calls = [(shape, size) for shape in self._shapes for size in self._sizes(shape)]
        network = self._network
        for shape in self._shapes:
            rows = self._sizes(shape)[-1]
            self._stages[shape] = Staging(rows, network.width(shape), self.device)
        with self.log_duration(), torch.inference_mode():
            for shape, size in sorted(calls, key=lambda call: -call[0].num_frames * call[1]):
                lines = torch.zeros((size, network.width(shape)), dtype=torch.int64)
                lines[:, 1] = shape.num_frames
                self._add((shape, size), WindowInputs((lines,), shape))

    def batch_key(self, window: DecodeWindow) -> Hashable:
        """See AudioDecoder.batch_key."""
        index = self._window_shape_of(window).fitting
        return window.shape if index is None else max(index, self._common)

    def decode(self, windows: Sequence[DecodeWindow]) -> Tensor:
        """See AudioDecoder.decode."""
        kinds = {id(kind): kind for kind in map(self._window_shape_of, windows)}.values()
        (index, *more) = (kind.fitting for kind in kinds)
        if more:
            index = self._fitting(joined(kind.shape for kind in kinds))
        if index is None:
            return self._network.decode(windows)
        shape = self._shapes[index]
        most = self._sizes(shape)[-1]
        if len(windows) <= most:
            return self._replayed(windows, shape)
        parts = [windows[start : start + most] for start in range(0, len(windows), most)]
        with torch.inference_mode():
            return torch.cat([self._replayed(part, shape).clone() for part in parts])

    def _replayed(self, windows: Sequence[DecodeWindow], shape: CallShape) -> Tensor:
        count = len(windows)
        size = next(size for size in self._sizes(shape) if size >= count)
        recording, stage = self._captured_calls[shape, size], self._stages[shape]
        buffer = stage.next()
        self._network.fill(buffer.numbers[:count], windows, shape)
        with torch.inference_mode():
            recording.inputs.tensors[0][:count].copy_(buffer.tensor[:count], non_blocking=True)
            stage.note_copy()
            recording.replay()
        self.num_replays += 1
        return recording.output[:count]

    def _window_shape_of(self, window: DecodeWindow) -> _WindowShape:
        """Return the cached kind of a window; windows of a schedule have few shapes."""
        masks = window.masks
        key = (
            len(window.codes),
            window.prompt_len,
            window.history_len,
            window.future_len,
            window.num_samples,
            masks.block_causal,
            masks.prepend_prompt_speech_tokens_causal,
        )
        kind = self._window_shapes.get(key)
        if kind is None:
            if len(self._window_shapes) >= REMEMBERED:
                self._window_shapes.clear()
            shape = self._network.shape_of(window)
            kind = self._window_shapes[key] = _WindowShape(shape, self._fitting(shape))
        return kind

    def _find_fitting(self, shape: CallShape) -> int | None:
        """Return the index of the smallest captured shape that holds rows of this one."""
        fitting = (i for i, each in enumerate(self._shapes) if each.holds(shape))
        return next(fitting, None)

    def _sizes(self, shape: CallShape) -> tuple[int, ...]:
        """Return batch sizes; fewer for longer rows."""
        most = self.options.max_batch
        common = self._shapes[self._common].num_frames
        return batch_sizes(max(1, min(most, most * common // shape.num_frames)))


def call_shapes(network: PaddedNetwork, options: StreamingOptions) -> tuple[list[CallShape], int]:
    """Return the shapes for streams of these options, the shortest first, and the index of the one
    that holds all windows except those with a longer voice prompt.
    """
    sizes, spec = options.chunk_sizes, network.spec
    if sizes is None:
        return [], 0
    per_frame = spec.codes_per_frame
    masks = options.masks

    def shape(context: int, size: int, ahead: int) -> CallShape:
        fade = min(network.fade, int(ahead * spec.samples_per_code))
        return CallShape(
            left=context // per_frame,
            right=(size + ahead) // per_frame,
            num_samples=int(size * spec.samples_per_code) + fade,
            is_masked=masks.is_masked,
        )

    first = shape(0, sizes[0], options.look_ahead_of(0))
    common = joined((first, shape(options.buffer, max(sizes), options.look_ahead)))
    shapes = [common] if first.num_frames == common.num_frames else [first, common]
    if options.prepend is PrependPromptSpeechTokens.NEVER:
        return shapes, len(shapes) - 1
    longest = round(PROMPT_S * spec.codes_per_second)
    prompts = [
        shape(size, sizes[0], options.look_ahead_of(0))
        for size in _doubled(max(options.buffer, MIN_PROMPT * per_frame), longest)
    ]
    return [*shapes, *prompts], len(shapes) - 1


def _doubled(start: int, most: int) -> Iterator[int]:
    while start < most:
        start *= 2
        yield start
