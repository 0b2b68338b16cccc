"""`StateGraphs`: captured calls of a codec whose streams keep the state of its layers.

    numbers of frames of the configured schedule × batch sizes 1, 2, 4, 8, 12 … max_batch ──▶ graphs
    decode_next(5 windows of as many new codes)
        ──▶ codes and former states into 8 fixed rows ──▶ one launch ──▶ the first 5 rows
        ──▶ their states into free places of a pool

A graph reads and overwrites fixed rows, so that states may lie anywhere. Rows beyond the windows
hold old values. Calls of other lengths (a first block behind a voice prompt, a client's own chunk
sizes) are rendered without graphs, from and into the same pool.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from decoder.base import CodecSpec, DecodeWindow, StreamingOptions
from decoder.cuda.graphs import CapturedDecoder, GraphRecorder, batch_sizes
from decoder.cuda.host_memory import Staging
from decoder.kept_states import (
    StatefulNetwork,
    StatePool,
    StateRow,
    Step,
    advance_streams,
    former_values,
)
from decoder.window_inputs import WindowInputs

SHORT_FRAMES = 8  # last blocks of fewer frames are captured, too
STATES_SHARE = 8  # states take at most this part of the free memory


class StateGraphs(CapturedDecoder):
    """A `CapturedDecoder` that continues streams from their states.

    The pool has room for `num_states` states; further ones get memory of their own.
    """

    _network: StatefulNetwork

    def __init__(self, network: StatefulNetwork, record: GraphRecorder, num_states: int) -> None:
        super().__init__(network, record)
        width, rows = network.state_width, self.options.max_batch
        with torch.inference_mode():
            self.pool = StatePool(num_states, width, self.device)
            self._rows = torch.zeros((rows, width), device=self.device)
            self._each_row = self._rows.split(1)
            self._start = torch.zeros((1, width), device=self.device)
        self._stages: dict[int, Staging] = {}

    def capture_schedule(self, options: StreamingOptions) -> None:
        """Capture the calls of streams of these options, largest first."""
        rows = self.options.max_batch
        with self.log_duration(), torch.inference_mode():
            for frames in reversed(call_frames(self.spec, options)):
                width = 1 + frames * self.spec.codes_per_frame
                self._stages[frames] = Staging(rows, width, self.device)
                for size in reversed(batch_sizes(rows)):
                    lines = torch.zeros((size, width), dtype=torch.int64)
                    self._add((frames, size), WindowInputs((lines,), frames))

    def batch_key(self, window: DecodeWindow) -> Hashable:
        """See AudioDecoder.batch_key."""
        return self._network.batch_key(window)

    def decode(self, windows: Sequence[DecodeWindow]) -> Tensor:
        """See AudioDecoder.decode: each window is the beginning of a stream."""
        return self.decode_next(windows, [None] * len(windows))[0]

    def decode_next(
        self, windows: Sequence[DecodeWindow], kept: Sequence[object]
    ) -> tuple[Tensor, list[object]]:
        """See StatefulNetwork.decode_next."""
        return advance_streams(self.spec, windows, kept, self._render)

    def _run(self, inputs: WindowInputs) -> Tensor:
        (lines,) = inputs.tensors
        return self._network.advance(*self._network.parts(lines), self._rows[: len(lines)])

    def _render(self, steps: Sequence[Step]) -> tuple[Tensor, list[StateRow]]:
        count, frames = len(steps), len(steps[0].codes) // self.spec.codes_per_frame
        if frames not in self._stages or count > self.options.max_batch:
            samples, rows = self._advanced(steps, frames)
        else:
            samples, rows = self._replayed(steps, frames), self._each_row[:count]
        with torch.inference_mode():
            return samples, self.pool.keep(rows)

    def _advanced(self, steps: Sequence[Step], frames: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Render without graphs, in calls of no more frames than those that are captured: other
        memory belongs to the language model.
        """
        longest = max(self._stages, default=frames)
        most = max(1, self.options.max_batch * longest // frames)
        with torch.inference_mode():
            parts = [
                self._network.advanced(steps[first : first + most])
                for first in range(0, len(steps), most)
            ]
            samples = torch.cat([samples for samples, _ in parts])
        return samples, tuple(row for _, new in parts for row in new.split(1))

    def _replayed(self, steps: Sequence[Step], frames: int) -> Tensor:
        count = len(steps)
        size = next(size for size in batch_sizes(self.options.max_batch) if size >= count)
        recording, stage = self._captured_calls[frames, size], self._stages[frames]
        buffer = stage.next()
        buffer.numbers[:count] = [step.line() for step in steps]
        with torch.inference_mode():
            recording.inputs.tensors[0][:count].copy_(buffer.tensor[:count], non_blocking=True)
            stage.note_copy()
            torch.cat(former_values(steps, self._start), out=self._rows[:count])
            recording.replay()
        self.num_replays += 1
        return recording.output[:count]


def call_frames(spec: CodecSpec, options: StreamingOptions) -> list[int]:
    """Return the numbers of frames of captured calls: those of the chunks, and of short last
    blocks.
    """
    chunks = {size // spec.codes_per_frame for size in options.chunk_sizes or ()}
    return sorted(chunks | set(range(1, min(max(chunks, default=0), SHORT_FRAMES))))


def num_states(network: StatefulNetwork, num_streams: int) -> int:
    """Return how many states to allocate for so many streams on the current device.

    A call holds the old states of its streams until all are rendered.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    num_rows: int = network.options.max_batch  # of the calls
    most: int = free_bytes // STATES_SHARE // (4 * network.state_width) - num_rows
    return max(0, min(num_streams + num_rows, most))
