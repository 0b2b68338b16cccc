"""Random messages to every method of every service, over gRPC to a real server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.fuzz.base import Case, InvariantError, Target
from tests.fuzz.clips import valid_clips
from tests.fuzz.messages import Maker
from tests.fuzz.server import Served, served
from tts.riva.stubs import tts_pb2
from tts.server.call import REQUEST_ID_KEY
from tts.v1 import speech_pb2, text_pb2

FILES: tuple[FileDescriptor, ...] = (
    speech_pb2.DESCRIPTOR,
    text_pb2.DESCRIPTOR,
    tts_pb2.DESCRIPTOR,
    health_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
)
OWN = ("/tts.v1.", "/nvidia.riva.")
OWN_WEIGHT = 8  # weight of a method of this project, against one of health and reflection
MAX_RESPONSES = 300
BUGS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.UNAVAILABLE,
    }
)
VALUES = ("", "Bearer x", "00-" + "0" * 32 + "-" + "f" * 16 + "-01", "a" * 2000, "gzip", "1S")
KEYS = ("authorization", "traceparent", "x-request-id", "grpc-accept-encoding", "user", "cookie")


@dataclass(frozen=True, slots=True)
class Method:
    """One method, with the type of its requests."""

    path: str
    request: Descriptor
    takes_many: bool


def methods() -> tuple[Method, ...]:
    """Return all methods of all services in their descriptors."""
    return tuple(
        Method(
            f"/{service.full_name}/{method.name}",
            method.input_type,
            method.client_streaming,
        )
        for file in FILES
        for service in file.services_by_name.values()
        for method in service.methods
    )


class Caller:
    """Makes calls to one server and checks their ends."""

    def __init__(self, server: Served) -> None:
        self._server, self._methods = server, methods()
        self._maker = Maker(valid_clips(1.2))
        self._weights = [OWN_WEIGHT if m.path.startswith(OWN) else 1 for m in self._methods]

    def try_one(self, chance: Random) -> None:
        """Make one call."""
        (method,) = chance.choices(self._methods, self._weights)
        count = chance.choice((1, 2, 3, 8)) if method.takes_many else 1
        count = chance.choice((0, 2, 5)) if chance.random() < 0.03 else count
        bodies = [self._maker.body(method.request, chance, first=not i) for i in range(count)]
        metadata = [(key, chance.choice(VALUES)) for key in KEYS if chance.random() < 0.1]
        limit = 0 if chance.random() < 0.05 else MAX_RESPONSES
        self._call(method, bodies, metadata, limit, chance.choice((0.3, 1.0, 3.0)))

    def _call(
        self,
        method: Method,
        bodies: Sequence[bytes],
        metadata: Sequence[tuple[str, str]],
        limit: int,
        timeout_s: float,
    ) -> None:
        stub: Any = self._server.channel.stream_stream(method.path)
        call = stub(iter(bodies), timeout=timeout_s, metadata=metadata, wait_for_ready=True)
        try:
            for _ in islice(call, limit):
                pass
            call.cancel()
        except grpc.RpcError:
            pass
        self._check(method, call.code(), call.details(), dict(call.trailing_metadata() or ()))

    def _check(
        self, method: Method, code: grpc.StatusCode, details: str, trailers: dict[str, Any]
    ) -> None:
        self._server.check()
        if code in BUGS:
            raise InvariantError(f"{method.path}: {code.name}: {details}")
        request_id = trailers.get(REQUEST_ID_KEY)
        if request_id is None and code is grpc.StatusCode.OK and method.path.startswith(OWN):
            raise InvariantError(f"{method.path}: OK without {REQUEST_ID_KEY}")
        logged = {ended for name, ended in self._server.ended if name == request_id}
        is_ours = code is grpc.StatusCode.CANCELLED  # which may arrive after the server's own end
        if request_id is not None and not (logged if is_ours else code.name in logged):
            raise InvariantError(f"{method.path}: {code.name} of {request_id} was not logged")


@contextmanager
def _opened(folder: Path) -> Iterator[Case]:
    with served(folder) as server:
        yield Caller(server).try_one
        server.check_at_end()


RPCS = Target("rpcs", _opened)
