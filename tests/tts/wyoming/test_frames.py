"""Frames: what is read, and what is refused before its bytes are."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.tts.serving import run
from tts.config.server import ServerConfig
from tts.errors import IdleTimeoutError, InvalidRequestError, TTSError
from tts.server.access import ReceiveSlots
from tts.wyoming.frames import MAX_LINE_BYTES, Event, EventReader, encode

CONFIG = ServerConfig(max_text_characters=10_000, receive_timeout_s=0.05)
MAX_DATA = 12 * 10_000 + 4096


async def read_all(*blocks: bytes, ends: bool = True, num_slots: int = 1) -> list[Event]:
    """Return the events of a connection that sends these blocks."""
    stream = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    for block in blocks:
        stream.feed_data(block)
    if ends:
        stream.feed_eof()
    slots = ReceiveSlots(num_slots)
    reader = EventReader(stream, CONFIG, slots, "ipv4:127.0.0.1")
    events = []
    while await reader.begin():
        event = await reader.read(lambda kind: kind != "skipped")
        if event is None:
            break
        events.append(event)
    slots.check_integrity()
    return events


def refusal(*blocks: bytes) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        run(read_all(*blocks, ends=False))
    return str(caught.value)


def test_events_round_trip() -> None:
    sent = [Event("describe", {}), Event("synthesize", {"text": "Größe 🙂", "voice": None})]
    blocks = [encode(event.type, event.data) for event in sent]
    assert run(read_all(*blocks)) == sent
    assert run(read_all(b"".join(blocks))) == sent
    assert run(read_all(*(bytes((byte,)) for byte in b"".join(blocks)))) == sent


def test_data_after_the_line_takes_precedence() -> None:
    line = b'{"type": "t", "data": {"a": 1, "b": 1}, "data_length": 8}\n{"b": 2}'
    assert run(read_all(line)) == [Event("t", {"a": 1, "b": 2})]


def test_a_payload_follows_the_data() -> None:
    assert encode("t", {"a": 1}, b"xyz") == (
        b'{"type":"t","data_length":7,"payload_length":3}\n{"a":1}xyz'
    )


def test_payloads_and_data_of_other_events_are_skipped() -> None:
    skipped = encode("skipped", {"a": "b" * 200_000}, bytes(200_000))
    used = encode("used", {"a": 1}, bytes(100))
    assert run(read_all(skipped, used)) == [Event("skipped", {}), Event("used", {"a": 1})]


@pytest.mark.parametrize("length", [MAX_LINE_BYTES, MAX_LINE_BYTES + 1, MAX_DATA])
def test_long_data_are_read_in_a_slot(length: int) -> None:
    data = b'{"text": "' + b"a" * (length - 12) + b'"}'
    block = b'{"type": "t", "data_length": %d}\n' % length + data
    ((event),) = run(read_all(block))
    assert len(event.data["text"]) == length - 12
    if length > MAX_LINE_BYTES:
        with pytest.raises(IdleTimeoutError):
            run(read_all(block, num_slots=0))


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (b"\n", "truncated"),
        (b"GET / HTTP/1.1\r\n", "malformed"),
        (b"[]\n", "Expected `object`, got `array`"),
        (b"{}\n", "missing required field `type`"),
        (b'{"type": 1}\n', "Expected `str`"),
        (b'{"type": "t", "data": []}\n', "Expected `object | null`"),
        (b'{"type": "t", "data_length": "8"}\n', "Expected `int | null`"),
        (b'{"type": "t", "data_length": 1.5}\n', "Expected `int | null`"),
        (b'{"type": "\xff"}\n', "not UTF-8"),
        (b'{"type": "t", "data": ' + b'{"a": ' * 5_000 + b"\n", "nested too deeply"),
        (b"a" * (2 * MAX_LINE_BYTES), f"more than {MAX_LINE_BYTES} bytes"),
        (b'{"type": "t", "data_length": 2}\n[]', "got `array`"),
        (b'{"type": "t", "data_length": 12}\n{"a": "\xff\xff\xff"}', "not UTF-8"),
        (b'{"type": "t", "data_length": 15}\n{"a": "\\ud800"}', "event"),
        (b'{"type": "t", "data_length": -1}\n', f"data_length: is not in [0, {MAX_DATA}]"),
        (
            b'{"type": "t", "data_length": %d}\n' % (MAX_DATA + 1),
            f"data_length: is not in [0, {MAX_DATA}]",
        ),
        (
            b'{"type": "skipped", "data_length": %d}\n' % 2**40,
            f"data_length: is not in [0, {16 * 2**20}]",
        ),
        (
            b'{"type": "t", "payload_length": %d}\n' % 2**70,
            f"payload_length: is not in [0, {16 * 2**20}]",
        ),
    ],
)
def test_malformed_and_large_events_are_refused(block: bytes, reason: str) -> None:
    assert reason in refusal(block)


def test_a_refusal_has_nothing_of_the_input() -> None:
    assert "secret" not in refusal(b'{"type": "secret", "data_length": "secret"}\n')
    assert "secret" not in refusal(b'{"type": "t", "data_length": 10}\n"secret" x')


@pytest.mark.parametrize(
    "block",
    [
        b'{"type": "t"',
        b'{"type": "t", "data_length": 100}\n{"a": ',
        b'{"type": "t", "payload_length": 100}\nabc',
        b'{"type": "skipped", "data_length": 100000}\n' + bytes(70_000),
    ],
)
def test_an_unfinished_event(block: bytes) -> None:
    """It has a time limit; at the end of the connection it is no event."""
    assert run(read_all(block)) == []
    with pytest.raises(IdleTimeoutError, match=r"within 0\.05 s"):
        run(read_all(block, ends=False))


FRAMES = st.builds(
    encode,
    st.sampled_from(["synthesize", "skipped"]),
    st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=3),
    st.binary(max_size=9),
)


@given(st.lists(st.one_of(FRAMES, st.binary(max_size=40)), max_size=4), st.data())
@example([b'{"type":"t","data":{"a":1e999}}\n'], None)
def test_any_bytes_are_events_or_a_refusal(blocks: list[bytes], data: st.DataObject | None) -> None:
    sent = bytearray(b"".join(blocks))
    if data is not None and sent and data.draw(st.booleans()):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        events = run(read_all(bytes(sent)))
    except TTSError:
        return
    assert all(isinstance(event, Event) for event in events)
