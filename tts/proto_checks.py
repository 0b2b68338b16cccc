"""Checking what came over the wire: collect every wrong field, then refuse once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from tts.errors import FieldViolation, InvalidRequestError
from tts.speech import MAX_REQUEST_ID, SamplingOverrides
from tts.v1 import common_pb2

REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID}}}")
LANGUAGE_CODE = re.compile(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8}){0,7}")


class Violations:
    """Wrong fields of one request; leaving the block raises them all together.

    An InvalidRequestError raised inside joins them.
    """

    def __init__(self) -> None:
        self.found: list[FieldViolation] = []

    def __enter__(self) -> Violations:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, InvalidRequestError):
            named = {violation.field for violation in self.found}
            more = (violation for violation in error.violations if violation.field not in named)
            raise InvalidRequestError(*self.found, *more) from error
        if error is None and self.found:
            raise InvalidRequestError(*self.found)

    def require(self, holds: bool, field: str, description: str) -> bool:
        """Note a violation unless `holds`; returns `holds`."""
        if not holds:
            self.found.append(FieldViolation(field, description))
        return holds

    def request_id(self, value: str, field: str) -> None:
        """Ids go into logs and metadata, so they are plain."""
        ok = not value or REQUEST_ID.fullmatch(value) is not None
        text = f"must be 1 to {MAX_REQUEST_ID} printable ASCII characters without spaces"
        self.require(ok, field, text)

    def language(self, value: str, field: str) -> None:
        """BCP-47's shape; which languages there are is the voices' matter."""
        ok = not value or LANGUAGE_CODE.fullmatch(value) is not None
        self.require(ok, field, "must be a BCP-47 tag such as en or en-US")

    def one_of(self, value: int, known: Collection[int], field: str) -> bool:
        """Open enums: a number of a newer client's is refused, not guessed."""
        return self.require(value in known, field, f"{value} is not a known value")


@contextmanager
def fields_renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Give violations raised inside the path of this message: prefix of the name → its path."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(*(_renamed(v, names) for v in error.violations)) from error


def _renamed(violation: FieldViolation, names: Mapping[str, str]) -> FieldViolation:
    field = violation.field
    for prefix in sorted(names, key=len, reverse=True):
        if field == prefix or field.startswith(prefix + "."):
            return replace(violation, field=names[prefix] + field[len(prefix) :])
    return violation


def plain_float(value: float) -> float:
    """A `float` field as the decimal number its sender wrote: 0.7, not 0.699999988.

    So the same number gives the same samples over the wire and in process.
    """
    return float(f"{value:.7g}")


def optional_float(message: Message, field: str) -> float | None:
    """A `float` field's number; None when it is not set."""
    return plain_float(getattr(message, field)) if message.HasField(field) else None


def seconds(message: Message, field: str) -> float | None:
    """A Duration field in seconds; None when it is not set."""
    if not message.HasField(field):
        return None
    duration: Duration = getattr(message, field)
    return duration.seconds + duration.nanos / 1e9


def read_sampling(proto: common_pb2.SamplingParams) -> SamplingOverrides:
    """What a request says about sampling; its ranges are checked where it is used."""
    return SamplingOverrides(
        temperature=optional_float(proto, "temperature"),
        top_p=optional_float(proto, "top_p"),
        top_k=proto.top_k if proto.HasField("top_k") else None,
        min_p=optional_float(proto, "min_p"),
        repetition_penalty=optional_float(proto, "repetition_penalty"),
        frequency_penalty=optional_float(proto, "frequency_penalty"),
        presence_penalty=optional_float(proto, "presence_penalty"),
        repetition_window=proto.repetition_window if proto.HasField("repetition_window") else None,
        min_tokens=proto.min_tokens if proto.HasField("min_tokens") else None,
        max_tokens=proto.max_tokens if proto.HasField("max_tokens") else None,
        seed=proto.seed if proto.HasField("seed") else None,
    )
