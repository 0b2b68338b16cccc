"""Worked examples of streaming windows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest

from decoder import (
    CodecSpec,
    DecodeRequest,
    DecoderStream,
    DecodeWindow,
    PrependPromptSpeechTokens,
    StreamingOptions,
    render,
)
from decoder.codecs.ramp import RampDecoder
from tests.decoder.toys import cut

SPEC = CodecSpec(
    "ramp", sample_rate=2500, samples_per_code=Fraction(100), codebook_size=400, receptive_field=0
)
FIRST = {"s": 0, "p": 100, "c": 200}  # s3 is code 3, p1 is code 101, c4 is code 204
NUM_CODES = 11
EMITTED = [(0, 199), (200, 499), (500, 899), (900, 1099)]

NEVER = PrependPromptSpeechTokens.NEVER
ONCE = PrependPromptSpeechTokens.ONCE
ROLLING = PrependPromptSpeechTokens.ROLLING


@dataclass(frozen=True, slots=True)
class Example:
    """One example: per block "context · current", and the number of skipped samples of the
    window.
    """

    mode: PrependPromptSpeechTokens
    buffer: int
    windows: tuple[str, ...]
    skips: tuple[int, ...]
    prompt_len: int = 3
    carry_len: int | None = None
    sizes: tuple[int, ...] | None = (2, 3, 4)


EXAMPLES = {
    1: Example(
        NEVER,
        0,
        ("· s0 s1", "· s2 s3 s4", "· s5 s6 s7 s8", "· s9 s10"),
        (0, 0, 0, 0),
    ),
    2: Example(
        NEVER,
        2,
        ("· s0 s1", "s0 s1 · s2 s3 s4", "s3 s4 · s5 s6 s7 s8", "s7 s8 · s9 s10"),
        (0, 200, 200, 200),
    ),
    3: Example(
        ONCE,
        4,
        (
            "p0 p1 p2 · s0 s1",
            "s0 s1 · s2 s3 s4",
            "s1 s2 s3 s4 · s5 s6 s7 s8",
            "s5 s6 s7 s8 · s9 s10",
        ),
        (300, 200, 400, 400),
    ),
    4: Example(
        ROLLING,
        4,
        (
            "p0 p1 p2 · s0 s1",
            "p1 p2 s0 s1 · s2 s3 s4",
            "s1 s2 s3 s4 · s5 s6 s7 s8",
            "s5 s6 s7 s8 · s9 s10",
        ),
        (300, 400, 400, 400),
    ),
    5: Example(
        ROLLING,
        2,
        ("p0 p1 p2 · s0 s1", "s0 s1 · s2 s3 s4", "s3 s4 · s5 s6 s7 s8", "s7 s8 · s9 s10"),
        (300, 200, 200, 200),
    ),
    6: Example(
        ROLLING,
        4,
        (
            "p0 p1 p2 p3 p4 p5 · s0 s1",
            "p4 p5 s0 s1 · s2 s3 s4",
            "s1 s2 s3 s4 · s5 s6 s7 s8",
            "s5 s6 s7 s8 · s9 s10",
        ),
        (600, 400, 400, 400),
        prompt_len=6,
    ),
    7: Example(
        ROLLING,
        4,
        (
            "c1 c2 c3 c4 · s0 s1",
            "c3 c4 s0 s1 · s2 s3 s4",
            "s1 s2 s3 s4 · s5 s6 s7 s8",
            "s5 s6 s7 s8 · s9 s10",
        ),
        (400, 400, 400, 400),
        carry_len=5,
    ),
    8: Example(
        ROLLING,
        4,
        (
            "p0 p1 p2 c0 · s0 s1",
            "p2 c0 s0 s1 · s2 s3 s4",
            "s1 s2 s3 s4 · s5 s6 s7 s8",
            "s5 s6 s7 s8 · s9 s10",
        ),
        (400, 400, 400, 400),
        carry_len=1,
    ),
    9: Example(
        ONCE,
        4,
        (
            "c0 · s0 s1",
            "c0 s0 s1 · s2 s3 s4",
            "s1 s2 s3 s4 · s5 s6 s7 s8",
            "s5 s6 s7 s8 · s9 s10",
        ),
        (100, 300, 400, 400),
        carry_len=1,
    ),
    10: Example(
        ROLLING,
        4,
        ("p0 p1 p2 · s0 s1 s2 s3 s4 s5 s6 s7 s8 s9 s10",),
        (300,),
        sizes=None,
    ),
}


def codes_named(names: str) -> tuple[int, ...]:
    return tuple(FIRST[name[0]] + int(name[1:]) for name in names.split())


def windows_of_example(example: Example) -> list[DecodeWindow]:
    carry_len = example.carry_len
    stream = DecoderStream(
        SPEC,
        StreamingOptions(example.sizes, example.buffer, prepend=example.mode),
        prompt_codes=[FIRST["p"] + j for j in range(example.prompt_len)],
        carry=None if carry_len is None else [FIRST["c"] + j for j in range(carry_len)],
    )
    return [*stream.push(range(NUM_CODES)), *stream.finish()]


@pytest.fixture(params=EXAMPLES, ids=lambda number: f"example{number}")
def example(request: pytest.FixtureRequest) -> Example:
    return EXAMPLES[request.param]


def test_windows(example: Example) -> None:
    windows = windows_of_example(example)
    assert len(windows) == len(example.windows)
    for window, text in zip(windows, example.windows, strict=True):
        context, current = text.split("·")
        assert window.codes == codes_named(context) + codes_named(current)
        assert window.prompt_len == context.count("p")
        assert window.prompt_len + window.history_len == len(context.split())
        assert len(window.codes) == len(window.positions) == len(window.block_ids)


def test_skipped_samples(example: Example) -> None:
    assert tuple(w.skip_samples for w in windows_of_example(example)) == example.skips


def test_emitted_samples(example: Example) -> None:
    emitted = [
        (window.first_sample, window.first_sample + window.num_samples - 1)
        for window in windows_of_example(example)
    ]
    assert emitted == ([(0, 1099)] if example.sizes is None else EMITTED)


def test_positions_are_absolute(example: Example) -> None:
    """Own code t is at t, carried c[j] at j - C, prompt p[j] before the carry."""
    carry_len = example.carry_len or 0
    origin = {
        "s": 0,
        "c": -carry_len,
        "p": -carry_len - example.prompt_len,
    }
    for window, text in zip(windows_of_example(example), example.windows, strict=True):
        names = text.replace("·", "").split()
        assert window.positions == tuple(origin[n[0]] + int(n[1:]) for n in names)


def test_block_ids(example: Example) -> None:
    block_of_code = [block.number for block in cut(range(11), example.sizes) for _ in block.codes]
    for window, text in zip(windows_of_example(example), example.windows, strict=True):
        own = [n for n in text.replace("·", "").split() if n[0] != "p"]
        expected = [block_of_code[int(n[1:])] if n[0] == "s" else -1 for n in own]
        assert list(window.block_ids[window.prompt_len :]) == expected
        assert all(block < min(expected) for block in window.block_ids[: window.prompt_len])


def test_the_audio_is_the_same_in_every_row_with_the_same_positions(example: Example) -> None:
    """Only the window differs: a codec without relations between codes gives the same samples."""
    decoder = RampDecoder(SPEC)
    audio = [
        sample
        for window in windows_of_example(example)
        for sample in render(decoder, [DecodeRequest(window)])[0]
    ]
    stream = DecoderStream(SPEC, StreamingOptions())
    assert stream.push(range(NUM_CODES)) == []
    (whole,) = stream.finish()
    assert audio == list(decoder.decode([whole])[0].numpy())
