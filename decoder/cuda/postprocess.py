"""Postprocessing of rendered rows on a GPU: crossfade, and conversion to 16 bits if requested.

    rows [B, S] ──▶ each row's tail into its own slot ──▶ blend with the previous block's slot
                ──▶ int16, if all windows of a call request it ──▶ one copy to the host

A stream holds the slot of its newest block's tail; a released slot is reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decoder.base import AudioDecoder, DecodeRequest, StreamingOptions, TailSlot
from decoder.cuda.host_memory import PinnedPool, Staging, result_bytes
from decoder.kernels.finish import NUMBERS, finish, keep_tails
from decoder.streaming import tail_size

FIRST_SLOTS = 256


Tails = dict[int, "TailSlot | None"]
"""Tails of the streams, by the id of their state."""


class PostprocessedRows(NamedTuple):
    """Rows [B, S] that are being copied to the host, and the memory to return after reading."""

    rows: Tensor
    memory: Tensor


class GpuPostprocessor:
    """Postprocessing of one decoder on one stream of the device."""

    def __init__(self, decoder: AudioDecoder, fade: int, options: StreamingOptions) -> None:
        self._device, self._spec, self._fade = decoder.device, decoder.spec, fade
        self._pool = PinnedPool()
        self._pool.fill(result_bytes(decoder, fade, options))
        self._tails = torch.zeros((FIRST_SLOTS, max(fade, 1)), device=decoder.device)
        self._free = list(range(FIRST_SLOTS))
        rows = decoder.options.max_batch
        self._staging = Staging(rows, NUMBERS, decoder.device)
        self._about = torch.zeros((rows, NUMBERS), dtype=torch.int64, device=decoder.device)
        self._compile()

    def _compile(self) -> None:
        """Compile the kernels in advance, so that no request waits for that."""
        rows, about = torch.zeros((1, 1024), device=self._device), self._about[:1]
        if self._fade:
            keep_tails(rows, about, self._tails)
        for dtype in (torch.float32, torch.int16):
            finish(rows, about, self._tails, dtype)

    def finish(
        self, rows: Tensor, requests: Sequence[DecodeRequest], tails: Tails, *, as_s16: bool
    ) -> PostprocessedRows:
        """Queue the postprocessing behind the rendering of at most `max_batch` rows.

        `tails` are those of the previous blocks, and are replaced by those of these blocks.
        """
        rows = rows if rows.is_contiguous() else rows.contiguous()
        if self._fade or as_s16:
            about = self._describe(requests, tails)
            if self._fade:
                keep_tails(rows, about, self._tails)
            rows = finish(rows, about, self._tails, torch.int16 if as_s16 else torch.float32)
        target, memory = self._pool.take(rows)
        return PostprocessedRows(target.copy_(rows, non_blocking=True), memory)

    def give_back(self, finished: PostprocessedRows) -> None:
        """Return the memory of rows that have been read."""
        self._pool.give_back(finished.memory)

    def _describe(self, requests: Sequence[DecodeRequest], tails: Tails) -> Tensor:
        """Return the kernels' arguments, int64 [B, 5], on the device."""
        # keeps slots that are read in this call from being reused in it
        buffer, held = self._staging.next(), []
        numbers = []
        for request in requests:
            window, stream = request.window, id(request.state)
            former, kept, own = tails[stream], None, 0
            held.append(former)
            size = tail_size(self._spec, window, self._fade)
            if size:
                kept = TailSlot(self._free or self._grow_slots(), size)
                own = kept.index
            tails[stream] = kept
            slot, length = (former.index, former.length) if former else (0, 0)
            numbers.append((window.num_samples, slot, length, own, size))
        buffer.numbers[: len(requests)] = numbers
        about = self._about[: len(requests)]
        about.copy_(buffer.tensor[: len(requests)], non_blocking=True)
        self._staging.note_copy()
        return about

    def _grow_slots(self) -> list[int]:
        """Double the number of slots; return the free ones."""
        count = len(self._tails)
        self._tails = torch.cat((self._tails, torch.zeros_like(self._tails)))
        self._free += range(count, 2 * count)
        return self._free
