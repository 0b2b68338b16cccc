"""Pause at the end of a sentence's beginning, which its continuation replaces."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np

from tts.engine.client import AudioBlock

SILENCE_RMS = 10 ** (-45 / 20)  # full scale is 1


async def without_last_pause(
    blocks: AsyncGenerator[AudioBlock, None],
) -> AsyncGenerator[AudioBlock, None]:
    """Yield the blocks of a job up to the last one with sound, then an empty one that ends it.

    Silent blocks after the first sound are held back until sound follows.
    """
    held: list[AudioBlock] = []
    has_sound = False
    carry: tuple[int, ...] = ()
    async with aclosing(blocks):
        async for block in blocks:
            if has_sound and not block.error and _is_silent(block.samples):
                held.append(block)
                continue
            for ready in (*held, block):
                yield ready
            held.clear()
            has_sound, carry = has_sound or not _is_silent(block.samples), block.carry
    if held:
        last = held[-1]
        yield last._replace(
            samples=last.samples[:0],
            first_sample=held[0].first_sample,
            first_code=held[0].first_code,
            num_codes=0,
            codes=(),
            carry=carry,
        )


def _is_silent(samples: np.ndarray) -> bool:
    """Return whether float32 or 16-bit samples are silence; no samples are."""
    full_scale = 1.0 if samples.dtype == np.float32 else 32768.0
    power = np.square(samples, dtype=np.float64).mean() if len(samples) else 0.0
    return bool(power < (SILENCE_RMS * full_scale) ** 2)
