"""Errors of the service: invalid requests, missing features, and lack of capacity.

`tts.server.status` maps these classes, and the errors of `llm` and `decoder`, to gRPC codes.
Messages say what to change and never contain a user's text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class TTSError(Exception):
    """Base class of the errors of this package."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """Invalid field of a request, by its path in the proto message."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class InvalidRequestError(TTSError, ValueError):
    """Error for one or more invalid fields of a request."""

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(map(str, violations)))
        self.violations = violations

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequestError:
        """Return the error for a single field."""
        return cls(FieldViolation(field, description))


class MessageTooLargeError(InvalidRequestError):
    """Error for a message or a body that is larger than the server receives."""


class NotFoundError(TTSError, LookupError):
    """Error for a name in a request that is not known here."""

    def __init__(self, kind: str, name: str, known: Iterable[str] = ()) -> None:
        self.kind, self.name = kind, name
        listed = ", ".join(sorted(known))
        super().__init__(f"no {kind} '{name}'" + (f"; there are: {listed}" if listed else ""))


class VoiceNotFoundError(NotFoundError):
    """Error for a voice that is neither built in nor registered."""

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        super().__init__("voice", name, known)


class ModelNotFoundError(NotFoundError):
    """Error for a model that is not served here."""

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        super().__init__("model", name, known)


class AdapterNotFoundError(NotFoundError):
    """Error for a LoRA adapter that is not served here."""

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        super().__init__("adapter", name, known)


class VoiceExistsError(TTSError):
    """Error for a voice whose name is taken; built-in voices cannot be replaced."""


class Precondition(Enum):
    """Feature that the served model lacks for a request; the value is the ErrorInfo reason."""

    VOICE_CLONING = "VOICE_CLONING_UNAVAILABLE"
    VOICE_PROMPT = "VOICE_PROMPT_REQUIRED"
    WORD_TIMESTAMPS = "WORD_TIMESTAMPS_UNAVAILABLE"
    SPEECH = "SPEECH_UNAVAILABLE"
    TEXT_GENERATION = "TEXT_GENERATION_UNAVAILABLE"
    CHAT_TEMPLATE = "CHAT_TEMPLATE_UNAVAILABLE"
    EMBEDDING = "EMBEDDING_UNAVAILABLE"
    INSTRUCTIONS = "INSTRUCTIONS_UNAVAILABLE"
    BUILTIN_VOICE = "BUILTIN_VOICE"
    VOICE_LIMIT = "VOICE_LIMIT_REACHED"
    VOICE_CODEC = "VOICE_OF_ANOTHER_CODEC"
    VOICE_BLEND = "VOICE_BLEND_UNAVAILABLE"


class PreconditionError(TTSError):
    """Error for a valid request that this server or model cannot serve."""

    def __init__(self, reason: Precondition, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotAvailableError(TTSError, NotImplementedError):
    """Error for a part of the protocol that this release does not implement."""


class BusyError(TTSError):
    """Base class for exceeded capacity; `retry_after_s` estimates when there is capacity again."""

    def __init__(self, message: str, *, subject: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.subject, self.retry_after_s = subject, retry_after_s


class ServerBusyError(BusyError):
    """Error when all slots for running calls and the queue are full."""


class StreamLimitError(BusyError):
    """Error for a client that has reached its limit of open calls."""


class StorageFullError(TTSError):
    """Error when the disk has no space for a voice that a request creates."""


class UnavailableError(TTSError):
    """Error of a running server that does not accept calls at present."""

    retry_after_s = 1.0


class LoadingError(UnavailableError):
    """Error while the model is loaded."""


class DrainingError(UnavailableError):
    """Error while the server shuts down; clients should use another server."""


class EngineLostError(UnavailableError):
    """Error when the engine's process has exited or hangs; it is being restarted."""


class SpeechServerLostError(UnavailableError):
    """Error when the speech server does not answer, or does not accept this server's calls."""


class SlowReaderError(TTSError):
    """Error for a client that left a message unread for too long."""


class IdleTimeoutError(TTSError):
    """Error for a streaming call without text for longer than its idle timeout."""


class PromptTimeoutError(TTSError):
    """Error for a voice prompt that took too long to read."""


class UnauthenticatedError(TTSError):
    """Error for a call without a valid bearer token."""


class ForbiddenError(TTSError):
    """Error for a token that is valid, but not for this method."""


class SynthesisError(TTSError, RuntimeError):
    """Error for a failure of the engine or the decoder during a valid request."""
