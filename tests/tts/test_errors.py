"""The table from errors to statuses: complete, with the details that clients act on."""

from __future__ import annotations

import pkgutil
from base64 import b64encode
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from urllib.parse import quote

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo

import decoder
import llm
import tts
from decoder import AudioFormatError, DecoderError
from llm import LLMError, RequestError
from tts import errors
from tts.errors import (
    AdapterNotFoundError,
    FieldViolation,
    InvalidRequestError,
    ModelNotFoundError,
    Precondition,
    PreconditionError,
    ServerBusyError,
    SynthesisError,
    TTSError,
    VoiceNotFoundError,
)
from tts.server.call import CallError
from tts.server.status import RULES, ForwardedError, rule_of, status_of

ROOTS: dict[type[Exception], str] = {LLMError: "llm", DecoderError: "decoder", TTSError: "tts"}
COMMAND_LINE_ONLY = {
    "tts.checkpoint.hub",
    "tts.cli.player",
    "tts.processes.supervisor",
    "tts.cli.client",
    "tts.cli.options",
}
"""Modules whose errors end a command, never a call."""


def modules_of(package: ModuleType) -> Iterator[ModuleType]:
    yield package
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__") and not _is_missing(found.name):
            yield import_module(found.name)


def _is_missing(name: str) -> bool:
    """Return whether a module needs a package of an extra; such modules define no errors."""
    needs = {"llm.attention.flashinfer": "flashinfer", "tts.cluster": "ray"}
    return any(find_spec(needs[start]) is None for start in needs if name.startswith(start))


def exception_classes() -> set[type[Exception]]:
    """Return every exception class that the three packages define, without that of a status."""
    return {
        value
        for package in (llm, decoder, tts)
        for module in modules_of(package)
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Exception)
        and value.__module__.split(".")[0] in ROOTS.values()
        and value is not CallError
    }


def test_every_error_of_every_package_has_a_status() -> None:
    """An error is mapped by itself or by a parent below its package's base class."""
    classes = exception_classes() - {
        c for c in exception_classes() if c.__module__ in COMMAND_LINE_ONLY
    }
    assert len(classes) > 25
    for error in classes - {ForwardedError}:  # it has a status itself
        mapped = next((base for base in error.__mro__ if base in RULES), None)
        assert mapped is not None, f"{error.__module__}.{error.__name__} is not in RULES"
        is_base = error in ROOTS
        assert is_base or mapped not in ROOTS, f"{error.__name__} is mapped by its base only"


def test_every_error_belongs_to_its_packages_tree() -> None:
    for error in exception_classes():
        package = error.__module__.split(".")[0]
        root = next(base for base, name in ROOTS.items() if name == package)
        assert issubclass(error, root) or error.__module__ in COMMAND_LINE_ONLY, error


def test_reasons_are_upper_snake_case() -> None:
    reasons = {rule.reason for rule in RULES.values()} | {p.value for p in Precondition}
    assert all(r.isascii() and r == r.upper() and " " not in r for r in reasons)


def unpack(error: Exception) -> dict[type, list]:
    """A status's details, as a client unpacks them."""
    kinds = (BadRequest, ErrorInfo, QuotaFailure, RetryInfo)
    found: dict[type, list] = {kind: [] for kind in kinds}
    for packed in status_of(error, "id-1").to_proto().details:
        kind = next(kind for kind in kinds if packed.Is(kind.DESCRIPTOR))
        found[kind].append(kind.FromString(packed.value))
    return found


def test_wrong_fields_are_named() -> None:
    error = InvalidRequestError(FieldViolation("a.b", "is bad"), FieldViolation("c", "is worse"))
    status = status_of(error)
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT
    assert status.message == "a.b: is bad; c: is worse"
    (bad,) = unpack(error)[BadRequest]
    assert [(v.field, v.description) for v in bad.field_violations] == [
        ("a.b", "is bad"),
        ("c", "is worse"),
    ]


@pytest.mark.parametrize("error", [RequestError("too long"), AudioFormatError("no audio")])
def test_errors_of_the_core_about_requests_are_the_clients(error: Exception) -> None:
    assert status_of(error).code is grpc.StatusCode.INVALID_ARGUMENT
    (bad,) = unpack(error)[BadRequest]
    assert bad.field_violations[0].description == str(error)


@pytest.mark.parametrize(
    ("error", "reason", "key"),
    [
        (VoiceNotFoundError("x", ["hazel"]), "VOICE_NOT_FOUND", "voice"),
        (ModelNotFoundError("x"), "MODEL_NOT_FOUND", "model"),
        (AdapterNotFoundError("x"), "ADAPTER_NOT_FOUND", "adapter"),
    ],
)
def test_not_found_errors_name_the_resource(error: Exception, reason: str, key: str) -> None:
    assert status_of(error).code is grpc.StatusCode.NOT_FOUND
    (info,) = unpack(error)[ErrorInfo]
    assert (info.reason, info.domain, info.metadata[key]) == (reason, "tts.v1", "x")
    assert info.metadata["request_id"] == "id-1"


def test_a_busy_error_has_a_retry_delay() -> None:
    error = ServerBusyError("full", subject="server", retry_after_s=2.5)
    assert status_of(error).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = unpack(error)
    assert details[RetryInfo][0].retry_delay.ToMilliseconds() == 2500
    assert details[QuotaFailure][0].violations[0].subject == "server"
    assert details[ErrorInfo][0].reason == "QUEUE_FULL"


@pytest.mark.parametrize("precondition", list(Precondition))
def test_preconditions_carry_their_reason(precondition: Precondition) -> None:
    error = PreconditionError(precondition, "cannot")
    assert status_of(error).code is grpc.StatusCode.FAILED_PRECONDITION
    assert unpack(error)[ErrorInfo][0].reason == precondition.value


@pytest.mark.parametrize("error", [errors.LoadingError("x"), errors.DrainingError("x")])
def test_unavailable_errors_have_a_retry_delay(error: Exception) -> None:
    assert status_of(error).code is grpc.StatusCode.UNAVAILABLE
    assert unpack(error)[RetryInfo]


@pytest.mark.parametrize("error", [SynthesisError("/secret/path"), KeyError("/secret/path")])
def test_internal_errors_do_not_leak(error: Exception) -> None:
    status = status_of(error, "id-1")
    assert status.code is grpc.StatusCode.INTERNAL
    assert "secret" not in status.to_proto().SerializeToString().decode("utf-8", "replace")
    assert unpack(error)[ErrorInfo][0].metadata["request_id"] == "id-1"


def test_subclasses_inherit_a_rule() -> None:
    class SpecialError(VoiceNotFoundError):
        """An error class that is not in the table."""

    assert rule_of(SpecialError) is RULES[VoiceNotFoundError]


def test_long_messages_fit_into_metadata() -> None:
    """The limit is for the percent-encoded message and base64 details together."""
    violations = (FieldViolation(f"field{n}" * 50, "é" * 600) for n in range(200))
    status = status_of(InvalidRequestError(*violations), "i" * 128)
    on_the_wire = quote(status.message) + b64encode(status.to_proto().SerializeToString()).decode()
    assert 4000 < len(on_the_wire) < 7500
