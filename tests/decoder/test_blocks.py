"""`DecoderStream`: when the blocks of a stream are ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder import CodecSpec, DecoderConfigError, DecoderStream, DecodeWindow, StreamingOptions
from tests.decoder.toys import Block, cut

SIZES = (2, 3, 4)
SPEC = CodecSpec("toy", sample_rate=1000, samples_per_code=Fraction(10), codebook_size=500)


def stream_of(
    sizes: tuple[int, ...] | None, look_ahead: int = 0, first_look_ahead: int | None = None
) -> DecoderStream:
    options = StreamingOptions(sizes, look_ahead=look_ahead, first_look_ahead=first_look_ahead)
    return DecoderStream(SPEC, options)


def blocks(windows: Sequence[DecodeWindow]) -> list[Block]:
    """Return what the windows emit, and their look-ahead."""
    return [
        Block(
            window.block,
            window.block_ids[-1 - window.future_len],
            window.codes[len(window.codes) - window.future_len :],
        )
        for window in windows
    ]


def test_a_block_fires_with_its_last_code() -> None:
    stream = stream_of(SIZES)
    fired = [blocks(stream.push([code])) for code in range(11)]
    assert [(i, found[0].codes) for i, found in enumerate(fired) if found] == [
        (1, (0, 1)),
        (4, (2, 3, 4)),
        (8, (5, 6, 7, 8)),
    ]
    assert blocks(stream.finish()) == [Block((9, 10), 3)]


def test_the_first_block_of_one_code_leaves_with_the_first_code() -> None:
    assert blocks(stream_of((1, 4)).push([7])) == [Block((7,), 0)]


def test_several_blocks_may_fire_at_once_and_later_codes_wait() -> None:
    """One code arrives in the first turn, ten in the second."""
    stream = stream_of(SIZES)
    assert stream.push([0]) == []
    assert blocks(stream.push(range(1, 11))) == [
        Block((0, 1), 0),
        Block((2, 3, 4), 1),
        Block((5, 6, 7, 8), 2),
    ]
    assert stream.num_codes == 9
    assert blocks(stream.finish()) == [Block((9, 10), 3)]


def test_the_last_size_repeats() -> None:
    found = blocks(stream_of((1, 2)).push(range(7)))
    assert [block.codes for block in found] == [(0,), (1, 2), (3, 4), (5, 6)]


def test_without_sizes_everything_is_one_block_at_the_end() -> None:
    stream = stream_of(None)
    assert stream.push(range(500)) == []
    assert blocks(stream.finish()) == [Block(tuple(range(500)), 0)]


def test_a_full_last_block_is_not_held_back() -> None:
    """The end of the stream adds no block when the last one is complete."""
    stream = stream_of((2, 3))
    assert [block.codes for block in blocks(stream.push(range(5)))] == [(0, 1), (2, 3, 4)]
    assert stream.finish() == []


@pytest.mark.parametrize("sizes", [SIZES, None])
def test_a_stream_without_codes_has_no_block(sizes: tuple[int, ...] | None) -> None:
    assert stream_of(sizes).finish() == []


def test_pushing_after_the_end_is_refused() -> None:
    stream = stream_of(SIZES)
    stream.push([1])
    assert blocks(stream.finish()) == [Block((1,), 0)]
    assert stream.finish() == []
    with pytest.raises(ValueError, match="after the end"):
        stream.push([2])


@pytest.mark.parametrize("sizes", [(), (0,), (3, -1)])
def test_sizes_are_positive(sizes: tuple[int, ...]) -> None:
    with pytest.raises(DecoderConfigError, match="chunk_size"):
        stream_of(sizes)


def test_num_missing_counts_the_codes_until_the_next_block() -> None:
    stream = stream_of((3, 4), look_ahead=2)
    assert stream.num_missing == 5
    stream.push(range(3))
    assert stream.num_missing == 2
    stream.push(range(3, 6))  # fires the first block; three codes wait for a second of four
    assert stream.num_missing == 3
    assert stream_of(None).num_missing == float("inf")


def test_a_block_waits_for_its_look_ahead() -> None:
    stream = stream_of((2, 3), look_ahead=2)
    assert stream.push([0, 1, 2]) == []
    assert blocks(stream.push([3])) == [Block((0, 1), 0, future=(2, 3))]
    assert stream.push([4, 5]) == []
    assert blocks(stream.finish()) == [
        Block((2, 3, 4), 1, future=(5,)),
        Block((5,), 2, future=()),
    ]


def test_the_first_block_may_wait_for_less() -> None:
    stream = stream_of((2, 3), look_ahead=2, first_look_ahead=1)
    assert stream.push([0, 1]) == []
    assert blocks(stream.push([2])) == [Block((0, 1), 0, future=(2,))]
    assert stream.push([3, 4]) == []
    assert blocks(stream.push([5])) == [Block((2, 3, 4), 1, future=(5,))]


@pytest.mark.parametrize(("carry", "num_needed"), [(None, 3), ((), 3), ((7,), 4)])
def test_a_stream_that_continues_speech_waits_for_the_whole_look_ahead(
    carry: tuple[int, ...] | None, num_needed: int
) -> None:
    """Only a stream without earlier codes has a first block that is awaited."""
    options = StreamingOptions((2, 3), 1, look_ahead=2, first_look_ahead=1)
    assert DecoderStream(SPEC, options, carry=carry).num_missing == num_needed


def test_the_look_ahead_grows_in_steps_after_the_first_block() -> None:
    """The look-ahead grows by one first block for every three of them: here 2 codes for 6."""
    options = StreamingOptions((2, 2, 4), look_ahead=5, first_look_ahead=1)
    stream = DecoderStream(SPEC, options)
    fired = [(code, window) for code in range(25) for window in stream.push([code])]
    assert [(code, window.positions[0], window.future_len) for code, window in fired] == [
        (2, 0, 1),
        (4, 2, 1),
        (8, 4, 1),
        (14, 8, 3),
        (20, 12, 5),
        (24, 16, 5),
    ]
    assert [window.future_len for _, window in fired] == [
        options.look_ahead_of(n) for n in range(6)
    ]


def test_a_block_looks_ahead_no_further_than_it_reaches_beyond_the_silence() -> None:
    """A stream that continues speech has no silence at its start."""
    options = StreamingOptions((3, 4, 8), look_ahead=5, silent_codes=4)
    assert [options.look_ahead_of(n) for n in range(4)] == [0, 3, 5, 5]
    stream = DecoderStream(SPEC, options)
    fired = [(code, w.future_len) for code in range(21) for w in stream.push([code])]
    assert fired == [(2, 0), (9, 3), (19, 5)]
    whole = StreamingOptions((25,), look_ahead=5, silent_codes=4)
    assert DecoderStream(SPEC, whole).num_missing == 30
    assert DecoderStream(SPEC, replace(options, buffer=1), carry=(7,)).num_missing == 8


def test_codes_of_an_incomplete_frame_are_dropped() -> None:
    spec = CodecSpec("toy", 1000, Fraction(10), codebook_size=64, layout=(0, 1, 2, 2, 1, 2, 2))
    stream = DecoderStream(spec, StreamingOptions((7,), look_ahead=7))
    assert blocks(stream.push(range(18))) == [Block(tuple(range(7)), 0, tuple(range(7, 14)))]
    assert blocks(stream.finish()) == [Block(tuple(range(7, 14)), 1)]
    assert stream.num_codes == 14


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
    first = None if first is None else min(first, look_ahead)
    in_turns = stream_of(sizes, look_ahead, first)
    got: list[DecodeWindow] = []
    start = 0
    while start < len(codes):
        step = data.draw(st.integers(1, 15))
        got += in_turns.push(codes[start : start + step])
        start += step
    got += in_turns.finish()
    assert blocks(got) == cut(codes, sizes, look_ahead, first)
