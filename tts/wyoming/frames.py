r"""Frames of Wyoming: an event is a line of JSON, its data as JSON, and a binary payload.

    {"type": "synthesize", "data_length": 25}\n{"text": "Good morning."}

The data may also be in the line, under "data"; what follows the line takes precedence. Every
length is checked before its bytes are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tts.config.server import ServerConfig
from tts.errors import IdleTimeoutError, InvalidRequestError
from tts.server.access import ReceiveSlots

MAX_LINE_BYTES = 64 * 1024
BLOCK_BYTES = 64 * 1024  # of input that is skipped
MAX_BYTES_PER_CHARACTER = 12  # in JSON: a surrogate pair as two escapes
DATA_OVERHEAD_BYTES = 4096  # names and values other than the text
NEWLINE = b"\n"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """Event of a client, without its payload."""

    type: str
    data: Mapping[str, Any]


class _Header(msgspec.Struct, frozen=True):
    """Line of an event."""

    type: str
    data: dict[str, Any] | None = None
    data_length: int | None = None
    payload_length: int | None = None


def encode(kind: str, data: Mapping[str, Any] | None = None, payload: bytes = b"") -> bytes:
    """Return the bytes of an event."""
    packed = msgspec.json.encode(data) if data else b""
    header: dict[str, Any] = {"type": kind}
    if packed:
        header["data_length"] = len(packed)
    if payload:
        header["payload_length"] = len(payload)
    return b"".join((msgspec.json.encode(header), NEWLINE, packed, payload))


def decode(data: bytes, kind: type[T]) -> T:
    """Return JSON as a value. Raises InvalidRequestError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError.of("event", f"is no event of Wyoming: {_cause(error)}") from None


def convert(data: Mapping[str, Any], kind: type[T]) -> T:
    """Return an event's data as a value. Raises InvalidRequestError."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError.of("data", str(error)) from None


class EventReader:
    """Reader of one connection's events. `begin` and `read` alternate."""

    def __init__(
        self, reader: asyncio.StreamReader, config: ServerConfig, slots: ReceiveSlots, client: str
    ) -> None:
        self._reader, self._slots, self._client = reader, slots, client
        self._timeout_s = config.receive_timeout_s
        text_bytes = MAX_BYTES_PER_CHARACTER * config.max_text_characters
        self._max_skipped = config.max_message_bytes
        self._max_data = min(text_bytes + DATA_OVERHEAD_BYTES, config.max_message_bytes)
        self._first = b""

    async def begin(self) -> bool:
        """Wait for the first byte of an event; return False at the end of the connection."""
        try:
            self._first = await self._reader.read(1)
        except OSError:
            return False
        return bool(self._first)

    async def read(self, is_used: Callable[[str], bool]) -> Event | None:
        """Return the event that has begun; None when the connection ends first.

        Data of a type that is not used are skipped, and all payloads. Raises InvalidRequestError
        for malformed or too large events, and IdleTimeoutError for one that does not arrive in
        time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._event(is_used)
        except TimeoutError:
            raise IdleTimeoutError(
                f"the event was not complete within {self._timeout_s:g} s; send it at once"
            ) from None
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def _event(self, is_used: Callable[[str], bool]) -> Event:
        header = decode(await self._line(), _Header)
        data = header.data or {}
        if is_used(header.type):
            length = _checked("data_length", header.data_length, self._max_data)
            if length:
                data = data | decode(await self._data(length), dict[str, Any])
        else:
            await self._skip(_checked("data_length", header.data_length, self._max_skipped))
        await self._skip(_checked("payload_length", header.payload_length, self._max_skipped))
        return Event(header.type, data)

    async def _line(self) -> bytes:
        if self._first == NEWLINE:
            return self._first
        try:
            return self._first + await self._reader.readuntil(NEWLINE)
        except asyncio.LimitOverrunError:
            raise InvalidRequestError.of(
                "event", f"has a line of more than {MAX_LINE_BYTES} bytes; use data_length"
            ) from None

    async def _data(self, length: int) -> bytes:
        """Return the next bytes; more than a line may have are received in a slot."""
        async with AsyncExitStack() as held:
            if length > MAX_LINE_BYTES:
                await held.enter_async_context(self._slots.slot(self._client, self._timeout_s))
            return await self._reader.readexactly(length)

    async def _skip(self, length: int) -> None:
        while length:
            block = await self._reader.read(min(length, BLOCK_BYTES))
            if not block:
                raise asyncio.IncompleteReadError(b"", length)
            length -= len(block)


def _checked(field: str, length: int | None, limit: int) -> int:
    if not 0 <= (length or 0) <= limit:
        raise InvalidRequestError.of(field, f"is not in [0, {limit}]")
    return length or 0


def _cause(error: Exception) -> str:
    """Return the reason without the input's text."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
