"""Delays of codebooks, position by position."""

from __future__ import annotations

import pytest

from llm.delays import FREE, FrameDelays
from llm.request import FrameShape

B, E = 8, 9
X, Y, Z = (0, 1, 2), (3, 4, 5), (6, 7, 1)
STAIRS = FrameDelays((0, 1, 2), B, E)
LATER = FrameDelays((1, 2, 3), B, E)
UNEVEN = FrameDelays((0, 3, 1), B, E)


def test_a_recording_is_delayed() -> None:
    assert STAIRS.delayed([X, Y]) == ((0, B, B), (3, 1, B), (E, 4, 2), (E, E, 5), (E, E, E))
    assert LATER.delayed([X]) == ((B, B, B), (0, B, B), (E, 1, B), (E, E, 2), (E, E, E))
    assert UNEVEN.delayed([X, Y, Z]) == (
        (0, B, B),
        (3, B, 2),
        (6, B, 5),
        (E, 1, 1),
        (E, 4, E),
        (E, 7, E),
        (E, E, E),
    )
    assert STAIRS.delayed([]) == ((E, B, B), (E, E, B), (E, E, E))


@pytest.mark.parametrize("delays", [STAIRS, LATER, UNEVEN])
def test_a_frame_is_whole_with_its_last_code(delays: FrameDelays) -> None:
    positions, length = delays.delayed([X, Y, Z]), delays.longest + 1
    found = [delays.aligned(positions[first : first + length]) for first in range(3)]
    assert found == [X, Y, Z]


@pytest.mark.parametrize("delays", [STAIRS, LATER, UNEVEN])
@pytest.mark.parametrize("frames", [[], [X], [X, Y, Z, Y, X]])
def test_forced_codes_are_those_of_a_recording(
    delays: FrameDelays, frames: list[tuple[int, ...]]
) -> None:
    """Whatever is forced is what a recording has; the model chooses the codes of its frames."""
    positions = delays.delayed(frames)
    for count, wanted in enumerate(positions):
        for codebook, code in enumerate(delays.forced(positions[:count])):
            is_frame = 0 <= count - delays.table[codebook] < len(frames)
            assert code in ((FREE,) if is_frame else (FREE, wanted[codebook]))
            if count < delays.table[codebook]:
                assert code == B


def test_codebooks_run_out_in_the_order_of_their_delays() -> None:
    """From the first end code on, in whichever codebook it is."""
    assert UNEVEN.forced([X, X, X, X]) == (FREE, FREE, FREE)
    assert UNEVEN.forced([X, X, X, (E, 1, 2)]) == (E, FREE, E)
    assert UNEVEN.forced([X, X, X, (0, 1, E), (E, 3, E)]) == (E, FREE, E)
    assert UNEVEN.forced([X, X, (0, 1, E), (E, 3, E), (E, 4, E)]) == (E, E, E)
    assert UNEVEN.forced([X, X, X, (E, 1, 2)], ends=False) == (FREE, FREE, FREE)
    assert LATER.forced([X, X, X, (E, 1, 2)]) == (E, FREE, FREE)
    assert LATER.forced([X, X, X, (E, 1, 2), (E, 5, 2), (E, E, 2)]) == (E, E, E)


@pytest.mark.parametrize("table", [(), (0, 0), (1, -1)])
def test_a_table_has_delays(table: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"delays .* must be 0 or more"):
        FrameDelays(table, B, E)


@pytest.mark.parametrize(("count", "end"), [(2, (E, E)), (4, (E, E, E, E)), (3, (E, E, B))])
def test_delays_fit_the_frames(count: int, end: tuple[int, ...]) -> None:
    FrameShape(3, 10, 5, (E, E, E), delays=STAIRS)
    with pytest.raises(ValueError, match=f"{count} codebooks that end with"):
        FrameShape(count, 10, 5, end, delays=STAIRS)
