"""Conversions for the messages of both services: checks of fields, sampling, durations, timings.

A check collects every invalid field of a request by its path and then raises one error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from llm import FinishReason
from tts.errors import FieldViolation, InvalidRequestError
from tts.speech.types import MAX_REQUEST_ID, SamplingOverrides
from tts.v1 import common_pb2

Value = TypeVar("Value")

REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID}}}")
SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingOverrides))
FINISH_REASONS: Mapping[FinishReason, common_pb2.FinishReason] = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}
LANGUAGE_CODE = re.compile(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8}){0,7}")


class Violations(list[FieldViolation]):
    """Invalid fields of one request; leaving the block raises one error for all of them.

    The fields of an InvalidRequestError that is raised inside are added to them.
    """

    def __enter__(self) -> Violations:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, InvalidRequestError):
            named = {violation.field for violation in self}
            more = (violation for violation in error.violations if violation.field not in named)
            raise InvalidRequestError(*self, *more) from error
        if error is None and self:
            raise InvalidRequestError(*self)

    def require(self, holds: bool, field: str, description: str) -> bool:
        """Add a violation unless `holds`; return `holds`."""
        if not holds:
            self.append(FieldViolation(field, description))
        return holds

    def request_id(self, value: str, field: str) -> None:
        """Check a request id, which must be valid in logs and metadata."""
        ok = REQUEST_ID.fullmatch(value) is not None
        text = f"must be 1 to {MAX_REQUEST_ID} printable ASCII characters without spaces"
        self.require(ok, field, text)

    def language(self, value: str, field: str) -> None:
        """Check the syntax of a BCP-47 tag; the voices determine the available languages."""
        ok = LANGUAGE_CODE.fullmatch(value) is not None
        self.require(ok, field, "must be a BCP-47 tag such as en or en-US")

    def member(self, number: int, known: Mapping[Any, Value], field: str) -> Value:
        """Return the value of an enum's number.

        An unknown number is a violation; the value of UNSPECIFIED is returned for it.
        """
        self.require(number in known, field, f"{number} is not a known value")
        return known.get(number, known[0])


def plain_float(value: float) -> float:
    """Return a `float` field as the decimal number that its sender wrote: 0.7, not 0.699999988.

    The same number then gives the same samples over the wire and in process.
    """
    return float(f"{value:.7g}")


def optional(message: Message, field: str, default: Any = None) -> Any:
    """Return an optional field's value; `default` when it is unset.

    A `float` is read as `plain_float` does, a Duration in seconds.
    """
    if not message.HasField(field):
        return default
    value = getattr(message, field)
    if isinstance(value, Duration):
        return value.seconds + value.nanos / 1e9
    return plain_float(value) if isinstance(value, float) else value


def given_sampling(proto: common_pb2.SamplingParams) -> dict[str, Any]:
    """Return the fields of `SamplingOverrides` that a request gives, in any range."""
    return {
        field.name: plain_float(value) if isinstance(value, float) else value
        for field, value in proto.ListFields()
        if field.name in SAMPLING_FIELDS
    }


def to_duration(seconds: float | None) -> Duration | None:
    """Return seconds as a Duration; None (unset) for None."""
    if seconds is None:
        return None
    whole, nanos = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)


def to_timings(
    queue_s: float | None,
    prefill_s: float | None,
    total_s: float,
    first_audio_s: float | None = None,
) -> common_pb2.Timings:
    """Return the timings of a request; `first_audio_s` is None for text."""
    return common_pb2.Timings(
        queue=to_duration(queue_s),
        prefill=to_duration(prefill_s),
        time_to_first_audio=to_duration(first_audio_s),
        total=to_duration(total_s),
    )
