"""Statuses of calls as HTTP responses in OpenAI's shape: one table from gRPC codes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo

from tts.server.call import REQUEST_ID_KEY
from tts.server.status import RpcStatus

JSON = "application/json"

_Code = grpc.StatusCode
_INVALID, _SERVER = "invalid_request_error", "server_error"

STATUSES: Mapping[grpc.StatusCode, tuple[int, str]] = {
    _Code.CANCELLED: (499, _INVALID),
    _Code.INVALID_ARGUMENT: (400, _INVALID),
    _Code.NOT_FOUND: (404, _INVALID),
    _Code.ALREADY_EXISTS: (409, _INVALID),
    _Code.FAILED_PRECONDITION: (400, _INVALID),
    _Code.UNIMPLEMENTED: (400, _INVALID),  # clients repeat a request after 501
    _Code.UNAUTHENTICATED: (401, "authentication_error"),
    _Code.PERMISSION_DENIED: (403, "permission_error"),
    _Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    _Code.ABORTED: (408, _INVALID),
    _Code.UNAVAILABLE: (503, _SERVER),
    _Code.DEADLINE_EXCEEDED: (504, _SERVER),
    _Code.INTERNAL: (500, _SERVER),
}
"""gRPC code to HTTP status and OpenAI's type of error."""

STATUSES_BY_REASON: Mapping[str, int] = {
    "IDLE_TIMEOUT": 408,
    "MESSAGE_TOO_LARGE": 413,
    "STORAGE_FULL": 507,
}
"""HTTP statuses that are more exact than that of the gRPC code."""

_INDEX = re.compile(r"(?<=pronunciations)\[\d+\]")

Names = Mapping[str, str]
"""Paths of proto fields to the names of the same fields in JSON."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """Error response: status, headers and the JSON object."""

    status: int
    headers: Mapping[str, str]
    value: Mapping[str, Any]

    @property
    def body(self) -> bytes:
        """Return the JSON object as bytes."""
        return json.dumps(self.value).encode()


def http_error(
    status: int,
    message: str,
    *,
    kind: str = _INVALID,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpError:
    """Return an error in OpenAI's shape."""
    value = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return HttpError(status, {"content-type": JSON, **(headers or {})}, value)


def error_of(status: RpcStatus, names: Names) -> HttpError:
    """Return the response for the status of a call; fields get their names in JSON."""
    number, kind = STATUSES[status.code]
    number = STATUSES_BY_REASON.get(status.reason, number)
    message, param, code = status.message, None, status.reason
    headers = {REQUEST_ID_KEY: status.request_id}
    for detail in status.details:
        match detail:
            case BadRequest(field_violations=found):
                param = json_name(found[0].field, names) or None
                message = "; ".join(_line(v.field, v.description, names) for v in found)
            case ErrorInfo(reason=reason):
                code = reason
            case RetryInfo(retry_delay=delay):
                headers |= retry_headers(delay.ToMilliseconds() / 1000)
    if status.code is _Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    if status.code is _Code.NOT_FOUND:
        param = code.removesuffix("_NOT_FOUND").lower()
    return http_error(number, message, kind=kind, param=param, code=code.lower(), headers=headers)


def retry_headers(seconds: float) -> dict[str, str]:
    """Return the headers that tell a client when to try again; the second is OpenAI's."""
    return {
        "retry-after": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, round(seconds * 1000))),
    }


def json_name(path: str, names: Names) -> str:
    """Return the name in JSON of a proto field or of the nearest field around it."""
    outer = path
    while outer:
        if outer in names:
            return names[outer]
        outer = outer[: max(outer.rfind("."), outer.rfind("["), 0)]
    return path


def _line(path: str, problem: str, names: Names) -> str:
    """Return a problem with the name of its field, and the index of an item in a list."""
    name, index = json_name(path, names), _INDEX.search(path)
    return f"{name}{index[0] if index else ''}: {problem}" if name else problem


def raw_response(error: HttpError) -> bytes:
    """Return a whole HTTP/1.1 response that closes the connection."""
    headers = {**error.headers, "content-length": str(len(error.body)), "connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + error.body
