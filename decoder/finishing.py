"""What becomes of rendered rows on a GPU: faded into each other, and 16-bit where it is asked.

    rows [B, S] ──▶ each row's tail into a slot of its own ──▶ fade from the former block's slot
                ──▶ int16, if all of a call want that ──▶ one copy to the host

A stream holds the slot of its newest block's tail; a slot that nobody holds is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from decoder.base import AudioDecoder, TailSlot
from decoder.finish_kernels import NUMBERS, finish, keep_tails
from decoder.host_memory import PinnedPool, Staging

if TYPE_CHECKING:
    from decoder.batching import Block

FIRST_SLOTS = 256


Tails = dict[int, "TailSlot | None"]
"""What is kept of each stream, by the id of its state."""


class Finished(NamedTuple):
    """Rows [B, S] on their way to the host, and the memory to give back when they are read."""

    rows: Tensor
    memory: Tensor


class Finisher:
    """Of one decoder and one stream of the device."""

    def __init__(self, decoder: AudioDecoder, fade: int) -> None:
        self._device, self._fade = decoder.device, fade
        self._pool = PinnedPool()
        self._pool.fill(usual_bytes(decoder, fade))
        self._tails = torch.zeros((FIRST_SLOTS, max(fade, 1)), device=decoder.device)
        self._free = list(range(FIRST_SLOTS))
        rows = decoder.options.max_batch
        self._staging = Staging(rows, NUMBERS, decoder.device)
        self._about = torch.zeros((rows, NUMBERS), dtype=torch.int64, device=decoder.device)
        self._compile()

    def _compile(self) -> None:
        """Now, and not while somebody listens."""
        rows, about = torch.zeros((1, 1024), device=self._device), self._about[:1]
        if self._fade:
            keep_tails(rows, about, self._tails)
        for dtype in (torch.float32, torch.int16):
            finish(rows, about, self._tails, dtype)

    def finish(
        self, rows: Tensor, blocks: Sequence[Block], tails: Tails, *, as_s16: bool
    ) -> Finished:
        """Queue it all behind the rendering of at most `max_batch` rows. `tails` are those of the
        blocks before, and then of these.
        """
        rows = rows if rows.is_contiguous() else rows.contiguous()
        if self._fade or as_s16:
            about = self._describe(blocks, tails)
            if self._fade:
                keep_tails(rows, about, self._tails)
            rows = finish(rows, about, self._tails, torch.int16 if as_s16 else torch.float32)
        target, memory = self._pool.take(rows)
        return Finished(target.copy_(rows, non_blocking=True), memory)

    def give_back(self, finished: Finished) -> None:
        """Its rows have been read."""
        self._pool.give_back(finished.memory)

    def _describe(self, blocks: Sequence[Block], tails: Tails) -> Tensor:
        """int64 [B, 5] on the device."""
        buffer, held = self._staging.next(), []  # what is read in this call is nobody's new slot
        numbers = []
        for num_samples, tail_size, state in blocks:
            former, kept, own = tails[id(state)], None, 0
            held.append(former)
            if tail_size:
                kept = TailSlot(self._free or self._grown(), tail_size)
                own = kept.index
            tails[id(state)] = kept
            slot, length = (former.index, former.length) if former else (0, 0)
            numbers.append((num_samples, slot, length, own, tail_size))
        buffer.numbers[: len(blocks)] = numbers
        about = self._about[: len(blocks)]
        about.copy_(buffer.tensor[: len(blocks)], non_blocking=True)
        self._staging.note_copy()
        return about

    def _grown(self) -> list[int]:
        """The slots that are free, now that there are twice as many."""
        count = len(self._tails)
        self._tails = torch.cat((self._tails, torch.zeros_like(self._tails)))
        self._free += range(count, 2 * count)
        return self._free


def usual_bytes(decoder: AudioDecoder, fade: int) -> int:
    """Of the largest call's float32 samples where streams are cut as the codec recommends."""
    longest = max(decoder.spec.recommended.chunk_sizes or (0,))
    num_samples = int(longest * decoder.spec.samples_per_code) + fade
    return decoder.options.max_batch * num_samples * 4
