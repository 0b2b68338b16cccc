"""Errors of the service: what a request can do wrong, and what the service can be too busy for.

The tree says *what* is wrong; `tts.status` is the one table from it (and from the errors of `llm`
and `decoder`) to gRPC codes. Messages say what to change and never hold a user's text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class TTSError(Exception):
    """Base of everything this package raises on purpose."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request, by its path in the proto message."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class InvalidRequestError(TTSError, ValueError):
    """Fields of a request are wrong: all that were found, at least one."""

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(map(str, violations)))
        self.violations = violations

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequestError:
        """The error for a single field."""
        return cls(FieldViolation(field, description))


class NotFoundError(TTSError, LookupError):
    """A request names something that does not exist here."""

    def __init__(self, kind: str, name: str, known: Iterable[str] = ()) -> None:
        self.kind, self.name = kind, name
        listed = ", ".join(sorted(known))
        super().__init__(f"no {kind} '{name}'" + (f"; there are: {listed}" if listed else ""))


class VoiceNotFoundError(NotFoundError):
    """The named voice is neither built in nor registered."""

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        super().__init__("voice", name, known)


class ModelNotFoundError(NotFoundError):
    """The named model is not served here."""

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        super().__init__("model", name, known)


class AdapterNotFoundError(NotFoundError):
    """The named LoRA adapter is not served here."""

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        super().__init__("adapter", name, known)


class VoiceExistsError(TTSError):
    """A voice of that name is there already (built-in ones cannot be replaced)."""


class Precondition(Enum):
    """What the served model lacks for a well-formed request (also the ErrorInfo reason)."""

    VOICE_CLONING = "VOICE_CLONING_UNAVAILABLE"
    VOICE_PROMPT = "VOICE_PROMPT_REQUIRED"
    WORD_TIMESTAMPS = "WORD_TIMESTAMPS_UNAVAILABLE"
    SPEECH = "SPEECH_UNAVAILABLE"
    TEXT_GENERATION = "TEXT_GENERATION_UNAVAILABLE"
    CHAT_TEMPLATE = "CHAT_TEMPLATE_UNAVAILABLE"
    EMBEDDING = "EMBEDDING_UNAVAILABLE"
    INSTRUCTIONS = "INSTRUCTIONS_UNAVAILABLE"
    PRONUNCIATION_ALPHABET = "PRONUNCIATION_ALPHABET_UNAVAILABLE"
    BUILTIN_VOICE = "BUILTIN_VOICE"
    VOICE_LIMIT = "VOICE_LIMIT_REACHED"


class PreconditionError(TTSError):
    """The request is well formed, but this server or model cannot do it."""

    def __init__(self, reason: Precondition, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotAvailableError(TTSError, NotImplementedError):
    """The wire contract has it, this release does not."""


class BusyError(TTSError):
    """No room now; `retry_after_s` estimates when there is some."""

    def __init__(self, message: str, *, subject: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.subject, self.retry_after_s = subject, retry_after_s


class ServerBusyError(BusyError):
    """Every running slot and every place in the queue is taken."""


class StreamLimitError(BusyError):
    """One client has as many calls open as a client may have."""


class StorageFullError(TTSError):
    """The disk has no room for what a request wants kept."""


class UnavailableError(TTSError):
    """The server is up, but takes no calls now."""

    retry_after_s = 1.0


class LoadingError(UnavailableError):
    """The model is still being loaded."""


class DrainingError(UnavailableError):
    """The server is shutting down; another one should be asked."""


class EngineLostError(UnavailableError):
    """The engine's process has gone, or does not answer; it is being restarted."""


class SlowReaderError(TTSError):
    """The client left a message unread for too long."""


class IdleTimeoutError(TTSError):
    """No text arrived on a streaming call for longer than its idle timeout."""


class PromptTimeoutError(TTSError):
    """A voice prompt took too long to read."""


class UnauthenticatedError(TTSError):
    """The call has no valid bearer token."""


class ForbiddenError(TTSError):
    """The token is valid, but not for this method."""


class SynthesisError(TTSError, RuntimeError):
    """The engine or the decoder failed while it worked on a valid request."""
