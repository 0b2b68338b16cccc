"""The chunker: when the blocks of a stream are ready."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder import SpeechChunk, StreamingOptions
from tts.engine.chunker import SpeechChunker

SIZES = (2, 3, 4)


def test_a_block_fires_with_its_last_code() -> None:
    chunker = SpeechChunker(SIZES)
    fired = [chunker.push([code]) for code in range(11)]
    assert [(i, chunks[0].codes) for i, chunks in enumerate(fired) if chunks] == [
        (1, (0, 1)),
        (4, (2, 3, 4)),
        (8, (5, 6, 7, 8)),
    ]
    assert chunker.finish() == [SpeechChunk((9, 10), first_code=9, block_index=3)]


def test_the_first_block_of_one_code_leaves_with_the_first_code() -> None:
    assert SpeechChunker((1, 4)).push([7]) == [SpeechChunk((7,), 0, 0)]


def test_several_blocks_may_fire_at_once_and_later_codes_wait() -> None:
    """One code arrives in the first turn, ten in the second."""
    chunker = SpeechChunker(SIZES)
    assert chunker.push([0]) == []
    assert chunker.push(range(1, 11)) == [
        SpeechChunk((0, 1), 0, 0),
        SpeechChunk((2, 3, 4), 2, 1),
        SpeechChunk((5, 6, 7, 8), 5, 2),
    ]
    assert (chunker.num_codes, chunker.decoded_index) == (11, 9)
    assert chunker.finish() == [SpeechChunk((9, 10), 9, 3)]


def test_the_last_size_repeats() -> None:
    chunker = SpeechChunker((1, 2))
    assert [chunk.codes for chunk in chunker.push(range(7))] == [(0,), (1, 2), (3, 4), (5, 6)]


def test_without_sizes_everything_is_one_block_at_the_end() -> None:
    chunker = SpeechChunker(None)
    assert chunker.push(range(500)) == []
    assert chunker.finish() == [SpeechChunk(tuple(range(500)), 0, 0)]


def test_a_full_last_block_is_not_held_back() -> None:
    """The end of the stream adds no block when the last one is complete."""
    chunker = SpeechChunker((2, 3))
    assert [chunk.codes for chunk in chunker.push(range(5))] == [(0, 1), (2, 3, 4)]
    assert chunker.finish() == []


@pytest.mark.parametrize("sizes", [SIZES, None])
def test_a_stream_without_codes_has_no_block(sizes: tuple[int, ...] | None) -> None:
    assert SpeechChunker(sizes).finish() == []


def test_pushing_after_the_end_is_refused() -> None:
    chunker = SpeechChunker(SIZES)
    chunker.push([1])
    assert [chunk.codes for chunk in chunker.finish()] == [(1,)]
    assert chunker.finish() == []
    with pytest.raises(ValueError, match="after the end"):
        chunker.push([2])


@pytest.mark.parametrize("sizes", [(), (0,), (3, -1)])
def test_sizes_are_positive(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="positive"):
        SpeechChunker(sizes)


def test_num_missing_counts_the_codes_until_the_next_block() -> None:
    chunker = SpeechChunker((3, 4), look_ahead=2)
    assert chunker.num_missing == 5
    chunker.push(range(3))
    assert chunker.num_missing == 2
    chunker.push(range(3, 6))  # fires the first block; three codes wait for a second of four
    assert chunker.num_missing == 3
    assert SpeechChunker(None).num_missing == float("inf")


def test_repr_shows_the_position() -> None:
    chunker = SpeechChunker(SIZES)
    chunker.push(range(3))
    assert repr(chunker) == "SpeechChunker(blocks=1, decoded=2, waiting=1, finished=False)"


def test_a_block_waits_for_its_look_ahead() -> None:
    chunker = SpeechChunker((2, 3), look_ahead=2)
    assert chunker.push([0, 1, 2]) == []
    assert chunker.push([3]) == [SpeechChunk((0, 1), 0, 0, future=(2, 3))]
    assert chunker.push([4, 5]) == []
    assert chunker.finish() == [
        SpeechChunk((2, 3, 4), 2, 1, future=(5,)),
        SpeechChunk((5,), 5, 2, future=()),
    ]


def test_the_first_block_may_wait_for_less() -> None:
    chunker = SpeechChunker((2, 3), look_ahead=2, first_look_ahead=1)
    assert chunker.push([0, 1]) == []
    assert chunker.push([2]) == [SpeechChunk((0, 1), 0, 0, future=(2,))]
    assert chunker.push([3, 4]) == []
    assert chunker.push([5]) == [SpeechChunk((2, 3, 4), 2, 1, future=(5,))]


def test_the_look_ahead_grows_in_steps_after_the_first_block() -> None:
    """The look-ahead grows by one first block for every three of them: here 2 codes for 6."""
    options = StreamingOptions((2, 2, 4), look_ahead=5, first_look_ahead=1)
    chunker = SpeechChunker(options.chunk_sizes, look_ahead=5, first_look_ahead=1)
    fired = [(code, block) for code in range(25) for block in chunker.push([code])]
    assert [(code, block.first_code, len(block.future)) for code, block in fired] == [
        (2, 0, 1),
        (4, 2, 1),
        (8, 4, 1),
        (14, 8, 3),
        (20, 12, 5),
        (24, 16, 5),
    ]
    assert [len(block.future) for _, block in fired] == [options.look_ahead_of(n) for n in range(6)]


def test_codes_of_an_incomplete_frame_are_dropped() -> None:
    chunker = SpeechChunker((7,), look_ahead=7, codes_per_frame=7)
    assert chunker.push(range(18)) == [SpeechChunk(tuple(range(7)), 0, 0, tuple(range(7, 14)))]
    assert chunker.finish() == [SpeechChunk(tuple(range(7, 14)), 7, 1)]
    assert (chunker.num_codes, chunker.decoded_index) == (14, 14)


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 99), max_size=60),
    st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    st.integers(0, 8),
    st.none() | st.integers(0, 8),
    st.data(),
)
def test_blocks_do_not_depend_on_how_codes_arrive(codes, sizes, look_ahead, first, data) -> None:
    """The blocks are the same for any number of steps per turn."""
    one_by_one = SpeechChunker(sizes, look_ahead=look_ahead, first_look_ahead=first)
    in_turns = SpeechChunker(sizes, look_ahead=look_ahead, first_look_ahead=first)
    expected = [chunk for code in codes for chunk in one_by_one.push([code])]
    expected += one_by_one.finish()
    got: list[SpeechChunk] = []
    start = 0
    while start < len(codes):
        step = data.draw(st.integers(1, 15))
        got += in_turns.push(codes[start : start + step])
        start += step
    got += in_turns.finish()
    assert got == expected
    assert [code for chunk in got for code in chunk.codes] == codes
