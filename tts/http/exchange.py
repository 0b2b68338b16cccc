"""One HTTP request and its response, as the handlers of endpoints use them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from email.utils import formatdate
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from tts.errors import FieldViolation, InvalidRequestError, MessageTooLargeError
from tts.http.errors import JSON, HttpError, Names, error_of
from tts.server.call import Call
from tts.server.context import ServerContext
from tts.server.status import RpcStatus

if TYPE_CHECKING:
    from tts.http.connection import Connection

MAX_JSON_PARTS = 250_000  # a body of 16 MiB may hold 8 million lists, which take far more memory
LARGE_BYTES = 256 * 1024  # parsing this much takes about a millisecond
EVENT_STREAM = "text/event-stream"
IGNORED_HEADER = "x-ignored-fields"
MAX_IGNORED = 10
PART_BYTES = 64 * 1024  # of a body; the client has the write timeout for each

_PLAIN_NAME = re.compile(r"\w{1,40}", re.ASCII)


class JsonPart(BaseModel):
    """Base of objects inside of a JSON body: types are strict, unknown names have no effect."""

    model_config = ConfigDict(strict=True, frozen=True)


class JsonBody(BaseModel):
    """Base of JSON bodies: types are strict, null means absent, unknown names are kept."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item is not None}


Body = TypeVar("Body", bound=JsonBody)

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""List in JSON. Its first wrong item is reported: 250,000 reports take a second and 300 MiB."""


class Exchange:
    """Request and response of one call. The first write sends the status and the headers."""

    def __init__(self, host: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
        self.host = host
        self.request = Request(scope, receive)
        self.call: Call
        """The call; set before the handler runs."""
        self._data = b""  # the body
        self.headers: dict[str, str] = {}
        """Headers of the response."""
        self.status = 200
        self.writes_errors_as_events = False
        """Whether an error after the first byte is sent as an event and ends the body well."""
        self.is_complete = False
        self._is_started = False
        self.send = send
        """Send one ASGI message."""

    @property
    def connection(self) -> Connection:
        """Return the connection of the request."""
        connection: Connection = self.request.scope["state"]["connection"]
        return connection

    async def receive_body(self, max_bytes: int) -> None:
        """Receive the whole body. Raises MessageTooLargeError for a longer one."""
        stated = self.request.headers.get("content-length", "0")
        self._check_size(int(stated), max_bytes)
        parts: list[bytes] = []
        size, is_last = 0, False
        while not is_last:
            message = await self.request.receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            size += len(message["body"])
            self._check_size(size, max_bytes)
            parts.append(message["body"])
            is_last = not message["more_body"]
        self._data = b"".join(parts)

    def take_body(self) -> bytes:
        """Return the body, once: it is not held while the call waits and runs."""
        data, self._data = self._data, b""
        return data

    @staticmethod
    def _check_size(size: int, max_bytes: int) -> None:
        if size > max_bytes:
            raise MessageTooLargeError.of("", f"the body is larger than {max_bytes} bytes")

    async def json(self, kind: type[Body]) -> Body:
        """Return the body as a checked object. Raises InvalidRequestError with all wrong fields."""
        return await parsed(kind, self.take_body())

    @asynccontextmanager
    async def cancelled_by_disconnect(self) -> AsyncIterator[None]:
        """Cancel the block when the client disconnects before the response is complete."""
        task = asyncio.current_task()
        assert task is not None
        watching = asyncio.create_task(self._watch(task))
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        if not self.is_complete:
            task.cancel()

    async def write(self, data: bytes) -> None:
        """Send bytes of the body; the first ones after status and headers.

        Raises SlowReaderError when the client leaves them unread for too long.
        """
        await self._start(self.call.write)
        for start in range(0, len(data), PART_BYTES):
            part = data[start : start + PART_BYTES]
            await self.call.write(_part(part, is_last=False))

    async def finish(self, last: bytes = b"") -> None:
        """Send the last bytes of the body and its end; raises as `write` does."""
        await self.write(last)
        self.is_complete = True
        await self.call.write(_part(b"", is_last=True))

    def begin_events(self) -> None:
        """Prepare a response of server-sent events."""
        self.headers |= {"content-type": EVENT_STREAM, "cache-control": "no-cache"}
        self.writes_errors_as_events = True

    def name_ignored(self, names: Sequence[str]) -> None:
        """Name fields of the request without an effect in a header of the response."""
        plain = [name for name in names if _PLAIN_NAME.fullmatch(name)]
        if plain:
            self.headers[IGNORED_HEADER] = ", ".join(plain[:MAX_IGNORED])

    async def reply(self, value: Mapping[str, Any]) -> None:
        """Send a JSON object as the whole response."""
        body = msgspec.json.encode(value)
        self.headers |= {"content-type": JSON, "content-length": str(len(body))}
        await self.finish(body)

    async def fail(self, status: RpcStatus, names: Names) -> None:
        """Send an error; after the first byte of the body, break the response off instead."""
        error = error_of(status, names)
        if self._is_started and (self.is_complete or not self.writes_errors_as_events):
            await self.break_off()
            return
        try:
            async with asyncio.timeout(self.host.config.slow_reader_timeout_s):
                await self._fail(error)
        except TimeoutError:
            await self.break_off()

    async def break_off(self) -> None:
        """Close the connection, so that the client sees an incomplete response."""
        self.connection.close()
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    async def _fail(self, error: HttpError) -> None:
        if self._is_started:
            await self.send(_part(event("error", error.value), is_last=True))
            return
        self.status = error.status
        self.headers = {**error.headers, "content-length": str(len(error.body))}
        await self._start(self.send)
        await self.send(_part(error.body, is_last=True))

    async def _start(self, send: Callable[[Message], Awaitable[object]]) -> None:
        if self._is_started:
            return
        self._is_started = True
        self.headers["date"] = formatdate(usegmt=True)
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})


def event(kind: str, value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event of audio as OpenAI sends it: JSON that has its type."""
    return data_event({"type": kind, **value})


def data_event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event: one line of JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _part(data: bytes, *, is_last: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


async def parsed(kind: type[Body], data: bytes) -> Body:
    """Return JSON as a checked object. Raises InvalidRequestError with all wrong fields."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_PARTS:
        raise InvalidRequestError.of("", f"has more than {MAX_JSON_PARTS} values")
    with _named_fields():
        if len(data) < LARGE_BYTES:
            return kind.model_validate_json(data)
        return await asyncio.to_thread(kind.model_validate_json, data)


def validated(kind: type[Body], values: Mapping[str, Any]) -> Body:
    """Return fields as a checked object. Raises InvalidRequestError with all wrong fields."""
    with _named_fields():
        return kind.model_validate(values)


@contextmanager
def _named_fields() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise InvalidRequestError(*_violations(error)) from None


def _violations(error: ValidationError) -> list[FieldViolation]:
    """Return the wrong fields by their names in JSON, each once."""
    found: dict[str, FieldViolation] = {}
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        field = str(item["loc"][0]) if item["loc"] else ""
        found.setdefault(field, FieldViolation(field, item["msg"]))
    return list(found.values())
