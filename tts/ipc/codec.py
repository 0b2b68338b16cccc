"""Codec of messages: MessagePack, validated against the messages' types when decoded.

The values of `llm`, `decoder` and `tts` in messages are dataclasses that the codec encodes by their
annotations, so a new field needs no change here.
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
"""Types of arrays in messages, by item size in bytes: float32 or int16 [S]."""


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
        if size not in SAMPLES or not isinstance(data, bytes):  # bytearray(int) would allocate
            raise ValueError("invalid samples")
        return np.frombuffer(bytearray(data), SAMPLES[size])  # a writable copy
    if kind is Fraction:
        return Fraction(*value)
    raise NotImplementedError(f"{kind.__name__} does not cross processes")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_from_front_end = msgspec.msgpack.Decoder(FrontEndMessage, dec_hook=_from_plain)
_from_engine = msgspec.msgpack.Decoder(list[EngineMessage], dec_hook=_from_plain)


def encode(message: Message) -> bytes:
    """Return the message's bytes."""
    return _encoder.encode(message)


def decode_from_front_end(data: bytes) -> FrontEndMessage:
    """Decode a front end's message. Raises msgspec.ValidationError or DecodeError."""
    try:
        return _from_front_end.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # not caught by msgspec
        raise msgspec.DecodeError(str(error)) from error


def bundle(messages: Sequence[bytes]) -> bytes:
    """Return encoded messages of the engine as one list, for `decode_from_engine`."""
    return _encoder.encode([msgspec.Raw(message) for message in messages])


def decode_from_engine(data: bytes) -> list[EngineMessage]:
    """Decode the engine's messages. Raises msgspec.ValidationError or DecodeError."""
    return _from_engine.decode(data)


def _tree(root: type[ErrorT]) -> list[type[ErrorT]]:
    return [root, *(found for child in root.__subclasses__() for found in _tree(child))]


_PLAIN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for root in (LLMError, DecoderError, errors.TTSError)
    for kind in _tree(root)
    if isinstance(kind.__init__, WrapperDescriptorType)  # no constructor of its own
}
"""Errors whose only argument is the message."""
_BUSY = {kind.__name__: kind for kind in _tree(errors.BusyError)}


def to_error_value(error: Exception) -> ErrorValue:
    """Return an error as a value; an error of another library becomes a SynthesisError."""
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
    for kind in type(error).__mro__:  # an unknown class is sent as its nearest known base class
        if kind.__name__ in _PLAIN:
            return ErrorValue(kind.__name__, str(error))
    return ErrorValue(errors.SynthesisError.__name__, f"the engine failed: {error!r}")


def from_error_value(value: ErrorValue) -> Exception:
    """Return the error of a value, with the same class and message."""
    if value.kind == errors.PreconditionError.__name__:
        return errors.PreconditionError(errors.Precondition(value.reason), value.message)
    if value.kind in _BUSY:
        return _BUSY[value.kind](
            value.message, subject=value.subject, retry_after_s=value.retry_after_s
        )
    return _PLAIN.get(value.kind, errors.SynthesisError)(value.message)
