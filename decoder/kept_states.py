"""`StatefulNetwork`: a codec whose streams keep the state of its layers, many of them in a call.

    steps of B streams ──▶ codes [B, F, K], numbers of their earlier frames [B], rows [B, width]
        ──advance──▶ samples [B, S], rows behind the new frames ──▶ one row for each stream

A row holds the state of all layers of one stream, zeros at its start, so that its first block is a
call like the others. A call reads copies of the former rows and puts the new ones elsewhere: one
that fails changes no stream.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decoder.base import CodecSpec, DecoderConfigError, DecodeWindow
from decoder.streaming import check_codes, check_frames
from decoder.window_inputs import WindowInputs, WindowNetwork, stacked


class StateRow:
    """State of one stream's layers, float32 [1, width]; its place in a pool is free again when the
    object is deleted.
    """

    __slots__ = ("_free", "_place", "values")

    def __init__(self, values: Tensor, free: list[int] | None = None, place: int = 0) -> None:
        self._free, self._place, self.values = free, place, values

    def __repr__(self) -> str:
        own = "own memory" if self._free is None else f"place={self._place}"
        return f"StateRow({own}, width={self.values.shape[1]})"

    def __del__(self) -> None:
        if self._free is not None:
            self._free.append(self._place)  # atomic: streams end on any thread


class StatePool:
    """Memory for the rows of many streams, allocated in advance.

    When all of it is taken, further rows get memory of their own.
    """

    def __init__(self, count: int, width: int, device: str) -> None:
        self._rows = torch.zeros((count, width), device=device)
        self._free = list(range(count))

    def __repr__(self) -> str:
        return f"StatePool({tuple(self._rows.shape)}, free={self.num_free})"

    @property
    def num_free(self) -> int:
        """Number of places that no row has."""
        return len(self._free)

    def keep(self, rows: Tensor) -> list[StateRow]:
        """Copy rows [B, width] into places of their own."""
        kept = [self._take() for _ in range(len(rows))]
        torch._foreach_copy_([row.values for row in kept], list(rows.split(1)))
        return kept

    def _take(self) -> StateRow:
        if not self._free:
            return StateRow(self._rows.new_empty((1, self._rows.shape[1])))
        place = self._free.pop()
        return StateRow(self._rows[place : place + 1], self._free, place)


@dataclass(frozen=True, slots=True)
class KeptState:
    """State of a stream: the position of its next code, the number of its frames so far (those of
    its first context included), and the row of its layers.
    """

    next_position: int
    num_frames: int
    row: StateRow


class Step(NamedTuple):
    """The codes that a stream adds to its state, whose first `skip_samples` are not emitted."""

    codes: tuple[int, ...]
    former: KeptState | None
    skip_samples: int
    next_position: int

    @property
    def num_frames(self) -> int:
        """Number of the stream's earlier frames."""
        return self.former.num_frames if self.former else 0

    def line(self) -> tuple[int, ...]:
        """Return the numbers that a call needs: the stream's earlier frames, and the codes."""
        return (self.num_frames, *self.codes)


class StatefulNetwork(WindowNetwork):
    """A `WindowNetwork` that can also continue streams from their states (`spec.keeps_state`)."""

    state_width: int
    """Number of values of a stream's state."""

    @abstractmethod
    def advance(self, codes: Tensor, num_frames: Tensor, rows: Tensor) -> Tensor:
        """Return samples [B, S] of codes [B, F, K] of streams that had `num_frames` [B] before.

        It overwrites their states `rows` [B, width], without waiting for the device.
        """

    def batch_key(self, window: DecodeWindow) -> Hashable:
        """See AudioDecoder.batch_key: with a state, windows with equally many new codes."""
        if not self.spec.keeps_state:
            return super().batch_key(window)
        return len(window.codes) - window.prompt_len - window.history_len - window.future_len

    def decode(self, windows: Sequence[DecodeWindow]) -> Tensor:
        """See AudioDecoder.decode: with a state, each window is the beginning of a stream."""
        if not self.spec.keeps_state:
            return super().decode(windows)
        return self.decode_next(windows, [None] * len(windows))[0]

    def decode_next(
        self, windows: Sequence[DecodeWindow], kept: Sequence[object]
    ) -> tuple[Tensor, list[object]]:
        """See AudioDecoder.decode_next: the first block renders its window, later ones their codes.

        Raises DecoderConfigError when a window does not continue where its state stopped.
        """
        if not self.spec.keeps_state:
            return super().decode_next(windows, kept)
        return advance_streams(self.spec, windows, kept, self._render)

    def advanced(self, steps: Sequence[Step]) -> tuple[Tensor, Tensor]:
        """Render steps of equally many codes; return samples [B, S] and the new rows [B, width].

        On a CPU each is rendered alone, as in `WindowNetwork.decode`.
        """
        if self.device == "cpu" and len(steps) > 1:
            parts = [self.advanced([step]) for step in steps]
            return torch.cat([part for part, _ in parts]), torch.cat([row for _, row in parts])
        lines = torch.tensor([step.line() for step in steps])
        with torch.inference_mode():
            (lines,) = WindowInputs((lines,), None).to(self.device).tensors
            start = torch.zeros((1, self.state_width), device=self.device)
            rows = torch.cat(former_values(steps, start))
            return self.advance(*self.parts(lines), rows), rows

    def parts(self, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [B, F, K] and numbers of frames [B] of lines of steps."""
        return lines[:, 1:].unflatten(1, (-1, self.spec.codes_per_frame)), lines[:, 0]

    def _render(self, steps: Sequence[Step]) -> tuple[Tensor, list[StateRow]]:
        samples, rows = self.advanced(steps)
        if len(steps) == 1:
            return samples, [StateRow(rows)]
        # copies: a stream that is read late must not hold the states of its neighbours
        return samples, [StateRow(row.clone()) for row in rows.split(1)]


def former_values(steps: Sequence[Step], start: Tensor) -> list[Tensor]:
    """Return the states [1, width] before the steps; `start` is that of a new stream."""
    return [step.former.row.values if step.former else start for step in steps]


def advance_streams(
    spec: CodecSpec,
    windows: Sequence[DecodeWindow],
    kept: Sequence[object],
    render: Callable[[Sequence[Step]], tuple[Tensor, list[StateRow]]],
) -> tuple[Tensor, list[object]]:
    """Render windows of different streams with one call of `render` for each number of codes.

    It gets the steps of equally many codes, and returns their samples [B, S] and new states.
    Returns and raises as `StatefulNetwork.decode_next`.
    """
    steps = [_step(spec, window, state) for window, state in zip(windows, kept, strict=True)]
    groups: dict[tuple[int, int], list[int]] = {}
    for index, step in enumerate(steps):
        groups.setdefault((len(step.codes), step.skip_samples), []).append(index)
    emitted: dict[int, Tensor] = {}
    following: dict[int, object] = {}
    for (_, skipped), indices in groups.items():
        samples, rows = render([steps[index] for index in indices])
        samples = samples[:, skipped:]
        if len(groups) > 1:  # the next call may reuse the memory
            emitted |= zip(indices, samples.clone().split(1), strict=True)
        for index, row in zip(indices, rows, strict=True):
            step = steps[index]
            num_frames = step.num_frames + len(step.codes) // spec.codes_per_frame
            following[index] = KeptState(step.next_position, num_frames, row)
    order = range(len(steps))
    return (
        samples if len(groups) == 1 else stacked([emitted[index] for index in order]),
        [following[index] for index in order],
    )


def _step(spec: CodecSpec, window: DecodeWindow, kept: object) -> Step:
    """Return the codes that a window adds to its stream: without a state also its context."""
    former = kept if isinstance(kept, KeptState) else None
    context = window.prompt_len + window.history_len
    if former is not None and window.positions[context] != former.next_position:
        raise DecoderConfigError(
            f"a block at position {window.positions[context]} does not follow the stream's state, "
            f"which is at {former.next_position}"
        )
    end = len(window.codes) - window.future_len
    codes = check_codes(window.codes[context if former else 0 : end], spec.codebook_size, "speech")
    check_frames(len(codes), spec, "number of codes in a window")
    skipped = 0 if former else window.skip_samples
    return Step(codes, former, skipped, window.positions[end - 1] + 1)
