"""Pause at the end of a sentence's beginning: which blocks are left out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llm import FinishReason
from tts.engine.client import AudioBlock
from tts.speech.pauses import without_last_pause

SIZE = 80


def blocks_of(levels: Sequence[float], reason: FinishReason, *, as_s16: bool) -> list[AudioBlock]:
    """Return blocks of one code each, of which the last has no audio."""
    blocks = []
    for index, level in enumerate((*levels, None)):
        tone = np.full(0 if level is None else SIZE, level or 0.0, np.float32)
        samples = (tone * 32767).astype(np.int16) if as_s16 else tone
        codes = () if level is None else (index,)
        is_last = index == len(levels)
        blocks.append(
            AudioBlock(
                samples,
                index * SIZE,
                index,
                len(codes),
                codes,
                carry=tuple(range(index + len(codes)))[-2:],
                finish_reason=reason if is_last else None,
                output_tokens=index,
            )
        )
    return blocks


async def collected(blocks: Sequence[AudioBlock]) -> list[AudioBlock]:
    async def given() -> AsyncGenerator[AudioBlock, None]:
        for block in blocks:
            yield block

    return [block async for block in without_last_pause(given())]


@given(
    st.lists(st.sampled_from([0.0, 0.001, 0.1]), max_size=8),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED]),
    st.booleans(),
)
def test_silent_blocks_behind_the_last_sound_are_left_out(
    levels: list[float], reason: FinishReason, as_s16: bool
) -> None:
    blocks = blocks_of(levels, reason, as_s16=as_s16)
    heard = asyncio.run(collected(blocks))
    loud = [index for index, level in enumerate(levels) if level > 0.01]
    kept = blocks[: loud[-1] + 1] if loud else blocks[:-1]
    assert [block.codes for block in heard[:-1]] == [block.codes for block in kept]
    assert sum(len(block.samples) for block in heard) == SIZE * len(kept)
    last = heard[-1]
    assert (last.finish_reason, last.codes, last.num_codes) == (reason, (), 0)
    assert last.output_tokens == len(levels)
    assert last.carry == (kept[-1].carry if kept else ())
    assert (last.first_sample, last.first_code) == (SIZE * len(kept), len(kept))


def test_an_error_is_reported_at_once() -> None:
    (*sound, last) = blocks_of([0.1, 0.0], FinishReason.ERROR, as_s16=False)
    heard = asyncio.run(collected([*sound, last._replace(error="the pages burnt")]))
    assert heard[-1].error == "the pages burnt"
