"""The index state machine of one request: processed ≤ active_end ≤ end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm.request import FinishReason, Request, SamplingParams, TokenBuffer, TokenChunk
from llm.sequence import Sequence, SequenceStatus, launch_sampling, take_awaited, take_tokens

PAGE_SIZE = 4


def sequence(prompt_len: int = 6, **sampling: object) -> Sequence:
    params = SamplingParams(**({"max_tokens": 4} | sampling))  # type: ignore[arg-type]
    return Sequence(Request("r", tuple(range(1, prompt_len + 1)), params), arrival_s=10.0)


def bound(prompt_len: int = 6, cached: int = 0, **sampling: object) -> Sequence:
    made = sequence(prompt_len, **sampling)
    made.bind(list(range(1, 20)), cached)
    return made


def test_a_prompt_in_chunks_then_decoding() -> None:
    seq = bound(6, cached=1)
    assert (seq.processed, seq.needs_extend, seq.cached_prompt_tokens) == (1, True, 1)
    for num_tokens, still_extends in ((2, True), (3, False)):
        seq.activate(num_tokens)
        seq.check_integrity(PAGE_SIZE)
        seq.advance()
        assert seq.needs_extend is still_extends
    assert seq.accept(50) is None
    assert (seq.tokens[-1], seq.output_ids, seq.processed, seq.end) == (50, [50], 6, 7)
    seq.check_integrity(PAGE_SIZE)


@pytest.mark.parametrize("num_tokens", [0, -1, 7])
def test_feeding_nothing_or_more_than_known_is_an_error(num_tokens: int) -> None:
    with pytest.raises(ValueError, match="cannot feed"):
        bound(6).activate(num_tokens)


def test_an_unfinished_step_can_be_forgotten() -> None:
    seq = bound(6)
    seq.activate(4)
    seq.rewind()
    assert (seq.processed, seq.active_end, seq.in_flight) == (0, 0, False)
    seq.check_integrity(PAGE_SIZE)


def test_preemption_keeps_prompt_length_output_and_counts() -> None:
    seq = bound(6, cached=4, max_tokens=5, min_tokens=3, stop_token_ids=(9,))
    seq.activate(2)
    seq.advance()
    seq.accept(20)
    seq.accept(9)  # a stop id before min_tokens: an ordinary token
    seq.processed = seq.active_end = seq.end - 1
    seq.preempt()
    seq.check_integrity(PAGE_SIZE)
    assert (seq.processed, seq.extend_end, seq.needs_extend) == (0, 8, True)
    assert (seq.prompt_len, seq.output_ids, seq.num_preemptions) == (6, [20, 9], 1)
    seq.bind([1, 2], 0)
    assert seq.cached_prompt_tokens == 4  # of the first prefill
    assert seq.accept(21) is None
    assert seq.accept(9) is FinishReason.STOP  # min_tokens counts from the first token, not again
    assert seq.accept(22) is None
    assert seq.accept(23) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("sampling", "reasons"),
    [
        ({"stop_token_ids": (7,)}, [FinishReason.STOP]),
        ({"stop_token_ids": (7,), "min_tokens": 1}, [None, FinishReason.STOP]),
        ({"stop_token_ids": (7,), "ignore_eos": True}, [None, None, None, FinishReason.LENGTH]),
        ({"max_tokens": 1}, [FinishReason.LENGTH]),
    ],
)
def test_finish_reasons_of_a_sequence(
    sampling: dict[str, object], reasons: list[FinishReason | None]
) -> None:
    seq = bound(6, **sampling)
    assert [seq.accept(7) for _ in reasons] == reasons


def test_the_stop_id_is_not_added() -> None:
    seq = bound(6, stop_token_ids=(7,))
    assert seq.accept(7) is FinishReason.STOP
    assert (seq.end, seq.output_ids) == (6, [])


def test_a_sequence_ends_at_the_length_limit() -> None:
    seq = bound(6, max_tokens=100)
    seq.limit_length(8)
    assert seq.remaining_tokens == 100
    assert seq.accept(7) is None
    assert seq.accept(7) is FinishReason.LENGTH
    assert seq.end == 8


def test_timings_count_from_the_submission() -> None:
    seq = sequence()
    for now in (12.0, 13.0):
        seq.mark_scheduled(now)
    assert (seq.queue_s, seq.prefill_s) == (2.0, None)
    seq.mark_first_token(15.0)
    assert (seq.queue_s, seq.prefill_s) == (2.0, 3.0)


@pytest.mark.parametrize("tokens", [(7,), (9,), (7, 8), (7, 9), (7, 8, 6)])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
@pytest.mark.parametrize("wanted", ["", "cancel_requested", "pause_requested"])
def test_the_short_way_through_a_step_is_the_long_one_or_none(
    tokens: tuple[int, ...], max_tokens: int, wanted: str
) -> None:
    """`take_tokens` against `advance` and `accept`; it skips uncommon cases: a stop id, the last
    token, a full page.
    """

    def decoding() -> Sequence:
        seq = bound(6, max_tokens=max_tokens, stop_token_ids=(9,))
        seq.activate(6)
        seq.status, seq.next_commit = SequenceStatus.DECODING, 8
        if wanted:
            setattr(seq, wanted, True)
        return seq

    short, long = decoding(), decoding()
    before = repr(short)
    chunks, left, gaps = take_tokens([short], {"r": tokens}, 20.0)
    assert sum(times for _, times in gaps) == len(chunks)
    goes_on = 9 not in tokens and max_tokens > len(tokens) and len(tokens) < 3
    assert bool(chunks) is (goes_on and not wanted)
    assert left == ([] if chunks else [0])
    if not chunks:
        assert (repr(short), short.in_flight) == (before, True)
        return
    long.advance()
    assert [long.accept(token) for token in tokens] == [None] * len(tokens)
    long.processed = long.active_end = long.processed + len(tokens) - 1
    assert chunks == [long.chunk(20.0, tokens)]
    assert chunks == [TokenChunk(**chunks[0]._asdict())], "every field is there"
    assert (repr(short), short.tokens, short.in_flight) == (repr(long), long.tokens, False)


@pytest.mark.parametrize("token", [7, 9])
@pytest.mark.parametrize("max_tokens", [2, 3, 9])
@pytest.mark.parametrize("wanted", ["", "cancel_requested", "pause_requested"])
@pytest.mark.parametrize("is_fed_again", [False, True])
def test_the_short_way_through_a_launched_step(
    token: int, max_tokens: int, wanted: str, is_fed_again: bool
) -> None:
    """`launch_sampling` and `take_awaited` against `launch`, `complete_launch` and `accept`."""

    def decoding() -> Sequence:
        seq = bound(6, max_tokens=max_tokens, stop_token_ids=(9,))
        seq.activate(6)
        seq.advance()
        assert seq.accept(5) is None
        seq.token_s, seq.status, seq.next_commit = 1.0, SequenceStatus.DECODING, 8
        seq.activate(1)
        return seq

    short, long = decoding(), decoding()
    if wanted:
        setattr(short, wanted, True)
    before = repr(short)
    goes_on = launch_sampling([short]) == []
    assert goes_on is (max_tokens > 2 and not wanted)
    if not goes_on:
        assert repr(short) == before
        return
    assert launch_sampling([short]) == [0], "it awaits a token already"
    long.launch(True)
    assert repr(short) == repr(long)
    if is_fed_again:
        for seq in (short, long):
            seq.activate(1)
    assert take_awaited([short], [None], 20.0) == ([], [0], [])
    chunks, left, gaps = take_awaited([short], [token], 20.0)
    assert gaps == ([(1.0, 1)] if chunks else [])
    assert bool(chunks) is (token == 7)
    assert left == ([] if chunks else [0])
    if not chunks:
        assert repr(short) == repr(long)
        return
    long.complete_launch()
    assert long.accept(token) is None
    assert chunks == [long.chunk(20.0, (token,))]
    assert (repr(short), short.tokens, short.in_flight) == (
        repr(long),
        long.tokens,
        long.in_flight,
    )


@pytest.mark.parametrize("limit", [0, 1, 2.5, math.inf])
def test_tokens_wait_in_a_buffer_for_others(limit: float) -> None:
    """The chunks have the tokens of those without a buffer, and their last one is the same."""
    seq = bound(6, max_tokens=9)
    seq.activate(6)
    seq.status, seq.next_commit = SequenceStatus.DECODING, 99
    seq.buffer = TokenBuffer(limit)
    sizes, delivered = [], []
    for token in range(10, 15):
        chunks, left, gaps = take_tokens([seq], {"r": (token,)}, 20.0)
        assert (left, gaps[-1][1]) == ([], 1)
        sizes.append(len(chunks))
        delivered += [token for chunk in chunks for token in chunk.token_ids]
        assert [chunk.output_tokens for chunk in chunks] == [len(seq.output_ids)] * len(chunks)
        seq.activate(1)
    assert sizes == {math.inf: [0] * 5, 2.5: [0, 0, 1, 0, 0]}.get(limit, [1] * 5)
    last = seq.chunk(21.0, (99,))
    assert (*delivered, *last.token_ids) == (10, 11, 12, 13, 14, 99)
    assert seq.chunk(21.0).token_ids == (), "each token once"


def test_tokens_of_a_step_wait_in_a_buffer_together() -> None:
    seq = bound(6, max_tokens=9)
    seq.activate(6)
    seq.status, seq.next_commit, seq.buffer = SequenceStatus.DECODING, 99, TokenBuffer(2.5)
    for tokens, delivered in (((10, 11), []), ((12, 13), [(10, 11, 12, 13)])):
        chunks, left, _ = take_tokens([seq], {"r": tokens}, 20.0)
        assert ([chunk.token_ids for chunk in chunks], left) == (delivered, [])
        seq.activate(1)


def test_the_short_way_stops_at_a_full_page() -> None:
    seq = bound(8, max_tokens=9)
    seq.activate(8)
    seq.status, seq.next_commit = SequenceStatus.DECODING, 8
    assert take_tokens([seq], {"r": (7,)}, 20.0) == ([], [0], [])
    assert seq.in_flight


def test_repr_has_indices() -> None:
    assert repr(bound(6, cached=4)) == (
        "Sequence(r pending, processed 4 ≤ active 4 ≤ end 6, 0 generated, 19 pages)"
    )


def test_check_integrity_finds_wrong_indices() -> None:
    seq = bound(6)
    seq.processed = 3
    with pytest.raises(AssertionError, match="out of order"):
        seq.check_integrity(PAGE_SIZE)
    seq = bound(6)
    seq.pages = [1]
    seq.activate(5)
    with pytest.raises(AssertionError, match="too few pages"):
        seq.check_integrity(PAGE_SIZE)
    seq = bound(6)
    seq.tokens.append(3)
    with pytest.raises(AssertionError, match="disagree"):
        seq.check_integrity(PAGE_SIZE)


@given(
    prompt_len=st.integers(1, 12),
    steps=st.lists(st.one_of(st.integers(1, 12), st.just("preempt")), max_size=30),
)
def test_indices_stay_in_order(prompt_len: int, steps: list[int | str]) -> None:
    seq = bound(prompt_len, max_tokens=1000)
    generated = 0
    for step in steps:
        if step == "preempt":
            seq.preempt()
            seq.bind(list(range(1, 40)), 0)
        else:
            assert isinstance(step, int)
            left = seq.extend_end - seq.processed if seq.needs_extend else 1
            seq.activate(min(step, left))
            seq.check_integrity(PAGE_SIZE)
            seq.advance()
            if not seq.needs_extend:
                seq.accept(5)
                generated += 1
        seq.check_integrity(PAGE_SIZE)
        assert (seq.prompt_len, len(seq.output_ids)) == (prompt_len, generated)
