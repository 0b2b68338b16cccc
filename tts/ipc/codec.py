"""Messages to bytes and back: MessagePack, checked against the messages' types when it is read.

The values of `llm`, `decoder` and `tts` inside are dataclasses that the codec reads from their
annotations, so a field that is added there crosses without a change here.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from types import WrapperDescriptorType
from typing import Any, TypeVar

import msgspec
import numpy as np

from decoder import DecoderError
from llm import LLMError
from tts import errors
from tts.ipc.messages import EngineMessage, ErrorValue, FrontEndMessage, Message

ErrorT = TypeVar("ErrorT", bound=Exception)

SAMPLES: dict[int, np.dtype[Any]] = {4: np.dtype("<f4"), 2: np.dtype("<i2")}
"""What crosses of arrays, by the bytes of a number: float32 or int16 [S]."""


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        kind = SAMPLES[2 if value.dtype == np.int16 else 4]
        return kind.itemsize, np.ascontiguousarray(value, kind).data
    if isinstance(value, Fraction):
        return value.numerator, value.denominator
    raise NotImplementedError(f"{type(value).__name__} does not cross processes")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        size, data = value
        if size not in SAMPLES or not isinstance(data, bytes):  # a bytearray of an int is so long
            raise ValueError("these are no samples")
        return np.frombuffer(bytearray(data), SAMPLES[size])  # writable, as arrays are
    if kind is Fraction:
        return Fraction(*value)
    raise NotImplementedError(f"{kind.__name__} does not cross processes")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_from_front_end = msgspec.msgpack.Decoder(FrontEndMessage, dec_hook=_from_plain)
_from_engine = msgspec.msgpack.Decoder(list[EngineMessage], dec_hook=_from_plain)


def encode(message: Message) -> bytes:
    """The message's bytes."""
    return _encoder.encode(message)


def decode_from_front_end(data: bytes) -> FrontEndMessage:
    """What a front end sent; msgspec.ValidationError or DecodeError for anything else."""
    try:
        return _from_front_end.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # which msgspec lets through
        raise msgspec.DecodeError(str(error)) from error


def bundle(messages: Sequence[bytes]) -> bytes:
    """Encoded messages of the engine as one value: what `decode_from_engine` takes."""
    return _encoder.encode([msgspec.Raw(message) for message in messages])


def decode_from_engine(data: bytes) -> list[EngineMessage]:
    """What the engine sent; msgspec.ValidationError or DecodeError for anything else."""
    return _from_engine.decode(data)


def _tree(root: type[ErrorT]) -> list[type[ErrorT]]:
    return [root, *(found for child in root.__subclasses__() for found in _tree(child))]


_PLAIN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for root in (LLMError, DecoderError, errors.TTSError)
    for kind in _tree(root)
    if isinstance(kind.__init__, WrapperDescriptorType)  # Python's own constructor
}
"""Errors that are made of their message alone."""
_BUSY = {kind.__name__: kind for kind in _tree(errors.BusyError)}


def to_error_value(error: Exception) -> ErrorValue:
    """An error as a value; one that is none of ours is told as a failure of the engine."""
    match error:
        case errors.PreconditionError():
            return ErrorValue(type(error).__name__, str(error), reason=error.reason.value)
        case errors.BusyError():
            return ErrorValue(
                type(error).__name__,
                str(error),
                subject=error.subject,
                retry_after_s=error.retry_after_s,
            )
    for kind in type(error).__mro__:  # one that is not known here crosses as what it is a kind of
        if kind.__name__ in _PLAIN:
            return ErrorValue(kind.__name__, str(error))
    return ErrorValue(errors.SynthesisError.__name__, f"the engine failed: {error!r}")


def from_error_value(value: ErrorValue) -> Exception:
    """The error again, of the same class and with the same words."""
    if value.kind == errors.PreconditionError.__name__:
        return errors.PreconditionError(errors.Precondition(value.reason), value.message)
    if value.kind in _BUSY:
        return _BUSY[value.kind](
            value.message, subject=value.subject, retry_after_s=value.retry_after_s
        )
    return _PLAIN.get(value.kind, errors.SynthesisError)(value.message)
