"""Table from every error of `llm`, `decoder` and `tts` to a gRPC status with details.

Details follow google.rpc: BadRequest names invalid fields, ErrorInfo gives a machine-readable
reason, RetryInfo the delay before a retry, QuotaFailure the subject of the exhausted quota. Errors
that are not in the table are bugs: they become INTERNAL without their message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

import decoder
import llm
from tts import errors

DOMAIN = "tts.v1"
DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key under which gRPC clients look for a `google.rpc.Status`."""
MAX_MESSAGE_BYTES, MAX_FIELD_BYTES, MAX_DESCRIPTION_BYTES, MAX_VIOLATIONS = 500, 100, 200, 12
"""Clients accept 8 KiB of metadata, percent-encoded and in base64; a longer status is lost."""

RETRY_UNAVAILABLE_S = 1.0


@dataclass(frozen=True, slots=True)
class StatusRule:
    """Mapping of one class of errors: the code, the details, and whether its message is public."""

    code: grpc.StatusCode
    reason: str
    details: Callable[[Exception], tuple[Message, ...]] = lambda _: ()
    shows_message: bool = True


@dataclass(frozen=True, slots=True)
class RpcStatus:
    """Status for a client: a code, a message, and the packed details."""

    code: grpc.StatusCode
    reason: str
    message: str
    details: tuple[Message, ...]
    request_id: str = ""

    def to_proto(self) -> Status:
        """Return this status as a google.rpc.Status."""
        packed = []
        for detail in self.details:
            packed.append(Any())
            packed[-1].Pack(detail)
        return Status(code=self.code.value[0], message=self.message, details=packed)


def _cut(text: str, max_bytes: int) -> str:
    return text.encode()[:max_bytes].decode(errors="ignore")


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(max(1, round(seconds * 1000)))
    return duration


def _bad_request(error: Exception) -> tuple[Message, ...]:
    violations = getattr(error, "violations", ()) or (errors.FieldViolation("", str(error)),)
    return (
        BadRequest(
            field_violations=[
                BadRequest.FieldViolation(
                    field=_cut(v.field, MAX_FIELD_BYTES),
                    description=_cut(v.description, MAX_DESCRIPTION_BYTES),
                )
                for v in violations[:MAX_VIOLATIONS]
            ]
        ),
    )


def _resource(error: Exception) -> tuple[Message, ...]:
    assert isinstance(error, errors.NotFoundError)
    return (
        _info(f"{error.kind.upper()}_NOT_FOUND", {error.kind: _cut(error.name, MAX_FIELD_BYTES)}),
    )


def _precondition(error: Exception) -> tuple[Message, ...]:
    assert isinstance(error, errors.PreconditionError)
    return (_info(error.reason.value),)


def _retry(error: Exception) -> tuple[Message, ...]:
    return (RetryInfo(retry_delay=_duration(getattr(error, "retry_after_s", RETRY_UNAVAILABLE_S))),)


def _quota(error: Exception) -> tuple[Message, ...]:
    subject = getattr(error, "subject", "server")
    violation = QuotaFailure.Violation(subject=subject, description=str(error))
    return (*_retry(error), QuotaFailure(violations=[violation]))


def _info(reason: str, metadata: Mapping[str, str] | None = None) -> ErrorInfo:
    return ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata or {})


_Code = grpc.StatusCode
RULES: Mapping[type[BaseException], StatusRule] = {
    # tts: the request
    errors.InvalidRequestError: StatusRule(_Code.INVALID_ARGUMENT, "INVALID_REQUEST", _bad_request),
    errors.MessageTooLargeError: StatusRule(
        _Code.INVALID_ARGUMENT, "MESSAGE_TOO_LARGE", _bad_request
    ),
    errors.PromptTimeoutError: StatusRule(
        _Code.INVALID_ARGUMENT, "PROMPT_AUDIO_TIMEOUT", _bad_request
    ),
    errors.NotFoundError: StatusRule(_Code.NOT_FOUND, "NOT_FOUND", _resource),
    errors.VoiceNotFoundError: StatusRule(_Code.NOT_FOUND, "VOICE_NOT_FOUND", _resource),
    errors.AdapterNotFoundError: StatusRule(_Code.NOT_FOUND, "ADAPTER_NOT_FOUND", _resource),
    errors.ModelNotFoundError: StatusRule(_Code.NOT_FOUND, "MODEL_NOT_FOUND", _resource),
    errors.VoiceExistsError: StatusRule(_Code.ALREADY_EXISTS, "VOICE_EXISTS"),
    errors.PreconditionError: StatusRule(
        _Code.FAILED_PRECONDITION, "FAILED_PRECONDITION", _precondition
    ),
    errors.NotAvailableError: StatusRule(_Code.UNIMPLEMENTED, "NOT_AVAILABLE"),
    errors.UnauthenticatedError: StatusRule(_Code.UNAUTHENTICATED, "UNAUTHENTICATED"),
    errors.ForbiddenError: StatusRule(_Code.PERMISSION_DENIED, "PERMISSION_DENIED"),
    # tts: temporary conditions
    errors.BusyError: StatusRule(_Code.RESOURCE_EXHAUSTED, "BUSY", _quota),
    errors.ServerBusyError: StatusRule(_Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", _quota),
    errors.StreamLimitError: StatusRule(_Code.RESOURCE_EXHAUSTED, "STREAM_LIMIT", _quota),
    errors.StorageFullError: StatusRule(_Code.RESOURCE_EXHAUSTED, "STORAGE_FULL"),
    errors.UnavailableError: StatusRule(_Code.UNAVAILABLE, "UNAVAILABLE", _retry),
    errors.LoadingError: StatusRule(_Code.UNAVAILABLE, "LOADING", _retry),
    errors.DrainingError: StatusRule(_Code.UNAVAILABLE, "DRAINING", _retry),
    errors.EngineLostError: StatusRule(_Code.UNAVAILABLE, "ENGINE_LOST", _retry),
    errors.SpeechServerLostError: StatusRule(_Code.UNAVAILABLE, "SPEECH_SERVER_LOST", _retry),
    errors.SlowReaderError: StatusRule(_Code.ABORTED, "SLOW_READER"),
    errors.IdleTimeoutError: StatusRule(_Code.DEADLINE_EXCEEDED, "IDLE_TIMEOUT"),
    # tts: internal errors
    errors.SynthesisError: StatusRule(_Code.INTERNAL, "SYNTHESIS_FAILED", shows_message=False),
    errors.TTSError: StatusRule(_Code.INTERNAL, "INTERNAL", shows_message=False),
    # llm
    llm.RequestError: StatusRule(_Code.INVALID_ARGUMENT, "INVALID_REQUEST", _bad_request),
    llm.CapacityError: StatusRule(_Code.INVALID_ARGUMENT, "REQUEST_TOO_LARGE", _bad_request),
    llm.QueueFullError: StatusRule(_Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", _quota),
    llm.EngineStoppedError: StatusRule(_Code.UNAVAILABLE, "ENGINE_STOPPED", _retry),
    llm.RanksLostError: StatusRule(_Code.UNAVAILABLE, "ENGINE_LOST", _retry),
    llm.ConfigError: StatusRule(_Code.INTERNAL, "CONFIGURATION", shows_message=False),
    llm.CheckpointError: StatusRule(_Code.INTERNAL, "CHECKPOINT", shows_message=False),
    llm.LLMError: StatusRule(_Code.INTERNAL, "INTERNAL", shows_message=False),
    # decoder
    decoder.AudioFormatError: StatusRule(_Code.INVALID_ARGUMENT, "BAD_AUDIO", _bad_request),
    decoder.CodeRangeError: StatusRule(_Code.INVALID_ARGUMENT, "CODE_OUT_OF_RANGE", _bad_request),
    decoder.EncoderUnavailableError: StatusRule(_Code.FAILED_PRECONDITION, "VOICE_CLONING"),
    decoder.DecoderConfigError: StatusRule(_Code.INTERNAL, "DECODER", shows_message=False),
    decoder.DecoderError: StatusRule(_Code.INTERNAL, "DECODER", shows_message=False),
    # Python
    asyncio.TimeoutError: StatusRule(_Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
}
_UNKNOWN = StatusRule(_Code.INTERNAL, "INTERNAL", shows_message=False)


FORWARDED = frozenset(
    {
        _Code.NOT_FOUND,
        _Code.FAILED_PRECONDITION,
        _Code.UNIMPLEMENTED,
        _Code.RESOURCE_EXHAUSTED,
        _Code.ABORTED,
        _Code.DEADLINE_EXCEEDED,
    }
)
"""Codes of a speech server that concern the request of this server's client."""


class ForwardedError(errors.TTSError):
    """Error for a status of the speech server that this server's client gets, too."""

    def __init__(self, status: RpcStatus) -> None:
        super().__init__(status.message)
        self.status = status


def error_of_call(error: grpc.aio.AioRpcError) -> errors.TTSError:
    """Return the error for a call that the speech server refused or did not finish.

    Fields of its StreamingSynthesize are those of GenerateSpeech without the outermost name. What
    concerns the connection of both servers is SpeechServerLostError, also a wrong token.
    """
    code, message = error.code(), error.details() or ""
    details = _details_of(error)
    wrong = next((d for d in details if isinstance(d, BadRequest)), None)
    if wrong is not None and code is _Code.INVALID_ARGUMENT:
        return errors.InvalidRequestError(
            *(
                errors.FieldViolation(v.field.removeprefix("config."), v.description)
                for v in wrong.field_violations
            )
        )
    info = next((d for d in details if isinstance(d, ErrorInfo) and d.domain == DOMAIN), None)
    if info is not None and info.reason == "STREAM_LIMIT":
        return errors.ServerBusyError(
            "the speech server takes no more calls of this server; try again later",
            subject="server",
            retry_after_s=RETRY_UNAVAILABLE_S,
        )
    if info is not None and code in FORWARDED:
        return ForwardedError(RpcStatus(code, info.reason, message, details))
    # gRPC itself reports INTERNAL, too: for a write when the connection has just been lost.
    if info is not None and code is _Code.INTERNAL:
        return errors.SynthesisError(f"the speech server: {message}")
    return errors.SpeechServerLostError(f"the speech server cannot be used: {code.name}")


def _details_of(error: grpc.aio.AioRpcError) -> tuple[Message, ...]:
    """Return the details of a call's status that this server uses itself."""
    found: list[Message] = []
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            with suppress(DecodeError):
                for packed in Status.FromString(value).details:
                    for kind in (BadRequest, ErrorInfo, RetryInfo, QuotaFailure):
                        detail = kind()
                        if packed.Unpack(detail):
                            found.append(detail)
    return tuple(found)


def rule_of(error_type: type[BaseException]) -> StatusRule:
    """Return the rule of the nearest base class in the table; INTERNAL if there is none."""
    return next((RULES[base] for base in error_type.__mro__ if base in RULES), _UNKNOWN)


def status_of(error: Exception, request_id: str = "") -> RpcStatus:
    """Return the status of an error; its details always include ErrorInfo."""
    if isinstance(error, ForwardedError):
        return replace(error.status, request_id=request_id)
    rule = rule_of(type(error))
    details = rule.details(error)
    if not any(isinstance(detail, ErrorInfo) for detail in details):
        details = (_info(rule.reason), *details)
    for detail in details:
        if isinstance(detail, ErrorInfo) and request_id:
            detail.metadata["request_id"] = request_id
    message = str(error) if rule.shows_message else "the request failed inside the server"
    return RpcStatus(rule.code, rule.reason, _cut(message, MAX_MESSAGE_BYTES), details, request_id)
